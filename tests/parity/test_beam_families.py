"""Beam search over every family, past sliding windows, up to the context's end and across rotary scalings.

Of one prompt first, then of several.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import comparing
import pytest
import torch
from comparing import PAPER, batch, build, only_fallback, plain, prompt
from families import DYNAMIC, FAMILIES, SWITCH, VOCABULARY, family, longrope
from transformers import PreTrainedModel

import lade

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in FAMILIES for backend in case.backends]
CONTEXT = 64


assert_same_beams = partial(comparing.assert_same_beams, num_beams=3, num_return_sequences=2)


@pytest.mark.one_in(32)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_it_is_the_beam_search_of_transformers(case, backend):
    stats = assert_same_beams(case.build(backend), prompt(20), max_new_tokens=50)
    assert stats.tokens_per_step > 1, "no guess was ever taken"


@pytest.mark.one_in(10)
@pytest.mark.parametrize("length", [5, 40, 62, 63])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "bloom"])
def test_up_to_the_very_last_position(name, length):
    model = family(name).build(max_position_embeddings=CONTEXT)
    assert_same_beams(model, prompt(length), max_new_tokens=CONTEXT + 1 - length)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("length", [20, 60, 64, 70])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_beyond_the_context(name, length):
    for scaling in ({}, DYNAMIC):
        model, twin = (family(name).build(**{**scaling, "max_position_embeddings": CONTEXT}) for _ in range(2))
        assert_same_beams(model, prompt(length), twin=twin, max_new_tokens=60)


def test_beams_beyond_the_switch_of_longrope_are_refused_and_those_before_it_are_not():
    model = family("phi3").build(**longrope())
    assert_same_beams(model, prompt(10), max_length=SWITCH)
    assert_same_beams(model, prompt(SWITCH + 1), max_new_tokens=30)
    arguments = {"input_ids": prompt(10), "num_beams": 2, "max_length": SWITCH + 1}
    with pytest.raises(lade.UnsupportedArgumentError, match=f"num_beams beyond {SWITCH} tokens"):
        lade.generate(model, lookahead=PAPER, **arguments)
    with pytest.warns(lade.FallbackWarning) as caught:
        ours = lade.generate(model, **arguments)
    assert "num_beams" in only_fallback(list(caught))
    assert torch.equal(ours, model.generate(**arguments))


def assert_same_batch(model: PreTrainedModel, lengths: Any, **arguments: Any) -> lade.Stats:
    """Assert it for prompts of these lengths, padded on the left."""
    return assert_same_beams(model, **batch(*lengths), **{"max_new_tokens": 30, "pad_token_id": 0, **arguments})


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "gemma3_text", "bloom", "gpt_oss", "llama4_text"])
def test_a_sampled_batch(name):
    assert_same_batch(build(family(name)), (9, 4, 13), max_new_tokens=20, do_sample=True, temperature=0.7)


@pytest.mark.one_in(60)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_batches_of_it(case, backend):
    model, lengths = build(case, backend), (20, 7, 20, 13, 1)
    stats = assert_same_batch(model, lengths, pad_token_id=VOCABULARY - 1)  # padding is never drafted, 0 is often said
    assert stats.tokens_per_step > 1, "no guess was ever taken"
    first = plain(model, **batch(*lengths), max_new_tokens=30)[:, 20:]
    assert_same_batch(model, lengths, do_sample=True, eos_token_id=[int(first[1, 5]), int(first[3, 15])])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_bigcode", "llama", "bloom"])
def test_a_batch_up_to_the_very_last_position(name):
    model = build(family(name), max_position_embeddings=CONTEXT)
    for lengths in ((60, 50), (5, 63), (63, 63)):
        assert_same_batch(model, lengths, max_new_tokens=CONTEXT + 1 - max(lengths))


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_batch_beyond_the_context(name):
    assert_same_batch(build(family(name), max_position_embeddings=32), (30, 20, 35))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "fields"), [("llama", DYNAMIC), ("llama", longrope()), ("phi3", longrope())])
def test_frequencies_that_go_by_the_longest_prompt(name, fields):
    model = family(name).build(**fields)
    assert_same_batch(model, (12, 5), max_new_tokens=SWITCH - 13)
    if "longrope" in str(fields):
        assert_same_batch(model, (SWITCH + 3, SWITCH + 3))
    arguments = {"num_beams": 2, "max_length": SWITCH + 1, "input_ids": batch(12, 12)["ids"]}
    said = f"from {SWITCH} tokens on, the longest row decides"
    with pytest.raises(lade.UnsupportedArgumentError, match=said):
        lade.generate(model, lookahead=PAPER, **arguments)
