"""Masks of a step, read as pictures and checked against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.tree import TokenTree
from lade.model.attention import MaskPlan, StepInputs
from lade.model.reach import chunked, everything, sliding

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


def test_a_sliding_window_counts_positions_and_not_slots():
    plan = MaskPlan({"attention": sliding(3)}, by_layer_type=False, additive=False)
    mask = plan.masks(StepInputs.of([two_branches()], [3], CPU), torch.float32)[0, 0]
    assert drawn(mask) == ".###...\n..###..\n...###.\n..##..#"


def test_a_chunk_begins_anew_at_its_first_position():
    plan = MaskPlan({"attention": chunked(4)}, by_layer_type=False, additive=False)
    mask = plan.masks(StepInputs.of([two_branches()], [3], CPU), torch.float32)[0, 0]
    assert drawn(mask) == "####...\n....#..\n....##.\n......#"


def test_each_layer_type_gets_its_own_mask():
    plan = MaskPlan({"full_attention": everything, "sliding_attention": sliding(2)}, by_layer_type=True, additive=False)
    masks = plan.masks(StepInputs.of([two_branches()], [3], CPU), torch.float32)
    assert sorted(masks) == ["full_attention", "sliding_attention"]
    assert masks["full_attention"].sum() > masks["sliding_attention"].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_gets_an_additive_mask_in_the_models_dtype(dtype):
    plan = MaskPlan({"attention": everything}, by_layer_type=False, additive=True)
    inputs = StepInputs.of([two_branches()], [2], CPU)
    mask = plan.masks(inputs, dtype)
    assert mask.shape == (1, 1, 4, 6) and mask.dtype == dtype
    assert torch.equal(mask == 0, inputs.allowed[:, None])
    assert mask.min() == torch.finfo(dtype).min


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.data())
def test_smaller_trees_are_filled_up_and_stay_by_themselves(lengths, data):
    trees = []
    for _ in lengths:
        tree = TokenTree(0)
        for parent in data.draw(st.lists(st.integers(0, 9), max_size=6)):
            tree.add(parent % len(tree), len(tree), "pool")
        trees.append(tree)
    inputs = StepInputs.of(trees, lengths, CPU)
    step, first = max(map(len, trees)), max(lengths)
    assert inputs.allowed.shape == (len(trees), step, first + step)
    for row, (tree, cached) in enumerate(zip(trees, lengths, strict=True)):
        allowed = inputs.allowed[row]
        assert allowed.any(dim=-1).all(), "no softmax over nothing"
        assert allowed[: len(tree), :cached].all()
        assert not allowed[:, cached:first].any(), "the end of a longer row"
        own = allowed[: len(tree), first : first + len(tree)]
        assert torch.equal(own, torch.from_numpy(tree.closure()))
        assert not allowed[: len(tree), first + len(tree) :].any()
        positions = [cached + depth for depth in tree.depths]
        assert inputs.key_positions[row, first : first + len(tree)].tolist() == positions
        assert inputs.key_positions[row, :cached].tolist() == list(range(cached))
