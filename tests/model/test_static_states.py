"""States at fixed addresses, and what a captured pass knows of its trees."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import tree_of

from lade.backends.cuda_graphs.buffers import EagerReplay
from lade.backends.cuda_graphs.pass_inputs import ClosureAncestry, StaticInputs
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.backends.recurrent.layer import RecurrentLayer, RecurrentTreeLayer, TokenCounter, TreePass
from lade.model.kv_cache import TreeCache

CPU = torch.device("cpu")
trees = st.lists(st.lists(st.integers(0, 20), max_size=7).map(tree_of), min_size=1, max_size=3)


@settings(max_examples=examples(25))
@given(trees, st.integers(1, 5))
def test_ancestors_on_the_device_are_those_on_the_host(trees, width):
    inputs = StaticInputs(4, 8, CPU)
    inputs.fill(trees, [5] * len(trees))
    ours, theirs = ClosureAncestry(inputs.closure), TreePass(trees)
    assert ours.size == 8
    windows, closure = ours.windows(width, 4, CPU), ours.closure(CPU)
    for row, tree in enumerate(trees):
        size = len(tree)
        assert torch.equal(windows[row, :size], theirs.windows(width, 4, CPU)[row, :size])
        assert torch.equal(closure[row, :size, :size], theirs.closure(CPU)[row, :size, :size])


def filled(first):
    """A cache of one row of 4 tokens: a layer with states, one with keys and values beside them, and a counter."""
    cache = TreeCache()
    cache.layers += [RecurrentLayer(), RecurrentTreeLayer(), TokenCounter()]
    for number, layer in enumerate(cache.recurrent):
        layer.update_conv_state(first + number + torch.rand(1, 6, 4))
        layer.update_recurrent_state(-first - number - torch.rand(1, 2, 3, 5))
    cache.update(torch.rand(1, 2, 4, 3), torch.rand(1, 2, 4, 3), 1)
    cache.count(1, 4)
    return cache


def states_of(cache):
    return [state.clone() for layer in cache.recurrent for state in layer.states.values()]


def test_rows_keep_their_states_as_they_come_and_go():
    cache, expected = StaticCache(60, pool=BufferPool(EagerReplay)), []
    for number in range(3):  # grows twice
        part = filled(10 * number)
        expected.append(states_of(part))
        cache.take(part)
    cache.leave(0)
    expected = [expected[2], expected[1]]
    cache.reserve(4, 700)
    for move in (cache.copy_to, cache.move_to):
        other = TreeCache()
        move(other)
        for number, state in enumerate(states_of(other)):
            assert torch.equal(state, torch.cat([row[number] for row in expected]))
        assert other.lengths == [4, 4] and all(all(layer.has_previous_state.values()) for layer in other.recurrent)
    assert cache.empty


@pytest.mark.parametrize("move", ["copy_to", "move_to"])
def test_what_is_handed_out_is_not_in_the_buffers(move):
    cache, other = StaticCache(60), TreeCache()
    cache.take(filled(1))
    addresses = {group.untyped_storage().data_ptr() for group in cache.buffers.fixed}
    getattr(cache, move)(other)
    states = [state for layer in other.recurrent for state in layer.states.values()]
    assert states and all(state.untyped_storage().data_ptr() not in addresses for state in states)


def test_buffers_are_zero_for_the_next_generation():
    pool = BufferPool(EagerReplay)
    cache = StaticCache(60, pool=pool)
    cache.take(filled(1))
    buffers = cache.buffers
    cache.reset()
    again = StaticCache(60, pool=pool)
    again.take(filled(2))
    assert again.buffers is buffers
    again.leave(0)
    again.reset()
    assert pool.acquire(again, buffers.layers, 1, 256) is buffers
    assert not any(group.any() for group in buffers.fixed)
