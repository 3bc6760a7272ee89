"""Invariant models of the fused families: drafted, captured passes have the bits of `model.generate`.

Where there is no GPU, kernels are interpreted, and torch stands in for most of them: a pass would take minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import batch, lookahead, plain, prompt
from exact_products import exact_linear, quick_kernels
from families import family
from graphed import Graphs, graphs_on
from test_fused_passes import NAMES, built, device, passes

import lade
from lade.backends.cuda_graphs.buffers import EagerReplay
from lade.backends.cuda_graphs.invariant import make_invariant as making
from lade.errors import PrecisionWarning
from lade.model.facts import CACHE, as_cache, is_invariant

__all__ = ["device", "passes"]  # fixtures
SMALL = lade.LookaheadConfig(3, 2, 4)
SCORES = {"return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    if device.type == "cpu":
        quick_kernels(monkeypatch, attends=True)
    with graphs_on(device, monkeypatch, EagerReplay) as made:  # a tape does not see what an interpreter does
        warnings.simplefilter("error", PrecisionWarning)
        yield made


def invariant(name: str, device: torch.device, **overrides: Any) -> Any:
    """A model that is invariant as on a GPU."""
    model = built(name, device, **overrides)
    if device.type == "cuda":
        return lade.invariant(model)
    making.change_layers(model)
    return model


def same(found: Any, expected: Any) -> bool:
    """Whether tokens and logits are equal, bit for bit."""
    logits = zip(found.logits, expected.logits, strict=True)
    return torch.equal(found.sequences, expected.sequences) and all(torch.equal(*pair) for pair in logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_plain_decoding(name, dtype, device, graphs, passes):
    model, ids = invariant(name, device, dtype=dtype), prompt(60).to(device)
    expected = plain(model, ids, max_new_tokens=12, **SCORES)
    assert same(lookahead(model, ids, SMALL, max_new_tokens=12, **SCORES), expected)
    assert passes and graphs.pool(model).fusion_failed_in is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scores_are_those_of_plain_decoding_with_all_kernels(device, graphs, monkeypatch, passes):
    monkeypatch.undo()
    graphs.serve(monkeypatch)
    if device.type == "cpu":
        quick_kernels(monkeypatch, attends=False)
    model, ids = invariant("llama", device, dtype=torch.float16), prompt(60).to(device)
    expected = plain(model, ids, max_new_tokens=6, **SCORES)
    assert same(lookahead(model, ids, SMALL, max_new_tokens=6, **SCORES), expected)
    assert graphs.pool(model).fusion_failed_in is None


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_rows_of_a_batch_have_the_bits_of_each_row_alone(name, device, graphs):
    model, rows = invariant(name, device, dtype=torch.float16), batch(9, 30, 21)
    rows = {each: tensor.to(device) for each, tensor in rows.items()}
    expected = plain(model, **rows, max_new_tokens=8, **SCORES)
    assert same(lookahead(model, config=SMALL, **rows, max_new_tokens=8, **SCORES), expected)
    alone = plain(model, rows["ids"][1:2], max_new_tokens=8, **SCORES)
    assert all(torch.equal(one[0], many[1]) for one, many in zip(alone.logits, expected.logits, strict=True))


def test_prompts_in_pieces_have_the_bits_of_the_whole(device, graphs):
    model, ids = invariant("qwen3", device, dtype=torch.float16), prompt(90).to(device)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :37])
        rest = model(ids[:, 37:], **as_cache(first[CACHE])).logits
    assert torch.equal(whole[:, 37:], rest)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "gemma3_text"])
def test_a_trial_decides(name, device, graphs, monkeypatch, passes):
    monkeypatch.setattr(making, "TEXTS", (5, 61))
    monkeypatch.setattr(making, "TREES", (1, 9))
    model = built(name, device, dtype=torch.float16)
    before = type(model.lm_head)
    assert making.make_invariant(model, graphs.pool(model)) == "" and is_invariant(model)
    assert passes and graphs.pool(model).fusion_failed_in is None
    assert not lade.supports(model).reason
    lade.variant(model)
    assert type(model.lm_head) is before and not is_invariant(model)

    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        place = torch.arange(64, device=x.device)[:, None]
        return exact_linear(x, weight, bias) * (1 + place / 64)

    from lade.backends.cuda_graphs.invariant import layers

    monkeypatch.setattr(layers, "linear", by_rows)
    assert "first part that rounds a token differently" in making.make_invariant(model, graphs.pool(model))
    assert type(model.lm_head) is before and not is_invariant(model)


CHANGES: dict[str, Callable[[Any], object]] = {
    "hooks": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None),
    "invariant in float16": lambda model: model.float(),
    "attention implementation was changed": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("why", CHANGES)
def test_changes_of_an_invariant_model_are_noticed(why, device, graphs):
    model = invariant("llama", device, dtype=torch.float16)
    assert not lade.supports(model).reason
    CHANGES[why](model)
    assert why in str(lade.supports(model).reason)


def test_models_of_other_families_are_refused(device):
    model: Any = family("gpt2").build("sdpa", dtype=torch.float32).to(device)
    assert "family" in making.refusal(model)
    other: Any = family("llama").build("eager", dtype=torch.float32).to(device)
    assert "sdpa" in making.refusal(other)


@pytest.mark.parametrize("rows", [1, 5, 64, 70])
def test_products_are_made_of_64_rows(rows, device, graphs):
    from lade.backends.cuda_graphs.fused_kernels import roomy
    from lade.backends.cuda_graphs.invariant.layers import product

    weight, x = torch.randn(24, 32, device=device), torch.randn(1, rows, 32, device=device)
    expected = torch.cat([product(x[:, row : row + 1], weight) for row in range(rows)], 1)
    assert torch.equal(product(x, weight), expected)
    assert torch.equal(product(roomy(x, *x.shape).copy_(x), weight), expected)
    torch.testing.assert_close(expected, torch.nn.functional.linear(x, weight), atol=1e-4, rtol=1e-4)
