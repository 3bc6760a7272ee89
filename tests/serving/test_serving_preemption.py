"""Rows that are seated by what they take now, make room for older ones, and go on as if nothing had been."""

import random
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import counters_of, prefill_runner_of, runner_of
from serving_toys import LLAMA, SOON, VOCABULARY, Driven, FailsAt, alone, at_rest, random_ids
from spies import failing

from lade import Engine, LookaheadConfig
from lade.server.sampling_parameters import Penalties
from lade.serving.capacity import Capacity, Need
from lade.serving.running import RunningSet
from lade.testing import toy_model

METHODS = (None, LookaheadConfig(0, 3, 4), LookaheadConfig(4, 2, 0), LookaheadConfig(budget=6))
"""With small trees, so that texts take most of the room."""


def sampled(number, **more):
    """Arguments of one of several kinds: rows have drawn, counted and watched when they are displaced."""
    kinds = (
        {},
        {"do_sample": True, "temperature": 1.3},
        {"do_sample": True, "repetition_penalty": 1.2},
        {"logits_processor": [Penalties(0.6, 0.4, prompt_length=more.pop("prompt_length"))]},
    )
    return {**kinds[number % len(kinds)], **more}


def check(handles):
    """What was told of each adds up."""
    for handle in handles:
        steps = list(handle)
        assert [step.index for step in steps] == list(range(len(steps)))
        assert handle.stats.generations == 1 and handle.stats.new_tokens == len(handle.tokens)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "prefill_tokens"), [("llama", 3), ("gpt2", 512)])
def test_the_youngest_makes_room_and_goes_on(name, prefill_tokens):
    model = toy_model(name, vocabulary=VOCABULARY)
    driven = Driven(model, prefill_tokens, max_rows=4, max_tokens=200, headroom=4)
    asked = []
    for number in range(4):
        ids = random_ids(5 + number, number)
        arguments = sampled(number, prompt_length=ids.shape[1], max_new_tokens=60)
        asked.append(driven.add(ids, METHODS[number], seed=number, **arguments))
    while not driven.batch.idle or driven.waiting:
        driven.advance()
        assert 0 not in [each.number for each in driven.batch.running.preempted], "the oldest one stays"
    told = counters_of(driven.batch)
    assert told["displacements"] >= 2
    driven.finish()
    check(asked)


def test_nobody_is_seated_while_someone_waits_to_go_on():
    driven = Driven(LLAMA, max_rows=4, max_tokens=150, headroom=2)
    for seed in range(3):
        driven.add(random_ids(4, seed), None, max_new_tokens=60)
    while not driven.batch.running.preempted:
        driven.advance()
    late = driven.add(random_ids(4, 9), None, max_new_tokens=2)
    while driven.batch.running.preempted:
        assert not late.tokens
        driven.advance()
    driven.finish()


def test_texts_that_fit_whatever_they_become_are_never_displaced():
    driven = Driven(LLAMA, max_rows=4, max_tokens=4 * (64 + 11), headroom=4)
    for seed in range(4):
        driven.add(random_ids(4, seed), METHODS[1], max_new_tokens=60)
    while not driven.batch.idle or driven.waiting:
        driven.advance()
        assert not driven.batch.running.preempted
    driven.finish()
    assert driven.most_rows == 4


def displaced_one():
    driven = Driven(LLAMA, max_rows=2, max_tokens=100, headroom=2)
    handles = [driven.add(random_ids(4, seed), None, max_new_tokens=70) for seed in range(2)]
    while not driven.batch.running.preempted:
        driven.advance()
    return driven, handles


def test_a_displaced_request_can_be_cancelled():
    driven, (_, second) = displaced_one()
    assert second.cancel() and not second.done()
    driven.advance()
    with pytest.raises(CancelledError):
        second.result(0)
    assert 0 < len(second.tokens) < 70 and not driven.batch.running.preempted
    driven.finish()


def test_closing_ends_a_displaced_request():
    driven, handles = displaced_one()
    driven.batch.close(MemoryError("no more"))
    for handle in handles:
        with pytest.raises(MemoryError, match="no more"):
            handle.result(0)


def test_an_error_while_a_text_is_fed_again_ends_that_request_alone(monkeypatch):
    driven, (_, second) = displaced_one()
    failing(monkeypatch, prefill_runner_of(driven.batch), "prefill", MemoryError("no more"))
    driven.finish(errors=1)
    with pytest.raises(MemoryError, match="no more"):
        second.result(0)


def test_a_failed_pass_spares_who_was_displaced(monkeypatch):
    driven, _ = displaced_one()
    failed = failing(monkeypatch, runner_of(driven.batch), "forward", MemoryError("no more"), calls={1})
    driven.finish()
    assert failed


def test_who_cannot_make_room_is_seated_by_the_most_that_it_may_take():
    """A prompt with an image: what it was made of is gone when its answer begins."""

    def request(prompt_tokens, most, images=None):
        return SimpleNamespace(prompt_tokens=prompt_tokens, need=Need(most, 5), images=images)

    running = RunningSet(Capacity(max_rows=9, max_tokens=200, token_bytes=1), headroom=10)
    first = running.add(request(20, 120), None)
    image = running.add(request(20, 60, images=object()), None)
    assert not running.has_room(request(20, 90, images=object())), "3 rows of up to 95"
    last = running.add(request(20, 60), None)
    assert running.next_preempted() is None and not running.has_room(request(20, 90))
    image.request.images = None  # it has been fed
    first.row = SimpleNamespace(written=[1] * 50)
    assert running.next_preempted() is last
    running.preempt(last)
    assert running.next_preempted() is None
    first.row.written += [1] * 30
    assert running.next_preempted() is first, "though the other one is younger"


@given(data=st.data())
@settings(max_examples=examples(12))
def test_whatever_comes_whenever_gets_its_own_text(data):
    """Random texts, arrivals, cancellations and failures, in caches too small for all."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    max_tokens, headroom = rng.choice((70, 110, 180)), rng.choice((1, 3, 16))
    driven = Driven(LLAMA, rng.choice((2, 5, 64)), rng.randint(2, 5), max_tokens, headroom=headroom)
    asked, failing = [], []
    for number in range(rng.randint(3, 7)):
        ids, seed = random_ids(rng.randint(1, 9), rng.randint(0, 99)), rng.randint(0, 9)
        most = rng.randint(1, 28)
        arguments = sampled(rng.randint(0, 3), prompt_length=ids.shape[1], max_new_tokens=most)
        if rng.random() < 0.15:
            failing.append(driven.add(ids, logits_processor=[FailsAt(ids, most // 2)], max_new_tokens=most))
        asked.append(driven.add(ids, METHODS[number % 4], seed=seed, **arguments))
        driven.advance(rng.randint(0, 4))
        if rng.random() < 0.1:
            asked.pop().cancel()
    driven.finish(errors=len(failing))
    check(asked)


@pytest.mark.slow
def test_an_engine_that_is_too_small_for_all():
    arguments = {"do_sample": True, "max_new_tokens": 160}
    with Engine(LLAMA, max_rows=3, max_tokens=450) as engine:
        handles = [engine.add(random_ids(6, n), lookahead=METHODS[n + 1], seed=n, **arguments) for n in range(3)]
        for seed, handle in enumerate(handles):
            handle.result(SOON)
            assert handle.tokens == alone(LLAMA, random_ids(6, seed), seed, **arguments)
        told = at_rest(engine)
        assert told.displacements > 0 and told.displaced == 0 and told.requests == {"length": 3}
        assert (told.new_tokens, told.prompt_tokens) == (480, 18)
