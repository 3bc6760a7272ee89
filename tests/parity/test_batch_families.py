"""Batches of every family: left-padded prompts of several lengths, rows that end when they end; beams of them, too."""

from __future__ import annotations

from typing import Any

import pytest
from comparing import CONFIGS, assert_refused, assert_same, assert_same_beams, batch, build, in_turn, lookahead, plain
from effort import now_and_then
from families import DYNAMIC, FAMILIES, SWITCH, UNLISTED, family, longrope

import lade

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in FAMILIES for backend in case.backends]
LENGTHS = (20, 7, 20, 13)


def assert_same_batch(
    model: Any, configs: Any = CONFIGS[:1], lengths: Any = LENGTHS, seed: int = 0, **arguments: Any
) -> lade.Stats:
    """Assert that every config gives plain's tokens, greedy or sampled, and leaves the generator as plain does."""
    arguments = {"max_new_tokens": 40, "pad_token_id": 0, **arguments}
    return assert_same(model, configs=configs, seed=seed, **batch(*lengths, seed=seed), **arguments)


def assert_same_batch_of_beams(model: Any, lengths: Any, **arguments: Any) -> lade.Stats:
    """Assert it for three beams of each prompt."""
    arguments = {"max_new_tokens": 30, "pad_token_id": 0, "num_beams": 3, "num_return_sequences": 2, **arguments}
    return assert_same_beams(model, **batch(*lengths), **arguments)


@pytest.mark.one_in(32)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_a_batch_of_it_is_plains_batch(case, backend):
    model = build(case, backend)
    first = plain(model, **batch(*LENGTHS), max_new_tokens=40)[:, 20:]
    eos = [int(first[1, 5]), int(first[3, 15])]
    configs = CONFIGS[:3:2] if backend == case.backends[0] else CONFIGS[:1]
    assert_same_batch(model, configs, eos_token_id=eos)
    stats = assert_same_batch(model, configs[:1])
    assert stats.tokens_per_step > 1, "no guess was ever accepted"


@pytest.mark.one_in(14)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "gemma3_text", "bloom", "gpt_oss", "llama4_text"])
def test_a_sampled_batch(name):
    model = build(family(name))
    assert_same_batch(model, CONFIGS[:3], do_sample=True, temperature=0.6, eos_token_id=[5, 6])
    assert_same_batch(model, CONFIGS[:2], lengths=(9, 4), do_sample=True, num_return_sequences=3, top_k=20)
    assert_same_batch_of_beams(model, (9, 4, 13), max_new_tokens=20, do_sample=True, temperature=0.7)


@pytest.mark.slow
def test_an_attention_temperature_of_rows_at_different_positions():
    model = family("llama4_text").build(floor_scale=7, attn_scale=3.0)
    first = plain(model, **batch(20, 20, 20), max_new_tokens=40)[:, 20:]
    assert_same_batch(model, CONFIGS[:3], lengths=(20, 20, 20), eos_token_id=int(first[1, 9]))
    with pytest.raises(lade.UnsupportedArgumentError, match="this model counts the padding"):
        lookahead(model, **batch(20, 7), pad_token_id=0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["mistral-window", "gemma3_text", "llama4_text"])
def test_windows_of_rows_that_are_far_apart(name):
    """The first row is shorter than the others by more than a window: what is near goes by each row's own positions."""
    assert_same_batch(build(family(name)), CONFIGS[:2], lengths=(3, 40, 20))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", UNLISTED, ids=str)
def test_a_family_that_is_probed(case):
    assert_same_batch(build(case), CONFIGS[:2])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_bigcode", "llama", "gpt_neox", "bloom"])
def test_up_to_the_very_last_position(name):
    model = build(family(name), max_position_embeddings=64)
    for lengths in ((60, 50, 59), (40, 5, 63), (63, 63)):
        assert_same_batch(model, CONFIGS[:3], lengths=lengths, max_new_tokens=65 - max(lengths))
        assert_same_batch_of_beams(model, lengths, max_new_tokens=65 - max(lengths))


@pytest.mark.parametrize("name", ["llama", "mistral-window", *now_and_then("falcon")])
def test_rotary_models_run_on_beyond_their_context(name):
    model = build(family(name), max_position_embeddings=32)
    assert_same_batch(model, CONFIGS[:3], lengths=(30, 20, 35))
    assert_same_batch_of_beams(model, (30, 20, 35))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("name", "fields"), [("llama", DYNAMIC), ("llama", longrope()), ("phi3", longrope())])
def test_frequencies_that_go_by_the_longest_row(name, fields):
    """Served where all rows stay on one side of the switch; else the rows of plain decoding depend on each other."""
    model = family(name).build(**fields)
    assert_same_batch(model, CONFIGS[:3], lengths=(12, 5), max_new_tokens=SWITCH - 13)
    assert_same_batch_of_beams(model, (12, 5), max_new_tokens=SWITCH - 13)
    ids, said = batch(12, 12)["ids"], f"from {SWITCH} tokens on, the longest row decides"
    assert_refused(model, ids, said, lade.UnsupportedArgumentError, max_new_tokens=SWITCH)
    with pytest.raises(lade.UnsupportedArgumentError, match=said):
        lookahead(model, ids, num_beams=2, max_length=SWITCH + 1)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_rows_beyond_a_switch_from_the_beginning(name):
    model = family(name).build(**longrope())
    assert_same_batch(model, CONFIGS[:3], lengths=(SWITCH + 3, SWITCH + 3, SWITCH + 3))
    assert_same_batch_of_beams(model, (SWITCH + 3, SWITCH + 3))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_the_cross_product_of_shapes(case, backend):
    """Of what is generated how, each family has another part."""
    model = build(case, backend)
    shapes = (1, 1), (7, 31, 2), (16,) * 5, (3, 9, 27, 9, 3, 1, 30, 30)
    for lengths in in_turn(shapes, case, backend, count=2):
        first = plain(model, **batch(*lengths, seed=1), max_new_tokens=60)[:, max(lengths) :]
        eos = [int(first[0, 9]), int(first[1, 30])]
        ways: Any = ({}, {"eos_token_id": eos}, {"do_sample": True, "eos_token_id": eos})
        (way,), configs = in_turn(ways, case, backend, lengths), in_turn(CONFIGS, backend, case, lengths)
        assert_same_batch(model, configs, lengths=lengths, seed=1, max_new_tokens=60, **way)
