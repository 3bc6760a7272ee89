"""Why a request has ended, and how long its parts took."""

import time

import pytest
import torch
from serving_toys import LLAMA, PAD, SOON, VOCABULARY, Gate, alone, random_ids
from transformers import StoppingCriteria

from lade import Engine
from lade.testing import toy_model

TEXT = alone(LLAMA, random_ids(5), max_new_tokens=30)
FIFTH = next(number for number in range(5, 30) if TEXT[number] not in TEXT[:number])
"""Of the answer: a token that does not come before it."""


class At(StoppingCriteria):
    """Ends a row after so many tokens."""

    def __init__(self, written):
        self.length = 5 + written

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length])


class OldStyle(At):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.length


ENDS = {
    "length": ({"max_new_tokens": 9}, "length", 9),
    "eos": ({"eos_token_id": TEXT[FIFTH]}, "eos", FIFTH + 1),
    "the last allowed token is an end": ({"eos_token_id": TEXT[FIFTH], "max_new_tokens": FIFTH + 1}, "eos", FIFTH + 1),
    "criterion": ({"stopping_criteria": [At(4)]}, "criterion", 4),
    "criterion of old": ({"stopping_criteria": [OldStyle(4)]}, "criterion", 4),
    "criterion before length": ({"stopping_criteria": [At(4)], "max_new_tokens": 4}, "criterion", 4),
    "end before criterion": ({"stopping_criteria": [At(FIFTH + 1)], "eos_token_id": TEXT[FIFTH]}, "eos", FIFTH + 1),
    "length with criteria": ({"stopping_criteria": [At(40)], "max_new_tokens": 6}, "length", 6),
    "time": ({"max_time": 1e-9}, "time", 1),
    "length before time": ({"max_time": 1e-9, "max_new_tokens": 1}, "length", 1),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("lookahead", ["auto", None])
def test_what_ended_it(case, lookahead):
    arguments, reason, tokens = ENDS[case]
    arguments = {"max_new_tokens": 30, "pad_token_id": PAD, **arguments}
    with Engine(LLAMA) as engine:
        handle = engine.add(random_ids(5), lookahead=lookahead, **arguments)
        other = engine.add(random_ids(5), max_new_tokens=30)
        assert torch.equal(handle.result(SOON), LLAMA.generate(random_ids(5), **arguments))
        assert (handle.reason, len(handle.tokens)) == (reason, tokens)
        other.result(SOON)
        assert other.reason == "length" and other.tokens == TEXT


def test_a_stop_token_is_no_end_of_sequence():
    model = toy_model("llama", vocabulary=VOCABULARY)
    later = next(token for token in TEXT[FIFTH + 1 :] if token not in TEXT[: FIFTH + 1])
    model.generation_config.eos_token_id = later
    with Engine(model) as engine:
        more = {"max_new_tokens": 30, "pad_token_id": PAD}
        stopped = engine.add(random_ids(5), eos_token_id=[later, TEXT[FIFTH]], **more)
        ended = engine.add(random_ids(5), **more)
        assert stopped.result(SOON).shape[1] == 5 + FIFTH + 1 < ended.result(SOON).shape[1]
        assert (stopped.reason, ended.reason) == ("stop_token", "eos")


def test_where_its_time_went():
    gate = Gate()
    with Engine(LLAMA, max_rows=1, prefill_tokens=2) as engine:
        start = time.perf_counter()
        first = engine.add(random_ids(9), lookahead=None, on_step=gate, max_new_tokens=5)
        assert gate.reached.wait(SOON)
        most = time.perf_counter() - start
        second = engine.add(random_ids(9), max_new_tokens=5)
        assert second.queue_s is None and second.prefill_s is None
        time.sleep(most + 0.05)
        gate.opened.set()
        assert first.result(SOON) is not None and second.result(SOON) is not None
        assert second.queue_s > most > first.queue_s, "it waited for the whole of the first"
        assert all(handle.prefill_s >= handle.stats.prefill_s for handle in (first, second))
        assert first.prompt_tokens == 9
        padded = torch.tensor([[PAD, PAD, 7, 8]])
        handle = engine.add(padded, attention_mask=(padded != PAD).long(), pad_token_id=PAD, max_new_tokens=2)
        assert handle.prompt_tokens == 2 and handle.result(SOON) is not None
