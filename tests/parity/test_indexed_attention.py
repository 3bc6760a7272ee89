"""Attention whose keys an indexer picks: what each node of a tree picks, and where its third tensor goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import CONFIGS, assert_same, batch, lookahead, plain, prompt
from families import family
from inside import force_attention
from transformers import DynamicCache

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.slots import KeyPicks
from lade.backends.trials.tree_check import worst_error
from lade.model import cache_layers

NAMES = ["deepseek_v32", "glm_moe_dsa"]


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
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [lade.TreeCache, DynamicCache])
def test_a_cache_of_ones_own_goes_on(name, make):
    model = family(name).build()

    def new() -> Any:
        return make() if make is lade.TreeCache else make(config=model.config)

    ours, theirs = new(), DynamicCache(config=model.config)
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
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_length(name):
    model = family(name).build()
    rows = batch(20, 20, 20)
    first = plain(model, **rows, max_new_tokens=30)[:, 20:]
    eos = {"eos_token_id": [int(first[0, 9]), int(first[2, 17])], "pad_token_id": 0}
    assert_same(model, rows["ids"], CONFIGS[:2], max_new_tokens=30, **eos)
