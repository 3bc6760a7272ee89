"""Lengths at which a model begins to compute otherwise, and the few shapes of captured passes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from lade.model.config import CONTEXT_FIELDS, Positions
from lade.model.inputs import STEP_SIZES, batch_bucket, key_bucket, step_bucket


def positions(**fields: Any) -> Positions:
    return Positions.of(LlamaConfig(hidden_size=8, num_attention_heads=4, **fields))


@pytest.mark.parametrize("name", sorted(CONTEXT_FIELDS))
def test_the_length_of_the_context_is_a_wall_whatever_it_is_called(name):
    assert positions(**{name: 40}).limits == (40,)
    assert positions(**{name: 40}).room(38) == 1 and positions(**{name: 40}).room(50) == 0


def test_of_several_lengths_the_shortest_counts():
    assert positions(max_position_embeddings=32768, seq_length=2048).limits == (2048,)


def rope(kind: str, switch: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    return {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": switch, **factors}


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_the_switch_of_longrope_is_a_wall_under_its_old_name_too(kind):
    found = positions(max_position_embeddings=64, rope_parameters=rope(kind, 32))
    assert found.limits == (32, 64) and found.longrope_switch == 32


def test_beyond_the_context_no_switch_lets_trees_grow_again():
    found = positions(max_position_embeddings=128, seq_length=32, rope_parameters=rope("longrope", 64))
    assert found.limits == (32,)


def test_sizes_are_rounded_up_to_the_next_of_a_few():
    found = [step_bucket(size) for size in range(1, 129)]
    assert all(padded >= size for size, padded in enumerate(found, start=1))
    assert sorted(set(found)) == list(STEP_SIZES) and [step_bucket(size) for size in STEP_SIZES] == list(STEP_SIZES)
    assert [step_bucket(size) for size in (129, 256, 257)] == [256, 256, 384]


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_rows_are_rounded_up_to_a_power_of_two(rows, padded):
    assert batch_bucket(rows) == padded


def test_keys_are_rounded_up_to_two_buckets_an_octave():
    found = [key_bucket(tokens) for tokens in range(1, 40_000)]
    assert all(padded >= tokens for tokens, padded in enumerate(found, start=1)) and found == sorted(found)
    assert sorted(set(found))[:7] == [256, 384, 512, 768, 1024, 1536, 2048]
    assert max(padded / tokens for tokens, padded in enumerate(found, start=1) if tokens > 256) < 1.5
    assert all(key_bucket(padded) == padded and padded % 128 == 0 for padded in set(found))
