"""Masks of a step, read as pictures and checked against brute force, and those that a configuration asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, PretrainedConfig

from lade.decoding.tree import TokenTree
from lade.model.config import field, per_layer, window_too_short
from lade.model.inputs import FULL, AttentionSpan, MaskPlan, RootInputs, StepInputs, plan_for

CPU = torch.device("cpu")


def two_branches(root: int = 9) -> TokenTree:
    tree = TokenTree(root)
    tree.add_path([1, 2], "pool")
    tree.add_path([3], "pool")
    return tree


def drawn(mask: torch.Tensor) -> str:
    return "\n".join("".join("#" if seen else "." for seen in row) for row in mask)


def test_a_node_sees_the_cache_its_ancestors_and_itself():
    inputs = StepInputs.of([two_branches()], [3], CPU)
    assert inputs.positions.tolist() == [[3, 4, 5, 4]]
    assert drawn(inputs.allowed[0]) == "####...\n#####..\n######.\n####..#"


@pytest.mark.parametrize(
    ("span", "picture"),
    [
        (AttentionSpan(3), ".###...\n..###..\n...###.\n..##..#"),
        (AttentionSpan(chunk=4), "####...\n....#..\n....##.\n......#"),
    ],
    ids=["a window counts positions and not slots", "a chunk starts at its first position"],
)
def test_a_span_is_one_of_positions(span, picture):
    plan = MaskPlan({"attention": span}, by_layer_type=False, additive=False)
    assert drawn(plan.masks(StepInputs.of([two_branches()], [3], CPU), torch.float32)[0, 0]) == picture


def test_each_layer_type_gets_its_own_mask():
    plan = MaskPlan({"full_attention": FULL, "sliding_attention": AttentionSpan(2)}, by_layer_type=True, additive=False)
    masks = plan.masks(StepInputs.of([two_branches()], [3], CPU), torch.float32)
    assert sorted(masks) == ["full_attention", "sliding_attention"]
    assert masks["full_attention"].sum() > masks["sliding_attention"].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_gets_an_additive_mask_in_the_models_dtype(dtype):
    plan = MaskPlan({"attention": FULL}, by_layer_type=False, additive=True)
    inputs = StepInputs.of([two_branches()], [2], CPU)
    mask = plan.masks(inputs, dtype)
    assert mask.shape == (1, 1, 4, 6) and mask.dtype == dtype
    assert torch.equal(mask == 0, inputs.allowed[:, None])
    assert mask.min() == torch.finfo(dtype).min


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.booleans(), st.data())
def test_smaller_trees_are_filled_up_and_stay_by_themselves(texts, holding, data):
    """`texts` are the tokens in front of the trees; the first nodes of a tree may be held by the cache."""
    trees, held = [], []
    for _ in texts:
        tree = TokenTree(0)
        for parent in data.draw(st.lists(st.integers(0, 9), max_size=6)):
            tree.add(parent % len(tree), len(tree), "pool")
        trees.append(tree)
        held.append(data.draw(st.integers(0, len(tree))) if holding else 0)
    held[0] = min(held[0], len(trees[0]) - 1)  # someone feeds something
    lengths = [before + own for before, own in zip(texts, held, strict=True)]
    inputs = StepInputs.of(trees, lengths, CPU, held if holding else None)
    first, step = max(lengths), max(len(tree) - own for tree, own in zip(trees, held, strict=True))
    assert inputs.allowed.shape == (len(trees), step, first + step)
    for row, (tree, own, before, cached) in enumerate(zip(trees, held, texts, lengths, strict=True)):
        fed, allowed = len(tree) - own, inputs.allowed[row]
        assert allowed.any(dim=-1).all(), "no softmax over nothing"
        assert allowed[:fed, :before].all()
        assert not allowed[:, cached:first].any(), "the end of a longer row"
        of_the_tree = [*range(before, cached), *range(first, first + fed)]
        assert torch.equal(allowed[:fed, of_the_tree], torch.from_numpy(tree.closure()[own:]))
        assert not allowed[:fed, first + fed :].any()
        assert inputs.ids[row, :fed].tolist() == tree.ids[own:]
        positions = [before + depth for depth in tree.depths]
        assert inputs.positions[row, :fed].tolist() == positions[own:]
        assert inputs.key_positions[row, of_the_tree].tolist() == positions
        assert inputs.key_positions[row, :before].tolist() == list(range(before))
        assert inputs.positions[row].max() == max(positions[own:], default=before), "filling lies where the root does"


@pytest.mark.parametrize("span", [FULL, AttentionSpan(3), AttentionSpan(50), AttentionSpan(chunk=4)], ids=str)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("lengths", [[9], [9, 4, 12], [5, 5]], ids=str)
def test_roots_alone_see_what_they_see_in_trees_and_a_lone_one_needs_no_mask_to_see_everything(lengths, span, additive):
    plan, tokens = MaskPlan({"attention": span}, by_layer_type=False, additive=additive), [7, 1, 3][: len(lengths)]
    roots = RootInputs.of(tokens, lengths, CPU)
    dense = StepInputs.of([TokenTree(token) for token in tokens], lengths, CPU)
    assert torch.equal(roots.ids, dense.ids) and torch.equal(roots.positions, dense.positions)
    assert torch.equal(roots.key_positions, dense.key_positions)
    mask, expected = plan.masks(roots, torch.float32), plan.masks(dense, torch.float32)
    assert mask is None if span is FULL and len(lengths) == 1 else torch.equal(mask, expected)


TYPES = ["sliding_attention", "full_attention"] * 2


def config(model_type: str = "gemma3_text", **fields: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, num_hidden_layers=4, **fields)


def test_a_field_of_which_layers_have_values_of_their_own_is_a_list():
    uneven = config("gemma4_text", layer_types=TYPES, head_dim=8, global_head_dim=16)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        uneven.head_dim  # noqa: B018 - reading it is the test
    assert field(uneven, "head_dim") == per_layer(uneven, "head_dim") == [8, 16, 8, 16]
    assert field(uneven, "num_hidden_layers") == 4 and per_layer(uneven, "num_hidden_layers") == [4] * 4
    assert field(uneven, "nothing") is None and field(uneven, "nothing", 3) == 3


def test_each_layer_type_has_its_reach():
    plan = plan_for(config(layer_types=TYPES, sliding_window=12), by_layer_type=True)
    assert plan.spans == {"sliding_attention": AttentionSpan(12), "full_attention": FULL}
    types = ["chunked_attention", "full_attention"] * 2
    plan = plan_for(config("llama4_text", layer_types=types, attention_chunk_size=5), by_layer_type=True)
    assert plan.spans == {"chunked_attention": AttentionSpan(chunk=5), "full_attention": FULL}


@pytest.mark.parametrize(
    ("fields", "span"),
    [
        ({}, FULL),
        ({"sliding_window": 7}, AttentionSpan(7)),
        ({"attention_chunk_size": 7}, AttentionSpan(7)),  # the cache of plain decoding holds that much
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 7}, FULL),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 7}, AttentionSpan(7)),
    ],
)
def test_one_mask_for_all_layers(fields, span):
    assert plan_for(config("llama", **fields), by_layer_type=False).spans == {"attention": span}


@pytest.mark.parametrize("by_layer_type", [True, False])
def test_layers_that_would_need_several_masks_of_one_type(by_layer_type):
    windows = {1: {"sliding_window": 4}, 2: {"sliding_window": 6}}
    uneven = config("llama", layer_types=["sliding_attention"] * 4, sliding_window=6, per_layer_config=windows)
    with pytest.raises(ValueError, match=r"takes one mask for layers with different windows \(\['4', '6'\]\)"):
        plan_for(uneven, by_layer_type=by_layer_type)


def test_windows_that_are_too_short_are_named():
    assert window_too_short(config("llama")) == window_too_short(config("mistral", sliding_window=2)) == ""
    assert window_too_short(config("mistral", sliding_window=1)) == "sliding_window=1"
    full = config(layer_types=["full_attention"] * 4, sliding_window=1)
    assert window_too_short(full) == "", "no layer has it"
