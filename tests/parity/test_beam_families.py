"""Beam search over every family, past sliding windows, up to the context's end and across rotary scalings."""

from __future__ import annotations

from functools import partial

import comparing
import pytest
from comparing import batch, build, plain, prompt
from families import DYNAMIC, FAMILIES, SWITCH, VOCABULARY, family, longrope

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
    said = f"num_beams beyond {SWITCH} tokens"
    comparing.assert_refused(model, prompt(10), said, lade.UnsupportedArgumentError, num_beams=2, max_length=SWITCH + 1)


@pytest.mark.one_in(60)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_batches_of_it(case, backend):
    model, lengths = build(case, backend), (20, 7, 20, 13, 1)
    rows = {**batch(*lengths), "max_new_tokens": 30}
    stats = assert_same_beams(model, **rows, pad_token_id=VOCABULARY - 1)  # padding is never drafted, 0 is often said
    assert stats.tokens_per_step > 1, "no guess was ever taken"
    first = plain(model, **rows)[:, 20:]
    ends = [int(first[1, 5]), int(first[3, 15])]
    assert_same_beams(model, **rows, pad_token_id=0, do_sample=True, eos_token_id=ends)
