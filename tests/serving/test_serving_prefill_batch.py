"""Prompts that wait are read in one pass: each gets its own text, its own errors, and what is known of it."""

import pytest
import torch
from inside import steps_of
from serving_toys import LLAMA, METHODS, VOCABULARY, Driven, FailsAt, random_ids
from spies import failing, watched

from lade import LookaheadConfig
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.serving import batch
from lade.testing import toy_model

GPT2 = toy_model("gpt2", vocabulary=VOCABULARY)
LENGTHS = 14, 3, 20, 9, 20


def add_all(driven, lengths=LENGTHS, method=METHODS[-1], **arguments):
    """Handles, each with its prompt."""
    prompts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    arguments = {"max_new_tokens": 20, **arguments}
    return [(driven.add(ids, method, seed=seed, **arguments), ids) for seed, ids in enumerate(prompts)]


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "repetition_penalty": 1.2}], ids=["greedy", "sampled"])
def test_each_gets_its_own_text(model, arguments, fed):
    driven = Driven(model)
    asked = add_all(driven, **arguments)
    driven.advance()
    assert fed == [(5, 20)] and driven.most_rows == 5
    assert [next(iter(steps_of(handle))).fed for handle, _ in asked] == list(LENGTHS)
    driven.finish()


def test_those_that_come_later_join_in_one_pass_too(fed):
    driven = Driven(LLAMA)
    asked = add_all(driven, (4, 6))
    driven.advance(3)
    before = [len(handle.tokens) for handle, _ in asked]
    for seed, length in ((2, 5), (3, 8)):
        asked.append((driven.add(random_ids(length, 9), seed=seed, max_new_tokens=20), random_ids(length, 9)))
    driven.advance()
    assert fed == [(2, 6), (2, 8)] and all(handle.tokens for handle, _ in asked)
    assert all(len(handle.tokens) > old for (handle, _), old in zip(asked, before, strict=False))
    driven.finish()


def test_only_as_many_as_a_step_may_feed(fed):
    driven = Driven(LLAMA, prefill_tokens=64)
    add_all(driven, (20, 22, 21, 18, 40))
    driven.advance()
    assert fed == [(2, 22)], "a third row would make it 66 tokens; of the rest less than a pass costs would be fed"
    driven.advance()
    assert fed == [(2, 22), (2, 21)]
    driven.finish()
    assert fed[2:] == [(1, 40)]


def test_less_than_a_pass_costs_is_fed_of_a_prompt_only_at_its_end(fed):
    """After what the first one of a step was fed, 4, 38 and 38 of 64 tokens are left; the last prompt has just 30."""
    driven, of_steps = Driven(LLAMA, prefill_tokens=64), []
    add_all(driven, (60, 90, 70, 20, 30))
    for _ in range(5):
        fed.clear()
        driven.advance()
        of_steps.append(list(fed))
    assert of_steps == [[(1, 60)], [(1, 64)], [(1, 26)], [(1, 64)], [(1, 6), (1, 20), (1, 30)]]
    driven.finish()


def test_memories_learn_what_they_learn_of_a_prompt_alone(monkeypatch):
    def see(drafter, tokens, start, rows):
        return tuple(tokens), start, rows.tolist()

    told, shown, stats = watched(monkeypatch, AdaptiveDrafter, "learn_prompt", see), [], []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(batch, "prefill_group", lambda *given: [])
        told.clear()
        driven = Driven(LLAMA)
        asked = add_all(driven, method=LookaheadConfig(budget=8))
        driven.finish()
        shown.append(sorted(told))
        stats.append([handle.stats.accepted for handle, _ in asked])
    assert len(shown[0]) == len(LENGTHS) and shown[0] == shown[1] and stats[0] == stats[1]


# --- errors, and those who leave -------------------------------------------------------------------------------------


def test_an_error_of_one_prompt_ends_that_request_alone(monkeypatch, fed):
    def has_nine(runner, rows, *_):
        return any(len(row) == 9 for row in rows)

    failing(monkeypatch, EagerRunner, "prefill", RuntimeError("no nine"), where=has_nine)
    driven = Driven(LLAMA)
    asked = add_all(driven)
    driven.finish(errors=1)
    assert fed == [(1, length) for length in LENGTHS if length != 9]
    with pytest.raises(RuntimeError, match="no nine"):
        asked[3][0].result(0)
    assert [len(handle.tokens) for handle, _ in asked] == [20, 20, 20, 0, 20]


def test_without_memory_for_all_each_is_fed_by_itself(monkeypatch, fed):
    failing(monkeypatch, TreeCache, "copy_row", torch.OutOfMemoryError("no more"))
    driven = Driven(LLAMA)
    add_all(driven, do_sample=True)
    driven.finish()
    assert fed == [(5, 20), *((1, length) for length in LENGTHS)]


@pytest.mark.parametrize("what", ["processor", "row", "on_step"])
def test_an_error_behind_the_pass_is_that_of_one_request(what, monkeypatch):
    driven = Driven(LLAMA)
    add_all(driven, (4, 6))
    arguments = {}
    if what == "processor":
        arguments = {"logits_processor": [FailsAt(random_ids(5), 0)]}
    if what == "on_step":
        arguments = {"on_step": lambda step: 1 / 0}
    broken = driven.add(random_ids(5, 5), max_new_tokens=20, **arguments)
    if what == "row":
        request = driven.waiting[-1][0]
        failing(monkeypatch, request, "row", ZeroDivisionError("no row"))
    driven.add(random_ids(7, 7), max_new_tokens=20)
    driven.finish(errors=1)
    with pytest.raises(RuntimeError if what == "processor" else ZeroDivisionError):
        broken.result(0)


def test_who_is_cancelled_is_not_fed_and_answers_of_one_token_leave_at_once(fed):
    driven = Driven(LLAMA)
    asked = add_all(driven, max_new_tokens=1)
    asked[2][0].cancel()
    driven.advance()
    assert driven.batch.idle and fed == [(4, 20)]
    driven.finish()
    assert not asked[2][0].tokens and all(handle.done() for handle, _ in asked)


# --- what is known of a prompt ---------------------------------------------------------------------------------------


def test_those_that_begin_alike_wait_for_the_first_one(fed):
    """All of its text but the last token is on the shelf when the others are fed."""
    driven, stem = Driven(LLAMA, prefix_cache=2**20), random_ids(70)
    prompts = [random_ids(5, 8), stem, random_ids(8, 3), *(torch.cat([stem, random_ids(4, n)], 1) for n in range(2))]
    handles = [driven.add(ids, max_new_tokens=8) for ids in prompts]
    driven.finish()
    assert fed == [(2, 8), (1, 70), (1, 4), (1, 4)]
    assert [handle.cached_tokens for handle in handles] == [0, 0, 0, 70, 70]


def test_of_other_scopes_nothing_is_known(fed):
    driven, stem = Driven(LLAMA, prefix_cache=2**20), random_ids(70)
    prompts = [torch.cat([stem, random_ids(4, number)], 1) for number in range(3)]
    handles = [driven.add(ids, max_new_tokens=8, scope=str(number)) for number, ids in enumerate(prompts)]
    driven.finish()
    assert fed == [(3, 74)] and [handle.cached_tokens for handle in handles] == [0, 0, 0]
