"""The mask that knows its tree: the same mask as the dense one, for any operation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import CPU, Case, cases, tree_of

from lade.backends.tree_attention.tree_mask import TreeMask
from lade.model.inputs import FULL, AttentionSpan, MaskPlan, StepInputs, sliding


@given(cases())
def test_it_is_what_each_query_sees(case):
    mask = case.mask()
    assert mask.shape == case.allowed()[:, None].shape and mask.dtype == torch.bool
    assert torch.equal(mask.dense(), case.allowed()[:, None])
    inputs, dense = case.inputs, case.dense
    assert torch.equal(dense.mask(case.span), mask.dense())
    assert torch.equal(inputs.ids, dense.ids) and torch.equal(inputs.positions, dense.positions)
    assert torch.equal(inputs.key_positions, dense.key_positions)


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 64, 65, 128])
def test_bits_fill_words_of_32(nodes):
    case = Case([tree_of(list(range(nodes - 1)))], [2])  # a chain: the last node sees all
    words = case.inputs.slots.ancestors
    assert words.dtype == torch.int32 and words.shape == (1, nodes, -(-nodes // 32))
    assert torch.equal(case.mask().dense(), case.allowed()[:, None])


@given(cases(most_nodes=6, longest=8), st.data())
def test_rows_may_begin_their_trees_in_slots_of_their_own(case, data):
    slots = case.inputs.slots
    firsts = [length + data.draw(st.integers(0, 3)) for length in slots.lengths.tolist()]
    nodes = slots.node_positions.shape[1]
    moved = type(slots)(
        **{**vars(slots), "firsts": torch.tensor(firsts, dtype=torch.int32), "width": max(firsts) + nodes + 2}
    )
    dense, plain = TreeMask(moved, case.span).dense(), case.mask().dense()
    assert dense.shape[-1] == moved.width
    for row, (length, first) in enumerate(zip(slots.lengths.tolist(), firsts, strict=True)):
        assert torch.equal(dense[row, ..., :length], plain[row, ..., :length])
        assert torch.equal(dense[row, ..., first : first + nodes], plain[row, ..., -nodes:])
        assert not dense[row, ..., length:first].any() and not dense[row, ..., first + nodes :].any()


def test_any_operation_gets_the_dense_mask():
    case = Case([tree_of([0, 0, 1])], [3], AttentionSpan(window=2))
    mask, dense = case.mask(), case.allowed()[:, None]
    assert torch.equal(~mask, ~dense) and torch.equal(mask[..., 1:], dense[..., 1:])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(mask.to(torch.float32), dense.float()) and mask.any() and type(mask.clone()) is torch.Tensor
    assert mask.sum() == dense.sum() and torch.cat([mask, mask]).shape[0] == 2
    states = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    found = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask)
    assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=dense))
    assert "TreeMask" in repr(mask)


def test_it_is_made_dense_once_and_only_when_somebody_looks():
    mask = Case([tree_of([0])], [3]).mask()
    assert mask._dense is None and mask.shape == (1, 1, 2, 5) and mask.device == CPU and mask.ndim == 4
    assert mask._dense is None and mask.dense() is mask.dense()


def test_a_plan_gives_one_to_each_layer_type():
    spans = {"full_attention": FULL, "sliding_attention": sliding(2)}
    masks, expected = (
        plan.masks(plan.inputs([tree_of([0, 0])], [4], CPU), torch.float32)
        for plan in (MaskPlan(spans, by_layer_type=True, additive=False, compact=compact) for compact in (True, False))
    )
    assert isinstance(masks, dict) and isinstance(expected, dict)
    assert masks.keys() == expected.keys()
    for kind, mask in masks.items():
        assert isinstance(mask, TreeMask) and torch.equal(mask.dense(), expected[kind])
    assert masks["full_attention"].slots is masks["sliding_attention"].slots


def test_rows_that_hold_nodes_get_dense_masks_unless_there_is_but_one():
    plan = MaskPlan({"attention": FULL}, by_layer_type=False, additive=False, compact=True)
    tree = tree_of([0, 0, 2])
    for held, expected in [([2], TreeMask), ([0, 0], TreeMask), ([2, 0], torch.Tensor)]:
        trees, lengths = [tree] * len(held), [5 + own for own in held]
        inputs, dense = plan.inputs(trees, lengths, CPU, held), StepInputs.of(trees, lengths, CPU, held)
        mask = plan.masks(inputs, torch.float32)
        assert type(mask) is expected and torch.equal(mask.clone(), dense.allowed[:, None])
        assert torch.equal(inputs.ids, dense.ids) and torch.equal(inputs.positions, dense.positions)


def test_the_kernel_gets_what_it_can_read():
    slots = Case([tree_of([0] * 39)], [4]).inputs.slots
    for name, wrong in [("lengths", slots.lengths.long()), ("ancestors", slots.ancestors.mT.contiguous().mT)]:
        with pytest.raises(ValueError, match=f"{name} is .* give contiguous int32"):
            type(slots)(**{**vars(slots), name: wrong})
