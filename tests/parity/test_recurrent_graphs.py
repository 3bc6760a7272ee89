"""Passes of recurrent and hybrid models that are captured and replayed write what `model.generate` writes.

On the CPU a tape stands in for CUDA graphs. It runs a pass twice when it captures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import PAPER, assert_same, lookahead, plain, prompt
from effort import now_and_then
from families import RECURRENT_FAMILIES, family
from graphed import Graphs, graphs_on, shapes_of
from test_serving_families import assert_served
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import NodeBuffers
from lade.decoding.tree import TokenTree
from lade.errors import CaptureWarning
from lade.model.kv_cache import TreeCache

BUDGET = lade.LookaheadConfig(budget=24)
DEPTH_BY_DEPTH = ["jamba", "mamba", "falcon_mamba"]
EXPERTS = [
    "bailing_hybrid",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
]
"""Their experts are called one by one, each with the tokens that chose it: how many, the host has to know."""
HERE = [case for case in RECURRENT_FAMILIES if case.model_type in CONFIG_MAPPING]
CAPTURED = [
    pytest.param(case, id=str(case), marks=[] if str(case) in ("lfm2", "mamba2") else pytest.mark.slow)
    for case in HERE
    if str(case) not in DEPTH_BY_DEPTH + EXPERTS
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    with graphs_on("cpu", monkeypatch) as made:
        yield made


@pytest.mark.parametrize("case", CAPTURED)
def test_greedy_tokens_are_plain_decodings(case, graphs):
    stats = assert_same(case.build(), prompt(20), (PAPER, BUDGET), max_new_tokens=24)
    assert graphs.counted.replayed == stats.steps > graphs.counted.recorded > 1
    assert stats.tokens_per_step > 1, "no guess was ever accepted"


def test_a_token_by_itself_is_a_tree(graphs):
    model = family("qwen3_5_text").build()
    assert_same(model, prompt(5), [lade.LookaheadConfig(budget=1)], max_new_tokens=8)
    assert {size for _, size, _ in shapes_of(graphs.pool(model))} == {8} and graphs.runner(model).step_sizes[0] == 8


@pytest.mark.parametrize("name", ["qwen3_5_text", *now_and_then("lfm2", "mamba2", "falcon_h1")])
def test_requests_that_come_and_go(name, graphs):
    model = family(name).build()
    for sampled in (False, True):
        assert_served(model, [BUDGET if sampled else PAPER], new_tokens=8, pad_token_id=0, do_sample=sampled)
    assert len({rows for rows, _, _ in shapes_of(graphs.pool(model))}) > 1 and graphs.counted.replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_the_cache_that_is_handed_out(name, graphs):
    model, ids = family(name).build(), prompt(20)
    output = lookahead(model, ids, return_dict_in_generate=True, max_new_tokens=30)
    cache = output.past_key_values
    assert graphs.counted.replayed > 0 and isinstance(cache, TreeCache) and cache.recurrent
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    longer = torch.cat([output.sequences, prompt(5, seed=1)], dim=1)
    assert torch.equal(lookahead(model, longer, past_key_values=cache), plain(model, longer))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_what_cannot_be_captured_is_called_again(name, graphs):
    model, ids = family(name).build(), prompt(20)
    expected = plain(model, ids, max_new_tokens=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        assert torch.equal(lookahead(model, ids, PAPER, max_new_tokens=30), expected)
    assert graphs.pool(model).capture_failed_in is not None


def test_a_pass_leaves_the_states_alone(graphs):
    model, ids = family("qwen3_5_text").build(), prompt(20)
    runner, tree = graphs.runner(model), TokenTree(3)
    tree.add_path([4, 5], "pool")
    filled = TreeCache()
    runner.eager().prefill(ids.tolist(), filled)
    cache: Any = runner.host(filled, 60)
    before = [group.clone() for group in cache.buffers.state_groups.values()]
    text = [[*ids[0].tolist(), 3]]
    first = runner.forward([tree], text, cache).clone()
    cache.keep([[]], fed=3)
    assert torch.equal(runner.forward([tree], text, cache), first)
    for group, old in zip(cache.buffers.state_groups.values(), before, strict=True):
        assert torch.equal(group, old) and group.any()


def test_paths_that_are_not_folded_are_noticed(graphs, monkeypatch):
    model, ids = family("qwen3_5_text").build(), prompt(20)
    expected, fold, calls = plain(model, ids, max_new_tokens=12), NodeBuffers.fold, []

    def forgetful(self: NodeBuffers, paths: Any) -> None:
        calls.append(paths)
        if len(calls) != 3:
            fold(self, paths)

    monkeypatch.setattr(NodeBuffers, "fold", forgetful)
    assert not torch.equal(lookahead(model, ids, PAPER, max_new_tokens=12), expected)


@pytest.mark.parametrize("name", DEPTH_BY_DEPTH)
def test_trees_that_are_gone_through_depth_by_depth_are_not_captured(name):
    assert "depth by depth" in capture_refusal(family(name).build())
