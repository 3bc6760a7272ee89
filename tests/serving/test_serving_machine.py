"""Whoever shares the batch, a request gets the tokens that it would get alone: random arrivals, ends and errors."""

import functools

import pytest
import torch
from effort import examples
from families import family
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inside import cache_of, result_of, steps_of
from serving_toys import PAPER, VOCABULARY, Driven, FailingCriterion, FailsAt, alone, oddly, random_ids

from lade import LookaheadConfig, Memory
from lade.testing import toy_model


@functools.cache
def model_of(name):
    match name:
        case "llama" | "gpt2":
            return toy_model(name, vocabulary=VOCABULARY, positions=128)
        case "window":
            return family("mistral-window").build(num_hidden_layers=2, sliding_window=6)
        case "bloom":  # ALiBi, with an additive mask
            return family("bloom").build(n_layer=2)
        case "llama4":  # chunks, and a temperature of attention
            return family("llama4_text").build(num_hidden_layers=4, floor_scale=7)


@functools.cache
def expected_of(name, ids, seed, arguments):
    """Plain decoding, once for each request."""
    return alone(model_of(name), torch.tensor([ids]), seed, **{key: thaw(value) for key, value in arguments})


def thaw(value):
    return list(value) if isinstance(value, tuple) else value


OPTIONS = (
    (),
    (("do_sample", True),),
    (("do_sample", True), ("temperature", 0.6), ("top_k", 8)),
    (("repetition_penalty", 1.4),),
    (("logits_processor", (oddly,)),),
    (("logits_processor", (oddly,)), ("do_sample", True), ("top_p", 0.9)),
    (("no_repeat_ngram_size", 2), ("suppress_tokens", (5, 7))),
)
METHODS = (
    None,
    "auto",
    "shared",
    PAPER,
    LookaheadConfig(0, 3, 4),
    LookaheadConfig(4, 2, 0),
    LookaheadConfig(budget=12),
)


class Requests(RuleBasedStateMachine):
    """Requests come, are decoded, are cancelled, and fail, in any order."""

    limits = (180, 400, 10**6)

    def drive(self, *limits):
        return Driven(model_of(self.name), *limits)

    @initialize(
        name=st.sampled_from(["llama", "gpt2", "window", "bloom", "llama4"]),
        prefill_tokens=st.sampled_from([1, 3, 5, 512]),
        max_rows=st.integers(1, 5),
        limit=st.integers(0, 2),
    )
    def begin(self, name, prefill_tokens, max_rows, limit):
        self.name, self.memory = name, Memory()
        self.driven = self.drive(prefill_tokens, max_rows, self.limits[limit])
        self.handles, self.expected, self.cancelled, self.failing = [], [], set(), {}

    def config(self, method):
        return LookaheadConfig(memory=self.memory) if method == "shared" else method

    @rule(
        length=st.integers(1, 14),
        prompt=st.integers(0, 3),
        new=st.integers(1, 20),
        method=st.sampled_from(METHODS),
        options=st.sampled_from(OPTIONS),
        ends=st.sampled_from([(), (5,), (3, 17, 40, 22, 30)]),
        seed=st.integers(0, 2),
    )
    def add(self, length, prompt, new, method, options, ends, seed):
        arguments = (("max_new_tokens", new), ("eos_token_id", ends or None), *options)
        ids = random_ids(length, seed=prompt)
        if not dict(options).get("do_sample"):
            arguments += (("do_sample", False),)
        expected = expected_of(self.name, tuple(ids[0].tolist()), seed, arguments)
        given = {key: thaw(value) for key, value in arguments}
        self.handles.append(self.driven.add(ids, self.config(method), seed=seed, **given))
        self.expected.append(expected)

    @rule(length=st.integers(1, 9), at=st.integers(0, 6), method=st.sampled_from(METHODS), criterion=st.booleans())
    def add_one_that_fails(self, length, at, method, criterion):
        ids = random_ids(length, seed=7)
        fails = FailingCriterion(ids, at) if criterion else FailsAt(ids, at)
        where = {"stopping_criteria" if criterion else "logits_processor": [fails]}
        expected = expected_of(self.name, tuple(ids[0].tolist()), 0, (("max_new_tokens", 12), ("do_sample", False)))
        handle = self.driven.add(ids, self.config(method), max_new_tokens=12, do_sample=False, **where)
        self.failing[len(self.handles)] = fails.problem
        self.handles.append(handle)
        self.expected.append(expected[: max(0, at - criterion)])  # a token that a criterion fails at is not emitted

    @rule(times=st.integers(1, 8))
    def advance(self, times):
        self.driven.advance(times)

    @rule(number=st.integers(0, 30))
    def cancel(self, number):
        if self.handles:
            number %= len(self.handles)
            done = self.handles[number].done()
            assert self.handles[number].cancel() is not done
            if not done:
                self.cancelled.add(number)

    @invariant()
    def each_has_a_part_of_its_own_text(self):
        for number, handle in enumerate(getattr(self, "handles", ())):
            tokens = handle.tokens
            assert tokens == self.expected[number][: len(tokens)]
            if number in self.cancelled:
                assert result_of(handle) is None
            elif handle.done() and number in self.failing:
                problem = result_of(handle)
                assert problem is self.failing[number], (problem, self.failing[number])
                assert tokens == self.expected[number]
            elif handle.done():
                assert tokens == self.expected[number] == handle.result()[0, -len(tokens) :].tolist()
                stats = handle.stats
                assert (stats.generations, stats.new_tokens) == (1, len(tokens))
                assert sum(stats.accepted) == len(tokens) - 1
                assert stats.steps == len(stats.accepted) == len(stats.step_tokens) == len(steps_of(handle)) - 1

    def teardown(self):
        if hasattr(self, "driven"):
            self.driven.finish(expected=False)
            self.each_has_a_part_of_its_own_text()
            assert all(handle.done() for handle in self.handles)
            assert cache_of(self.driven.batch).room == (0, 0)


class TestRequests(Requests.TestCase):
    settings = settings(max_examples=examples(8), stateful_step_count=18)


@pytest.mark.slow
class TestManyRequests(Requests.TestCase):
    settings = settings(max_examples=examples(150), stateful_step_count=50)
