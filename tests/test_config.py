"""LookaheadConfig: frozen, validated."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import lade
from lade import ConfigError, LadeError, LookaheadConfig
from lade.memory import Memory
from lade.testing import toy_model


def test_positional_order_and_defaults_without_sizes_it_is_adaptive_also_when_a_field_is_replaced():
    assert LookaheadConfig(15, 5, 15) == LookaheadConfig(window=15, ngram=5, guesses=15)
    assert LookaheadConfig(adaptive=False) == LookaheadConfig(7, 5, 7, prompt_ngrams=True, seed=0)
    assert LookaheadConfig().adaptive and LookaheadConfig(budget=8).adaptive
    assert dataclasses.replace(LookaheadConfig(), budget=9) == LookaheadConfig(budget=9)
    assert LookaheadConfig().method.wants_mtp and not LookaheadConfig(budget=8).method.wants_mtp


@pytest.mark.parametrize("sizes", [{"window": 7}, {"ngram": 5}, {"guesses": 7}, {"window": 0, "guesses": 0}])
def test_sizes_mean_the_papers_method(sizes):
    assert not (config := LookaheadConfig(**sizes)).adaptive and config.method.name == "lookahead"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"budget": 8, "window": 3}, "budget"), ({"budget": 8, "adaptive": False}, "budget"),
        ({"memory": {}}, "memory"), ({"memory": Memory(), "guesses": 7}, "memory"), ({"adaptive": 1}, "adaptive"),
        ({"adaptive": True, "window": 8}, "window"), ({"adaptive": True, "ngram": 3}, "ngram"),
        ({"adaptive": True, "guesses": 0}, "guesses"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(fields, named):
    with pytest.raises(ConfigError, match=f"^{named}=") as caught:
        LookaheadConfig(**fields)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", -1), ("window", 257), ("window", 2.5), ("window", True), ("ngram", 1), ("ngram", 33),
        ("guesses", -3), ("guesses", 10**30), ("guesses", "7"), ("budget", 0), ("budget", 1025), ("budget", True),
        ("seed", -1), ("prompt_ngrams", 1),
    ],
)  # fmt: skip
def test_an_error_names_field_value_and_remedy(field, value):
    with pytest.raises(ConfigError, match=rf"^{field}={value!r} is not valid: give ") as caught:
        LookaheadConfig(**{field: value})
    assert isinstance(caught.value, LadeError) and isinstance(caught.value, ValueError)


def test_the_largest_sizes_are_served():
    """A step of the largest window is made, and its tokens are those of plain decoding."""
    model = toy_model()
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    for config in (LookaheadConfig(256, 32, 256), LookaheadConfig(budget=1024)):
        assert torch.equal(lade.generate(model, input_ids=ids, max_new_tokens=6, lookahead=config), expected)


def test_a_memory_is_a_lade_memory_or_derived_from_it():
    lookalike = SimpleNamespace(**dict.fromkeys(dir(Memory), lambda *_: None))
    for memory in (Memory(), type("OwnMemory", (Memory,), {})()):
        assert LookaheadConfig(memory=memory).memory is memory
    for other in (lookalike, Memory, "path", 0):
        with pytest.raises(ConfigError, match=r"^memory=.* is not valid: give a lade\.Memory"):
            LookaheadConfig(memory=other)
