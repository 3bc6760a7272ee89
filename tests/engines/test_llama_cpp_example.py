"""A draft model of llama-cpp-python, without it: its `Llama.generate` has a stand-in over a model."""

from functools import cache

import numpy as np
import pytest
import torch
from replay import toy
from spies import watched

from examples.llama_cpp_drafts import DraftModel
from lade.errors import ConfigError
from lade.memory import Memory

COUNT, CONTEXT = 60, 256


class Llama:
    """`llama_cpp.Llama` 0.3.36: the members that a draft model may use, and `generate` with a temperature of 0."""

    draft_model = None

    def __init__(self, rows=CONTEXT):
        self.scores = np.full((rows, toy()[0].config.vocab_size), np.nan, np.single)
        self.input_ids, self.n_tokens, self.passes = np.zeros(CONTEXT, np.intc), 0, 0

    def n_vocab(self):
        return self.scores.shape[1]

    def n_ctx(self):
        return CONTEXT

    def token_eos(self):
        return 1

    def eval(self, tokens):
        """Feed tokens after the first `n_tokens`."""
        end = self.n_tokens + len(tokens)
        self.input_ids[self.n_tokens : end] = tokens
        with torch.inference_mode():
            logits = toy()[0](torch.from_numpy(self.input_ids[:end]).long()[None]).logits[0]
        self.scores[self.n_tokens : end] = logits[self.n_tokens :].numpy()
        self.n_tokens, self.passes = end, self.passes + 1

    def generate(self, prompt, count):
        tokens, self.n_tokens, out = list(prompt), 0, []
        sample_idx = len(tokens) - 1
        while True:
            self.eval(tokens)
            while sample_idx < self.n_tokens:
                token = int(self.scores[sample_idx].argmax())
                sample_idx += 1
                out.append(token)
                if len(out) == count:
                    return out
                tokens = [token]
                if sample_idx < self.n_tokens and token != self.input_ids[sample_idx]:
                    self.n_tokens = sample_idx
                    break
            if self.draft_model is not None:
                self.input_ids[self.n_tokens : self.n_tokens + 1] = tokens
                tokens += self.draft_model(self.input_ids[: self.n_tokens + 1]).astype(int).tolist()


@cache
def plain(number):
    return Llama().generate(toy()[1][number], COUNT)


def test_texts_are_those_without_a_draft_model():
    llama = Llama()
    llama.draft_model = DraftModel(llama, most=8, price=0.0)
    for number in (0, 1, 0):
        before = llama.passes
        assert llama.generate(toy()[1][number], COUNT) == plain(number)
        last = llama.passes - before
    assert COUNT / last > 2.0  # the same text again
    assert llama.draft_model.drafter.requests == ["text"]


def test_rows_of_logits_are_learned():
    steps = []
    for blind in (False, True):
        llama = Llama()
        llama.draft_model = DraftModel(llama, most=8, price=0.0)
        if blind:
            llama.draft_model._llama = Llama()
            llama.draft_model._llama.scores[:] = 0.0
        assert llama.generate(toy()[1][0], COUNT) == plain(0)
        steps.append(llama.passes)
    assert COUNT / steps[0] >= 1.5
    assert steps[0] < 0.85 * steps[1]


def test_a_text_that_does_not_come_from_the_last_pass_begins_anew():
    llama = Llama()
    llama.scores[:] = 0.0
    draft = DraftModel(llama, price=0.0)
    draft(np.array([1, 2, 3, 1, 2, 3, 1], np.intc))
    draft(np.array([1, 2, 3, 1, 2, 3, 1, *range(10, 24)], np.intc))  # the next turn of a chat
    assert draft.drafter.text("text")[-1] == 23
    draft(np.array([4, 5], np.intc))
    assert draft.drafter.text("text") == [4, 5]


def test_passes_that_do_not_pay_are_seen_by_their_times(monkeypatch):
    """Where each token takes as long as the first one, little but sure tokens is drafted after twenty passes."""
    now = [0.0]
    monkeypatch.setattr("examples.llama_cpp_drafts.perf_counter", lambda: now[0])
    drafted = []
    for slope in (0.001, 1.0):
        llama = Llama()
        llama.draft_model = DraftModel(llama, most=8, memory=Memory())

        def take_time(tokens, slope=slope):
            now[0] += 1.0 + slope * (len(tokens) - 1)
            return len(tokens)

        fed = watched(monkeypatch, llama, "eval", take_time)
        llama.generate([4, 7], COUNT)
        drafted.append(sum(fed[20:]) / len(fed[20:]))
    assert drafted[0] > 7.0
    assert drafted[1] < 4.0


def test_settings_that_cannot_be_used_are_refused():
    with pytest.raises(ConfigError, match="logits_all=True"):
        DraftModel(Llama(rows=8))
    with pytest.raises(ConfigError, match="most=0"):
        DraftModel(Llama(), most=0)
