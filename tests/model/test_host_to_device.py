"""What goes to the device in one copy."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from spies import watched
from trees import tree_of

from lade.backends.cuda_graphs.pass_inputs import StaticInputs
from lade.decoding.tree import TokenTree
from lade.model.inputs import FULL, AttentionSpan, PackedLayout, StepInputs, upload

CPU = torch.device("cpu")
PARTS = [
    (np.int64, (2, 3)),
    (np.int32, (3,)),
    (np.bool_, (5,)),
    (np.int64, ()),
    (np.bool_, (2, 2, 1)),
    (np.int64, (0, 4)),
]


def test_what_is_packed_is_found_again():
    layout = PackedLayout(PARTS)
    memory = layout.memory(CPU, staged=True)
    assert memory.dtype == torch.uint8 and memory.shape == (layout.size_bytes,) and not memory.any()
    generator = np.random.default_rng(0)
    wanted = [generator.integers(0, 2 if dtype is np.bool_ else 2**40, shape).astype(dtype) for dtype, shape in PARTS]
    for place, array in zip(layout.arrays(memory), wanted, strict=True):
        place[...] = array
    elsewhere = layout.memory(CPU).copy_(memory)
    for tensor, array in zip(layout.tensors(elsewhere), wanted, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


def test_on_the_cpu_nothing_is_copied():
    array = np.arange(5)
    (tensor,) = upload([array], CPU)
    assert tensor.data_ptr() == array.ctypes.data


def test_elsewhere_it_arrives_in_one_copy(monkeypatch):
    """Seen on a device without memory, where torch only keeps the books."""
    copies = watched(monkeypatch, torch.Tensor, "to", lambda tensor, *_, **named: (tensor, named))
    first, second = upload([np.arange(6).reshape(2, 3), np.array([True, False])], torch.device("meta"))
    assert first.device.type == second.device.type == "meta" and first.shape == (2, 3) and second.dtype == torch.bool
    ((staged, named),) = copies
    assert named == {"non_blocking": True}
    assert staged[:48].view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5] and staged[48:].tolist() == [1, 0]


trees = st.lists(st.integers(0, 30), max_size=7).map(tree_of)


@given(st.lists(st.tuples(trees, st.integers(0, 20)), min_size=1, max_size=4))
def test_a_padded_step_shows_each_node_what_a_step_of_its_own_shows_it(rows):
    """Compared row by row with `StepInputs.of` of one tree, whose columns are the cached tokens and the nodes."""
    step_trees, lengths = zip(*rows, strict=True)
    inputs = StaticInputs(4, 8, CPU)
    inputs.fill(step_trees, lengths)
    step, slots = inputs.step(32), inputs.slots()
    assert step.allowed.shape == (4, 8, 32) and step.allowed.any(-1).all(), "no softmax is empty"
    for row, (tree, length) in enumerate(rows):
        alone, size, used = StepInputs.of([tree], [length], CPU), len(tree), length + len(tree)
        assert torch.equal(step.ids[row, :size], alone.ids[0])
        assert torch.equal(step.positions[row, :size], alone.positions[0])
        assert torch.equal(step.key_positions[row, :used], alone.key_positions[0])
        assert torch.equal(step.allowed[row, :size, :used], alone.allowed[0])
        assert not step.allowed[row, :, used:].any(), "what fills up is never seen"
        assert step.allowed[row, size:].nonzero()[:, 1].unique().tolist() in ([length], []), "and sees the root only"
        assert slots[row].tolist() == list(range(length, length + 8))


@given(st.lists(st.tuples(trees, st.integers(0, 20)), min_size=1, max_size=4), st.sampled_from([8, 40]))
def test_a_padded_step_for_attention_that_knows_trees_shows_the_same(rows, size):
    step_trees, lengths = zip(*rows, strict=True)
    inputs = StaticInputs(4, size, CPU)
    inputs.fill(step_trees, lengths)
    dense, step = inputs.step(64), inputs.tree_step(64)
    assert torch.equal(step.ids, dense.ids) and torch.equal(step.positions, dense.positions)
    assert torch.equal(step.key_positions, dense.key_positions)
    for span in (FULL, AttentionSpan(window=3)):
        mask, expected = step.mask(span).dense(), dense.mask(span)
        for row, tree in enumerate(step_trees):
            assert torch.equal(mask[row, :, : len(tree)], expected[row, :, : len(tree)])
        assert mask.any(-1).all() and not (expected & ~mask).any(), "what fills up sees the root at least"


def test_filling_again_moves_nothing():
    inputs = StaticInputs(2, 8, CPU)
    pointers = [tensor.data_ptr() for tensor in (inputs.ids, inputs.positions, inputs.lengths, inputs.closure)]
    inputs.fill([tree_of([0, 1])] * 2, [3, 4])
    inputs.fill([TokenTree(7)], [9])
    assert inputs.ids[0].tolist() == [7] * 8 and inputs.lengths.tolist() == [9, 0]
    assert inputs.closure.sum().item() == 16, "of the first trees nothing is left"
    assert pointers == [tensor.data_ptr() for tensor in (inputs.ids, inputs.positions, inputs.lengths, inputs.closure)]
