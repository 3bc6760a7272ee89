"""Every family, with every attention backend of its class: plain decoding's tokens, past its sliding window too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_same, batch, in_turn, lookahead, plain, prompt
from families import FAMILIES, WINDOW, family
from inside import force_attention
from transformers import DynamicCache

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.slots import KeyPicks
from lade.backends.trials.tree_check import worst_error
from lade.model import cache_layers
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


# --- attention whose keys an indexer picks: what each node of a tree picks, and where its third tensor goes ----------

INDEXED = ["deepseek_v32", "glm_moe_dsa"]


def test_a_node_that_picks_among_slots_is_found_out(monkeypatch):
    """Half of the scores are 0: what `topk` takes of them in a tree is not what it takes of the text alone."""
    model = family("deepseek_v32").build(seed=2)
    plan = lade.supports(model).require()
    assert worst_error(model, plan, beyond=12) < 1e-5
    monkeypatch.setattr(KeyPicks, "best", lambda _, scores, k: tuple(scores.topk(k)))
    assert worst_error(model, plan, beyond=12) > 0.1


def test_keys_that_do_not_follow_their_path_are_found_out(monkeypatch):
    model = family("deepseek_v32").build(seed=2)
    plan = lade.supports(model).require()
    monkeypatch.setattr(cache_layers, "_NAMES", ("keys", "values"))
    monkeypatch.setattr(cache_layers, "_buffers_of", lambda layer: (layer.keys, layer.values))
    assert worst_error(model, plan, beyond=12) > 0.1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("make", [lade.TreeCache, DynamicCache])
def test_a_cache_of_ones_own_goes_on(name, make):
    model: Any = family(name).build()
    theirs = DynamicCache(config=model.config)
    ours = make() if make is lade.TreeCache else make(config=model.config)
    first = plain(model, prompt(20), max_new_tokens=20, past_key_values=theirs)
    assert torch.equal(lookahead(model, prompt(20), max_new_tokens=20, past_key_values=ours), first)
    longer = torch.cat([first, prompt(7, seed=2)], dim=1)
    expected = plain(model, longer, max_new_tokens=20, past_key_values=theirs)
    assert torch.equal(lookahead(model, longer, max_new_tokens=20, past_key_values=ours), expected)


def test_what_it_cannot_be_served_with():
    model = family("deepseek_v32").build()
    with pytest.raises(lade.UnsupportedArgumentError, match="from 11 tokens on this model counts the padding"):
        lookahead(model, **batch(9, 5), pad_token_id=0)
    with pytest.raises(lade.UnsupportedArgumentError, match=r"no indexer keys; give DynamicCache\(config="):
        lookahead(model, prompt(5), past_key_values=DynamicCache())
    with (
        lade.Engine(model) as engine,
        pytest.raises(lade.UnsupportedArgumentError, match=r"prefill_chunk_size=7 .* depends on where a piece begins"),
    ):
        engine.add(prompt(20), prefill_chunk_size=7, max_new_tokens=5)
    assert "its indexers pick" in capture_refusal(model)
    force_attention(model, "lade_tree")
    assert "takes no tree mask" in lade.supports(model).reason


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "arguments",
    [{"do_sample": True, "temperature": 0.7}, {"num_beams": 3}, {"prefill_chunk_size": 7}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_sampling_beams_and_chunks(arguments):
    model = family("glm_moe_dsa").build()
    assert_same(model, prompt(30), max_new_tokens=30, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEXED)
def test_rows_of_one_length(name):
    model = family(name).build()
    rows = batch(20, 20, 20)
    first = plain(model, **rows, max_new_tokens=30)[:, 20:]
    eos = {"eos_token_id": [int(first[0, 9]), int(first[2, 17])], "pad_token_id": 0}
    assert_same(model, rows["ids"], CONFIGS[:2], max_new_tokens=30, **eos)
