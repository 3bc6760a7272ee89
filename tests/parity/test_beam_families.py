"""Beam search over every family, past sliding windows, up to the context's end and across rotary scalings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import PAPER, only_fallback, prompt
from families import FAMILIES, SWITCH, Family, family, longrope
from transformers import PreTrainedModel

import lade

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in FAMILIES for backend in case.backends]
CONTEXT = 64


def assert_same_beams(
    model: PreTrainedModel, ids: torch.Tensor, twin: PreTrainedModel | None = None, num_beams: int = 3, **arguments: Any
) -> lade.Stats:
    """Plain decoding is done by `twin`, if given: rotary scalings remember the longest text of a model."""
    stats = lade.Stats()
    asked = {
        "input_ids": ids,
        "num_beams": num_beams,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
        **arguments,
    }
    expected: Any = (twin or model).generate(**asked)
    ours: Any = lade.generate(model, lookahead=PAPER, stats=stats, **asked)
    assert torch.equal(ours.sequences, expected.sequences)
    assert torch.equal(ours.beam_indices, expected.beam_indices)
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores)
    return stats


@pytest.mark.parametrize(("case", "backend"), CASES)
def test_it_is_the_beam_search_of_transformers(case: Family, backend: str) -> None:
    stats = assert_same_beams(case.build(backend), prompt(20), max_new_tokens=50)
    assert stats.tokens_per_step > 1, "no guess was ever taken"


@pytest.mark.parametrize("length", [5, 40, 62, 63])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "bloom"])
def test_up_to_the_very_last_position(name: str, length: int) -> None:
    model = family(name).build(max_position_embeddings=CONTEXT)
    assert_same_beams(model, prompt(length), max_new_tokens=CONTEXT + 1 - length)


@pytest.mark.parametrize("length", [20, 60, 64, 70])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_beyond_the_context(name: str, length: int) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for parameters in ({}, {"rope_parameters": rope}):
        model, twin = (family(name).build(max_position_embeddings=CONTEXT, **parameters) for _ in range(2))
        assert_same_beams(model, prompt(length), twin, max_new_tokens=60)


def test_beams_beyond_the_switch_of_longrope_are_refused_and_those_before_it_are_not() -> None:
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
