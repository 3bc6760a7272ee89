"""Walls: lengths at which a model begins to compute otherwise, read from its configuration."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from lade.model.config import CONTEXT_FIELDS, Positions


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
