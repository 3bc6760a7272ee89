"""Every family, with every attention backend of its class: plain decoding's tokens, past its sliding window too."""

from __future__ import annotations

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_same, in_turn, prompt
from families import FAMILIES, WINDOW, family

import lade
from lade.backends.trials.tree_check import worst_error
from lade.model.supports import MASK_PER_LAYER_TYPE, ONE_MASK

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in FAMILIES for backend in case.backends]
MORE_CONFIGS = [
    *CONFIGS,
    *(lade.LookaheadConfig(*sizes) for sizes in ((15, 5, 15), (2, 6, 3), (0, 2, 1), (1, 2, 0), (4, 4, 4))),
]


def windowed(name: str, window: int) -> dict[str, int]:
    return {"attention_chunk_size" if name == "llama4_text" else "sliding_window": window}


@pytest.mark.one_in(32)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_it_writes_what_plain_decoding_writes(case, backend, watch):
    model = case.build(backend)
    assert lade.supports(model)
    configs = CONFIGS[:3] if backend == case.backends[0] else CONFIGS[:2]  # the others are in the cross product
    stats = assert_same(model, prompt(20), configs, max_new_tokens=60)
    short = assert_same(model, prompt(3, seed=1), max_new_tokens=60)
    assert stats.tokens_per_step > 1 and short.tokens_per_step > 1, "no guess was ever accepted"
    assert watch.branched and watch.moved, "the trees were chains: nothing was put to the test"


@pytest.mark.one_in(26)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_the_logits_at_every_node_are_those_of_plain_passes(case, backend):
    model = case.build(backend, seed=2)
    plan = lade.supports(model).require()
    bound = 1e-5 if case.dtype == torch.float64 else 1e-4  # some softmaxes and norms are float32 in any case
    assert worst_error(model, plan, beyond=WINDOW) < bound


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["mistral-window", "gemma3_text", "llama4_text"])
def test_a_window_shorter_than_a_tree_is_deep(name):
    assert_same(family(name).build(**windowed(name, 3)), prompt(20), CONFIGS, max_new_tokens=40)


@pytest.mark.one_in(22)
@pytest.mark.parametrize("window", [2, 19, 20, 21])
@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "cohere2", "llama4_text"])
def test_the_shortest_window_and_one_as_long_as_the_prompt(name, window):
    model = family(name).build(**windowed(name, window))
    assert_same(model, prompt(20), CONFIGS[:2], max_new_tokens=30)
    assert_same(model, prompt(20), do_sample=True, max_new_tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_the_cache_of_plain_decoding_heeds_and_the_model_does_not(field):
    model = family("llama").build(**{field: WINDOW})
    assert_same(model, prompt(20), CONFIGS)


def test_every_listed_family_is_tested():
    assert {case.model_type for case in FAMILIES} == MASK_PER_LAYER_TYPE | ONE_MASK


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_the_cross_product_of_sizes(case, backend, dtype):
    """Of the configurations, each family has others."""
    if case.dtype != torch.float64 and dtype == torch.float64:
        pytest.skip(f"{case} itself fails in float64")
    model = case.build(backend, seed=1, dtype=dtype)
    for length in in_turn((1, 7, 31), case, backend, dtype, count=2):
        configs = in_turn(MORE_CONFIGS, case, backend, dtype, length)
        assert_same(model, prompt(length, seed=1), configs, max_new_tokens=60)
        assert_same(model, prompt(length, seed=1), [PAPER], max_new_tokens=1)
