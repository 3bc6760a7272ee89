"""Passes of recurrent and hybrid models that are captured and replayed write what `model.generate` writes.

On the CPU a tape stands in for CUDA graphs. It runs a pass twice when it captures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_same, batch, lookahead, plain, prompt
from families import RECURRENT_FAMILIES, Family
from graphed import Graphs, graphs_on, shapes_of
from inside import buffers_in
from pretend import small_buffers
from spies import failing, watched
from test_batch_families import LENGTHS
from test_serving_families import assert_served
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import Buffers, NodeBuffers
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
SEVERAL = ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "mamba2", "falcon_h1"))]


def recurrent(name: str) -> Any:
    return next(case for case in RECURRENT_FAMILIES if str(case) == name).build()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    with graphs_on("cpu", monkeypatch) as made:
        yield made


@pytest.mark.parametrize("case", CAPTURED)
def test_greedy_tokens_are_plain_decodings(case: Family, graphs: Graphs) -> None:
    stats = assert_same(case.build(), prompt(20), (PAPER, BUDGET), max_new_tokens=24)
    assert graphs.counted.replayed == stats.steps > graphs.counted.recorded > 1
    assert stats.tokens_per_step > 1, "no guess was ever accepted"


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS[2:])
def test_any_method_at_any_size(config: lade.LookaheadConfig, graphs: Graphs) -> None:
    for name in ("qwen3_5_text", "lfm2"):
        model = recurrent(name)
        for length, new in ((1, 12), (2, 1), (7, 2), (64, 20)):
            assert_same(model, prompt(length, seed=length), [config], max_new_tokens=new)


def test_a_token_by_itself_is_a_tree(graphs: Graphs) -> None:
    model = recurrent("qwen3_5_text")
    assert_same(model, prompt(5), [lade.LookaheadConfig(budget=1)], max_new_tokens=8)
    assert {size for _, size, _ in shapes_of(graphs.pool(model))} == {8} and graphs.runner(model).step_sizes[0] == 8


@pytest.mark.parametrize("name", SEVERAL)
def test_batches_whose_rows_end_in_turn(name: str, graphs: Graphs) -> None:
    model, rows = recurrent(name), batch(*LENGTHS)
    arguments: dict[str, Any] = {"pad_token_id": 0, "max_new_tokens": 18}
    free = plain(model, **rows, **arguments)
    arguments["eos_token_id"] = [int(free[1, 25]), int(free[3, 35])]
    expected = plain(model, **rows, **arguments)
    assert torch.equal(lookahead(model, **rows, **arguments), expected)
    assert len({count for count, _, _ in shapes_of(graphs.pool(model))}) > 1, "rows leave"


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_samples_and_the_generator_afterwards(name: str, graphs: Graphs) -> None:
    model = recurrent(name)
    for rows in (1, 3):
        ids, sampling = prompt(20).repeat(rows, 1), {"do_sample": True, "temperature": 0.7, "max_new_tokens": 9}
        torch.manual_seed(rows)
        expected = plain(model, ids, **sampling)
        state = torch.get_rng_state()
        torch.manual_seed(rows)
        assert torch.equal(lookahead(model, ids, BUDGET, **sampling), expected)
        assert torch.equal(torch.get_rng_state(), state)
    assert graphs.counted.replayed > 0


@pytest.mark.parametrize("name", SEVERAL)
def test_requests_that_come_and_go(name: str, graphs: Graphs) -> None:
    model = recurrent(name)
    assert_served(model, [PAPER], new_tokens=8, pad_token_id=0, do_sample=False)
    assert len({rows for rows, _, _ in shapes_of(graphs.pool(model))}) > 1 and graphs.counted.replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "mamba2", "falcon_h1"])
def test_sampled_requests_that_come_and_go(name: str, graphs: Graphs) -> None:
    assert_served(recurrent(name), [PAPER, None, BUDGET], pad_token_id=0, do_sample=True)


@pytest.mark.slow
def test_a_second_generation_captures_nothing_and_sees_nothing_of_the_first(graphs: Graphs) -> None:
    model, recorded = recurrent("lfm2"), []
    for seed in (0, 1, 0):
        assert_same(model, prompt(20, seed), [BUDGET], max_new_tokens=10)
        recorded.append(graphs.counted.recorded)
    assert recorded[2] == recorded[1] > 0 and len(buffers_in(graphs.pool(model))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_the_cache_that_is_handed_out(name: str, graphs: Graphs) -> None:
    model, ids = recurrent(name), prompt(20)
    output = lookahead(model, ids, return_dict_in_generate=True, max_new_tokens=30)
    cache = output.past_key_values
    assert graphs.counted.replayed > 0 and isinstance(cache, TreeCache) and cache.recurrent
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    longer = torch.cat([output.sequences, prompt(5, seed=1)], dim=1)
    assert torch.equal(lookahead(model, longer, past_key_values=cache), plain(model, longer))


@pytest.mark.parametrize("where", ["growth", pytest.param("capture", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_generation_goes_on_without_memory(
    where: str, rows: int, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_buffers(monkeypatch)
    model, length = recurrent("qwen3_5_text"), 210 if where == "growth" else 20
    ids = torch.cat([prompt(length, seed) for seed in range(rows)])
    expected = plain(model, ids, max_new_tokens=30)

    def is_too_large(buffers: Buffers, layers: Any, rows: int, slots: int) -> bool:
        return where == "growth" and slots > 256

    def is_second(self: NodeBuffers, layers: Any) -> bool:
        return where == "capture" and len({id(buffers) for buffers, _ in taken}) == 2

    failing(monkeypatch, Buffers, "__init__", torch.OutOfMemoryError, where=is_too_large)
    failing(monkeypatch, NodeBuffers, "take", torch.OutOfMemoryError, where=is_second, after=True)
    taken = watched(monkeypatch, NodeBuffers, "take")
    with pytest.warns(CaptureWarning, match="no memory for captured passes"):
        assert torch.equal(lookahead(model, ids, PAPER, max_new_tokens=30), expected)
    assert taken and graphs.counted.replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_what_cannot_be_captured_is_called_again(name: str, graphs: Graphs) -> None:
    model, ids = recurrent(name), prompt(20)
    expected = plain(model, ids, max_new_tokens=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        assert torch.equal(lookahead(model, ids, PAPER, max_new_tokens=30), expected)
    assert graphs.pool(model).capture_failed_in is not None


def test_a_pass_leaves_the_states_alone(graphs: Graphs) -> None:
    model, ids = recurrent("qwen3_5_text"), prompt(20)
    runner, tree = graphs.runner(model), TokenTree(3)
    tree.add_path([4, 5], "pool")
    filled = TreeCache()
    runner.eager().prefill(ids.tolist(), filled)
    cache: Any = runner.host(filled, 60)
    before = [group.clone() for group in cache.buffers.states.groups.values()]
    text = [[*ids[0].tolist(), 3]]
    first = runner.forward([tree], text, cache).clone()
    cache.keep([[]], fed=3)
    assert torch.equal(runner.forward([tree], text, cache), first)
    for group, old in zip(cache.buffers.states.groups.values(), before, strict=True):
        assert torch.equal(group, old) and group.any()


def test_paths_that_are_not_folded_are_noticed(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = recurrent("qwen3_5_text"), prompt(20)
    expected, fold, calls = plain(model, ids, max_new_tokens=12), NodeBuffers.fold, []

    def forgetful(self: NodeBuffers, paths: Any) -> None:
        calls.append(paths)
        if len(calls) != 3:
            fold(self, paths)

    monkeypatch.setattr(NodeBuffers, "fold", forgetful)
    assert not torch.equal(lookahead(model, ids, PAPER, max_new_tokens=12), expected)


@pytest.mark.parametrize("name", DEPTH_BY_DEPTH)
def test_trees_that_are_gone_through_depth_by_depth_are_not_captured(name: str) -> None:
    assert "depth by depth" in capture_refusal(recurrent(name))
