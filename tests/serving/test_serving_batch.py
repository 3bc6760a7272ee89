"""The batch of an engine, driven step by step: who joins and leaves when, what a long prompt holds up, who errs."""

import itertools

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import cache_of, result_of, steps_of
from serving_toys import (
    LLAMA,
    METHODS,
    PAPER,
    Driven,
    FailingCriterion,
    FailsAt,
    check_overflow,
    new_tokens,
    random_ids,
)
from spies import failing, watched

from lade import InputError, LookaheadConfig, Memory
from lade.config import resolve
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.drafter import ForwardingDrafter
from lade.hf import job
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.serving.capacity import Capacity, Need, largest_tree
from lade.serving.request import PLAIN
from lade.serving.running import RunningSet

GREEDY = {"do_sample": False}


@pytest.fixture
def passes(monkeypatch):
    """Shapes of the trees of each step: rows, and nodes of the largest one."""

    def see(runner, trees, rows, cache):
        return (len(trees), max(map(len, trees)))

    return watched(monkeypatch, EagerRunner, "forward", see)


# --- joining and leaving ---------------------------------------------------------------------------------------------


def test_rows_join_and_leave_between_steps(passes):
    driven = Driven(LLAMA)
    driven.add(random_ids(5), None, max_new_tokens=6)
    driven.advance(2)
    driven.add(random_ids(5, seed=1), None, max_new_tokens=9)
    driven.finish()
    assert [rows for rows, _ in passes] == [1, 1, 2, 2, 2, 1, 1, 1, 1, 1]


def test_one_pass_serves_rows_of_all_methods(passes):
    driven = Driven(LLAMA)
    handles = [driven.add(random_ids(6, seed), method, max_new_tokens=30) for seed, method in enumerate(METHODS)]
    driven.advance()
    assert passes == [(len(METHODS), max(size for _, size in passes))]
    driven.finish()
    assert handles[0].stats.step_tokens == [1] * 29 and handles[0].stats.tokens_per_step == 1
    assert any(handle.stats.tokens_per_step > 1 for handle in handles[1:])


def test_requests_share_the_memory_that_is_given():
    driven, config = Driven(LLAMA), LookaheadConfig(budget=16, memory=Memory())
    handles = []
    for _ in range(2):
        handles.append(driven.add(random_ids(8), config, max_new_tokens=80))
        driven.finish()
    assert handles[1].stats.steps < 0.7 * handles[0].stats.steps


def test_a_text_of_one_token_never_takes_part_in_a_step(passes):
    driven = Driven(LLAMA)
    handle = driven.add(random_ids(5), max_new_tokens=1)
    driven.advance()
    assert passes == [] and driven.batch.idle and len(new_tokens(handle, random_ids(5))) == 1
    assert cache_of(driven.batch).room == (0, 0)


# --- prefill ---------------------------------------------------------------------------------------------------------


def test_between_two_pieces_of_a_prompt_the_others_make_a_step(passes):
    driven = Driven(LLAMA, prefill_tokens=4)
    others = [driven.add(random_ids(3, seed), None, max_new_tokens=40) for seed in range(2)]
    driven.advance(2)
    before = [len(handle.tokens) for handle in others]
    long = driven.add(random_ids(22, seed=5), None, max_new_tokens=3)
    pieces = 0
    while not long.tokens:
        driven.advance()
        pieces += 1
        assert [len(handle.tokens) for handle in others] == [count + pieces for count in before]
    assert pieces == 6, "22 tokens, 4 at a time"
    driven.finish()


def test_no_more_of_prompts_is_fed_between_two_steps_than_there_may_be(fed):
    driven = Driven(LLAMA, prefill_tokens=7)
    for seed, length in enumerate((2, 3, 9, 1, 1, 20)):
        driven.add(random_ids(length, seed), max_new_tokens=30)
    of_steps = []
    for _ in range(6):
        fed.clear()
        driven.advance()
        of_steps.append(list(fed))
    assert of_steps == [[(2, 3)], [(1, 7)], [(1, 2), (2, 1)], [(1, 7)], [(1, 7)], [(1, 6)]]


def test_a_memory_learns_the_prompt_alike_in_pieces_and_at_once(monkeypatch):
    """What prefill says about the prompt is shown once for each of its tokens, whatever the pieces."""
    shown, told = [], watched(monkeypatch, AdaptiveDrafter, "learn_prompt", lambda drafter, *given: given)
    for piece in (4, 512):
        told.clear()
        driven = Driven(LLAMA, prefill_tokens=piece)
        driven.add(random_ids(14), LookaheadConfig(budget=8), max_new_tokens=3)
        driven.finish()
        shown.append([each for _, start, rows in told for each in enumerate(rows.tolist(), start)])
    assert [number for number, _ in shown[0]] == list(range(14)) and shown[0] == shown[1]


# --- waiting, and room -----------------------------------------------------------------------------------------------


def test_requests_that_fit_later_wait_and_are_served_in_order():
    """The second one needs the whole cache; the third, which would fit now, does not overtake it."""
    driven = Driven(LLAMA, max_tokens=100)
    first = driven.add(random_ids(5), None, max_new_tokens=20)
    large = driven.add(random_ids(5, seed=1), None, max_new_tokens=93)
    small = driven.add(random_ids(5, seed=2), None, max_new_tokens=2)
    driven.advance()
    assert first.tokens and not large.tokens and not small.tokens
    while not first.done():
        assert not large.tokens and not small.tokens
        driven.advance()
    while not large.done():
        assert not small.tokens
        driven.advance()
    driven.finish()
    assert small.done()


@settings(max_examples=examples(8))
@given(
    max_tokens=st.integers(150, 900),
    prefill_tokens=st.sampled_from([2, 512]),
    requests=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 60),
            st.sampled_from([None, "auto", PAPER, LookaheadConfig(budget=3), LookaheadConfig(12, 5, 12)]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_the_cache_never_takes_more_than_it_may(max_tokens, prefill_tokens, requests):
    """`Driven` looks after each step, and this looks inside of each, after the pass has fed its trees."""
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch, TreeCache, "keep", lambda cache, paths, fed: cache.room[0] * cache.room[1])
        driven, handles = Driven(LLAMA, prefill_tokens=prefill_tokens, max_tokens=max_tokens), []
        for seed, (length, new, method) in enumerate(requests):
            try:
                handles.append(driven.add(random_ids(length, seed), method, max_new_tokens=new))
            except InputError:
                assert length + new + largest_tree(resolve(method)[0] or PLAIN) > max_tokens
        driven.finish(expected=False)
    assert all(slots <= max_tokens for slots in seen)


@settings(max_examples=examples(12))
@given(
    config=st.one_of(
        st.builds(LookaheadConfig, window=st.integers(0, 20), ngram=st.integers(2, 7), guesses=st.integers(0, 20)),
        st.builds(LookaheadConfig, budget=st.one_of(st.none(), st.integers(1, 300))),
    )
)
def test_no_tree_is_larger_than_is_reckoned_with(config):
    with pytest.MonkeyPatch.context() as patch:
        sizes = watched(patch, EagerRunner, "forward", lambda runner, trees, *_: max(map(len, trees)))
        driven = Driven(LLAMA)
        driven.add(random_ids(12), config, max_new_tokens=25)
        driven.finish()
    assert max(sizes) <= largest_tree(config)


def test_a_request_that_is_too_long_is_told_the_numbers():
    driven = Driven(LLAMA, max_tokens=140)
    size = driven.batch.running.capacity.token_bytes
    assert size == 2 * 2 * 2 * 8 * 8, "layers, keys and values, heads, their size, bytes of float64"
    with pytest.raises(
        InputError,
        match=rf"^30 tokens of prompt and answer need a cache of 158 with a step's drafts, at {size} bytes each "
        r"0\.1 MiB; there is room for 140 \(0\.1 MiB\): give a smaller max_new_tokens, or the engine a larger max_",
    ):
        driven.add(random_ids(10), "auto", max_new_tokens=20)
    driven.add(random_ids(10), None, max_new_tokens=20)
    driven.add(random_ids(10), LookaheadConfig(budget=110), max_new_tokens=20)
    with pytest.raises(InputError, match="need a cache of 141"):
        driven.add(random_ids(10), LookaheadConfig(budget=111), max_new_tokens=20)


needs = st.lists(st.builds(Need, st.integers(1, 300), st.integers(1, 128)), min_size=1, max_size=9)


@given(needs, st.integers(1, 8), st.integers(1, 3000), st.data())
def test_room_for_texts_that_fit_is_enough_and_not_too_much(texts, max_rows, max_tokens, data):
    capacity = Capacity(max_rows, max_tokens, 1)
    if not capacity.fits(texts):
        assert len(texts) > max_rows or len(texts) * capacity.slots(texts) > max_tokens
        return
    now = data.draw(st.integers(1, max(need.tokens for need in texts)))
    room = capacity.room(texts, now)
    assert capacity.suffices(room, texts, now)
    assert len(texts) <= room[0] <= max_rows and room[0] * room[1] <= max_tokens and room[1] <= capacity.slots(texts)
    most = capacity.longest(room[1], texts)
    assert most >= now and capacity.suffices(room, texts, most) and not capacity.suffices(room, texts, most + 1)


def test_room_is_looked_at_when_rows_come_and_go_and_have_grown(monkeypatch):
    """Not at every step: it takes as long as a good part of a small model's pass."""
    looks = watched(monkeypatch, RunningSet, "growth", lambda running: len(running.decoding))
    driven = Driven(LLAMA)
    driven.add(random_ids(5), None, max_new_tokens=60)
    driven.advance(20)
    assert len(looks) <= 2
    driven.add(random_ids(4), None, max_new_tokens=60)
    driven.advance(20)
    assert looks[-1] == 2 and len(looks) <= 4


# --- errors ----------------------------------------------------------------------------------------------------------


def failing_request(kind, ids, written):
    problem = LookupError("a user's own")
    match kind:
        case "processor":
            return {"logits_processor": [FailsAt(ids, written, problem)]}, problem
        case "criterion":
            return {"stopping_criteria": [FailingCriterion(ids, written, problem)]}, problem

    def on_step(step, seen=[]):  # noqa: B006 - counts the steps of this request
        seen.append(step)
        if len(seen) > written:
            raise problem

    return {"on_step": on_step}, problem


@pytest.mark.one_in(14)
@pytest.mark.parametrize("kind", ["processor", "criterion", "on_step"])
@pytest.mark.parametrize("written", [0, 1, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_in_one_request_ends_that_request_alone(kind, written, place):
    driven, handles = Driven(LLAMA), []
    arguments, problem = failing_request(kind, random_ids(6, seed=9), written)
    for number in range(3):
        if number == place:
            handles.append(driven.add(random_ids(6, seed=9), PAPER, max_new_tokens=20, **arguments))
        else:
            handles.append(driven.add(random_ids(6, seed=number), PAPER, max_new_tokens=20))
    driven.finish(errors=1)
    with pytest.raises(LookupError, match="a user's own") as caught:
        handles[place].result(0)
    assert caught.value is problem
    said = handles[place].tokens
    assert handles[place].stats.new_tokens == len(said)
    if kind == "on_step":
        assert len(steps_of(handles[place])) == written + 1, "its last step was told"
    else:
        assert len(said) == max(0, written - (kind == "criterion")), "all that came before the error"


def failing_passes(monkeypatch, fails):
    """Let passes fail, after they have changed the cache, where a condition on their trees and rows holds."""

    def where(runner, trees, rows, cache):
        return fails(trees, rows)

    return failing(monkeypatch, EagerRunner, "forward", MemoryError("no more"), where=where, after=True)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_pass_that_fails_is_repeated_without_drafts_and_nothing_is_lost(monkeypatch, sampled):
    """As where a device has memory for passes over single tokens only."""
    driven, given = Driven(LLAMA, max_rows=3), {"max_new_tokens": 20, "do_sample": sampled}
    failed = failing_passes(monkeypatch, lambda trees, rows: max(map(len, trees)) > 1)
    for seed in range(4):
        driven.add(random_ids(6, seed), seed=seed, **given)
    driven.finish()
    assert failed


def test_whoever_makes_every_pass_fail_is_found_alone_and_the_others_lose_nothing(monkeypatch):
    driven, culprit = Driven(LLAMA, max_rows=3), random_ids(6, 1)[0].tolist()
    failing_passes(monkeypatch, lambda trees, rows: any(row[:6] == culprit for row in rows))
    handles = [driven.add(random_ids(6, seed), max_new_tokens=20) for seed in range(5)]
    driven.finish(errors=1)
    with pytest.raises(MemoryError, match="no more"):
        handles[1].result(0)


def test_where_no_pass_succeeds_all_end(monkeypatch):
    driven = Driven(LLAMA, max_rows=2)
    failing_passes(monkeypatch, lambda trees, rows: True)
    for seed in range(3):
        driven.add(random_ids(6, seed), max_new_tokens=20)
    driven.finish(errors=3)


STEP_CALLS = ["candidates", "draft", "learn", "observe", "end", "close", "begin", "learn_prompt"]
"""What a drafter is asked for in a row's life."""


@pytest.mark.parametrize("method", STEP_CALLS)
@pytest.mark.parametrize("lookahead", ["auto", PAPER], ids=["adaptive", "paper"])
def test_a_drafter_that_fails_ends_its_row_alone(monkeypatch, method, lookahead):
    driven = Driven(LLAMA, max_rows=3)
    asked = [driven.add(random_ids(9, seed), lookahead, max_new_tokens=30) for seed in range(3)]
    driven.advance(1)  # into the queue
    drafter = next(row for row, active in driven.batch.running.decoding.items() if active.handle is asked[1]).drafter
    ends = method in ("candidates", "learn", "observe") or (method == "draft" and lookahead is PAPER)

    def mine(each, *_, **__):
        return each is _innermost(drafter)

    kind, problem = type(_innermost(drafter)), OSError("its file is gone")
    failing(monkeypatch, kind, method, problem, where=mine)
    driven.finish(errors=ends)
    if ends:
        with pytest.raises(OSError, match="its file is gone"):
            asked[1].result(0)


def _innermost(drafter):
    while isinstance(drafter, ForwardingDrafter):
        drafter = drafter._drafter
    return drafter


def test_an_error_of_the_model_in_prefill_ends_that_request_alone(monkeypatch):
    driven = Driven(LLAMA, prefill_tokens=4)
    driven.add(random_ids(4), max_new_tokens=20)
    driven.advance(2)
    handle = driven.add(random_ids(10, seed=1), max_new_tokens=20)
    driven.advance()
    with monkeypatch.context() as patch:
        failing(patch, EagerRunner, "prefill", MemoryError("no more"), after=True)
        driven.advance()
    driven.add(random_ids(10, seed=1), max_new_tokens=20)
    driven.finish(errors=1)
    with pytest.raises(MemoryError, match="no more"):
        handle.result(0)
    assert handle.tokens == []


@pytest.mark.parametrize("joins", [False, True])
def test_a_cache_that_cannot_grow_is_an_error_of_those_who_wanted_it(joins, monkeypatch):
    """Of the request that joins, or of all in the step."""
    driven = Driven(LLAMA)
    first = driven.add(random_ids(4), None, max_new_tokens=600 if not joins else 60)
    driven.advance(2)
    ids = random_ids(9, seed=1)
    with monkeypatch.context() as patch:
        failing(patch, TreeCache, "reserve", MemoryError("no more"))
        if joins:
            second = driven.add(ids, None, max_new_tokens=20)
            driven.advance()
            with pytest.raises(MemoryError):
                second.result(0)
            assert not first.done()
        else:
            driven.advance(300)
            with pytest.raises(MemoryError):
                first.result(0)
    driven.add(ids, max_new_tokens=20)
    driven.finish(errors=1)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cost_that_cannot_be_measured_is_an_error_of_those_who_wanted_it(rows, monkeypatch):
    driven = Driven(LLAMA)
    with monkeypatch.context() as patch:

        def too_many(model, runner, batch=1):
            return batch >= rows

        failing(patch, job, "step_cost_for", MemoryError("no more"), where=too_many)
        for seed in range(rows):
            driven.add(random_ids(4, seed), "auto", max_new_tokens=9)
        driven.finish(errors=rows == 1)  # two do without, one after the other
    driven.add(random_ids(4), "auto", max_new_tokens=9)
    driven.finish(errors=rows == 1)


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "opening", "running", "ended"])
def test_cancelling(state):
    driven = Driven(LLAMA, prefill_tokens=4, max_rows=2)
    driven.add(random_ids(4), max_new_tokens=30)
    driven.advance()
    handle = driven.add(random_ids(10, seed=1), max_new_tokens=30)
    driven.advance({"waiting": 0, "opening": 1, "running": 4, "ended": 60}[state])
    assert (len(handle.tokens) > 0) is (state in ("running", "ended"))
    steps = len(steps_of(handle))
    assert handle.cancel() is (state != "ended")
    assert handle.done() is (state in ("waiting", "ended"))
    driven.advance()
    assert handle.done() and len(steps_of(handle)) == steps and len(driven.batch.running.active) == (state != "ended")
    driven.finish()
    assert (result_of(handle) is None) is (state != "ended")


def test_slots_of_a_row_that_has_left_are_seen_by_nobody(monkeypatch):
    """Before each pass all slots that hold nothing are poisoned, as in the tests of batches."""

    def poison(runner, trees, rows, cache):
        longest, used = max(cache.lengths), len(cache.lengths)
        for layer in cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer[used:] = torch.nan
                buffer[:, :, longest:] = torch.nan
                for row, length in enumerate(cache.lengths):
                    buffer[row, :, length:longest] = 1e6
        return used

    reused = watched(monkeypatch, EagerRunner, "forward", poison)
    driven = Driven(LLAMA, max_rows=3, prefill_tokens=6)
    for number in range(9):
        driven.add(random_ids(3 + number, number), PAPER, max_new_tokens=5 + 7 * (number % 4))
        driven.advance(2)
    driven.finish()
    assert max(reused) == 3 and any(now > before for before, now in itertools.pairwise(reused))


@pytest.mark.parametrize("first", [True, False])
def test_a_text_whose_numbers_overflow_does_not_touch_the_others(first):
    check_overflow(first=first)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_a_request_has_the_figures_of_its_own_steps():
    driven, others = Driven(LLAMA, prefill_tokens=4), []
    others.append(driven.add(random_ids(5), PAPER, max_new_tokens=50))
    driven.advance(3)
    handle = driven.add(random_ids(10, seed=1), PAPER, max_new_tokens=40)
    driven.finish()
    stats, steps = handle.stats, steps_of(handle)
    assert [step.index for step in steps] == list(range(len(steps)))
    assert (stats.generations, stats.new_tokens, stats.steps) == (1, 40, len(steps) - 1)
    assert stats.step_tokens == [step.fed for step in steps[1:]] and sum(stats.accepted) == 39
    assert stats.prefill_s == steps[0].seconds > 0 and steps[0].fed == 10
    assert stats.decode_s == pytest.approx(sum(step.seconds for step in steps[1:]))
    assert 0 < stats.forward_s < stats.decode_s
    sources = [source for step in steps for source in step.sources]
    assert len(sources) == 40 and sources[0] == "prefill" and {"bonus"} < set(sources[1:])


def test_the_cost_of_a_pass_is_that_of_as_many_rows(monkeypatch):
    asked = watched(monkeypatch, job, "step_cost_for", lambda model, runner, batch=1: batch)
    driven = Driven(LLAMA)
    for seed in range(5):
        driven.add(random_ids(4, seed), "auto", max_new_tokens=4 + 30 * (seed == 0))
    driven.add(random_ids(4), None, max_new_tokens=3)
    driven.finish()
    assert asked[0] == 1 and max(asked) == 6 and asked[-1] == 1
    again = len(asked)
    driven.add(random_ids(4), PAPER, max_new_tokens=4)
    driven.finish()
    assert len(asked) == again, "nobody weighs sizes"


def test_the_cost_is_switched_with_the_number_of_rows(monkeypatch):
    told = watched(monkeypatch, Controller, "use")
    driven = Driven(LLAMA)
    for seed in range(2):
        driven.add(random_ids(4, seed), "auto", max_new_tokens=16 + 16 * seed)
        driven.advance(2)
    driven.finish()
    assert len(told) == 2, "a second row comes, and one leaves"


@pytest.mark.parametrize("rare", [False, True])
def test_where_looks_are_rare_several_requests_do_not_read_their_prompts(rare, monkeypatch):
    """A memory that outlasts its request does, and a request that has the engine to itself."""
    monkeypatch.setattr(Controller, "reads_logits", not rare)
    read = watched(monkeypatch, AdaptiveDrafter, "learn_prompt", lambda drafter, *_: drafter)
    for requests, kept, expected in ((1, False, 1), (3, False, 0 if rare else 3), (3, True, 3)):
        read.clear()
        driven, config = Driven(LLAMA), LookaheadConfig(memory=Memory() if kept else None)
        for seed in range(requests):
            driven.add(random_ids(6 + seed, seed), config, max_new_tokens=8)
        driven.finish()
        assert len(set(read)) == expected
