"""A cache at fixed addresses, and its states: compared with lists of what each row should hold."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from spies import watched
from trees import tree_of

from lade.backends.cuda_graphs.buffers import Buffers, EagerReplay
from lade.backends.cuda_graphs.pass_inputs import ClosureAncestry, StaticCacheView, StaticInputs
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.backends.recurrent.layer import RecurrentLayer, RecurrentTreeLayer, TokenCounter, TreePass
from lade.model.cache_layers import TreeLayer
from lade.model.inputs import batch_bucket, key_bucket
from lade.model.kv_cache import TreeCache

HEADS, DIM, LAYERS = 2, 3, 3


class Watched(BufferPool):
    """Notes what it gets back, and runs out of memory where a test wants it."""

    def __init__(self):
        super().__init__(EagerReplay)
        self.acquired, self.discarded, self.released, self.full = [], [], [], False

    def acquire(self, owner, layers, rows, slots, limit=None):
        if self.full:
            raise torch.OutOfMemoryError("no more")
        self.acquired.append((rows, slots))
        return super().acquire(owner, layers, rows, slots, limit)

    def discard(self, buffers):
        self.discarded.append(buffers)
        super().discard(buffers)

    def release(self, buffers):
        self.released.append(buffers)
        super().release(buffers)


def filled(lengths, first=1):
    """A `TreeCache` whose token number i of row b holds `first + 100 b + i`; the layers add 1000 each."""
    cache = TreeCache()
    for layer in range(LAYERS):
        wanted = torch.zeros(len(lengths), HEADS, max(lengths), DIM)
        for row, length in enumerate(lengths):
            wanted[row, :, :length] = (first + 1000 * layer + 100 * row + torch.arange(length))[:, None]
        cache.update(wanted, -wanted[..., :2], layer)  # values are narrower than keys
        cache.layers[-1].lengths = list(lengths)
    return cache


def static(*lengths, tokens=60):
    cache = StaticCache(tokens)
    cache.join([filled(lengths)], [(0, row) for row in range(len(lengths))])
    return cache


def held(cache, layer=0):
    """What each row holds, and that all after it is zero."""
    keys, values = cache.buffers.keys[layer], cache.buffers.values[layer]
    rows = []
    for row, length in enumerate(cache.lengths):
        assert not keys[row, :, length:].any() and not values[row, :, length:].any()
        numbers = keys[row, 0, :length, 0]
        assert torch.equal(keys[row, :, :length], numbers[:, None].expand(HEADS, length, DIM))
        assert torch.equal(values[row, :, :length], -numbers[:, None].expand(HEADS, length, 2))
        rows.append([int(number) - 1000 * layer for number in numbers])
    assert not keys[len(rows) :].any()
    return rows


def feed(cache, numbers):
    """What a pass does: every layer writes the numbers `[B, S]`, padded to the shape, after each row's end."""
    size = len(numbers[0])
    cache.make_room(size)
    shape = cache.shape(size)
    slots = torch.zeros(shape.rows, shape.size, dtype=torch.long) + torch.arange(shape.size)
    slots[: len(numbers)] += torch.tensor(cache.lengths)[:, None]
    frame = StaticCacheView(cache.rows.layers, cache.buffers, slots, shape)
    states = torch.full((shape.rows, shape.size), 77.0)  # what fills up
    states[: len(numbers), :size] = torch.tensor(numbers, dtype=torch.float)
    for layer in range(LAYERS):
        wide = (states + 1000 * layer)[:, None, :, None].expand(-1, HEADS, -1, DIM)
        seen, _ = frame.update(wide, -wide[..., :2], layer)
        assert seen.shape == (shape.rows, HEADS, shape.keys, DIM)
        assert seen.untyped_storage().data_ptr() == cache.buffers.keys[layer].untyped_storage().data_ptr()
    cache.rows.fed(size, shape)


def test_rows_are_taken_over_from_several_caches():
    parts = [filled([4, 2]), filled([5], first=51)]
    cache = StaticCache(60)
    cache.join(parts, [(1, 0), (0, 1), (0, 0), (0, 1)])
    expected = [[51, 52, 53, 54, 55], [101, 102], [1, 2, 3, 4], [101, 102]]
    for layer in range(LAYERS):
        assert held(cache, layer) == expected
    assert cache.lengths == [5, 2, 4, 2] and all(not part.layers for part in parts)


def test_an_empty_one_says_so():
    cache = StaticCache(10)
    assert cache.lengths == [0] and cache.room == (0, 0)
    with pytest.raises(RuntimeError, match="an empty static cache has no buffers: fill a TreeCache"):
        _ = cache.buffers


def test_nothing_is_moved_where_the_path_is_the_first_nodes(monkeypatch):
    cache = static(5, 3)
    monkeypatch.setattr(Buffers, "move", None)
    feed(cache, [[201, 202, 203], [211, 212, 213]])
    cache.keep([[0, 1], [0]], fed=3)
    assert held(cache) == [[1, 2, 3, 4, 5, 201, 202], [101, 102, 103, 211]]
    cache.keep([[], []], fed=0)
    feed(cache, [[1], [1]])
    with pytest.raises(TypeError):
        feed(cache, [[1, 2, 3], [1, 2, 3]])
        cache.keep([[0, 2], [0]], fed=3)


def test_all_layers_are_moved_at_once(monkeypatch):
    cache, calls = static(5, 3), watched(monkeypatch, torch.Tensor, "scatter_", lambda *given: given[0].shape)
    feed(cache, [[201, 202, 203], [211, 212, 213]])
    calls.clear()
    cache.keep([[0, 2], [0]], fed=3)
    assert [shape[0] for shape in calls] == [LAYERS, LAYERS], "once for all keys, once for all values"


@pytest.mark.parametrize(
    ("leaving", "rows"), [([0], [2, 1]), ([1], [0, 2]), ([2], [0, 1]), ([0, 1], [2]), ([1, 0], [2])]
)
def test_the_last_row_takes_the_place_of_one_that_leaves(leaving, rows):
    cache = static(4, 7, 2)
    before = held(cache)
    addresses = [group.data_ptr() for group in cache.buffers.groups]
    for row in leaving:
        cache.leave(row)
    assert held(cache) == [before[row] for row in rows]
    assert addresses == [group.data_ptr() for group in cache.buffers.groups]
    feed(cache, [[201]] * len(rows))
    cache.keep([[0]] * len(rows), fed=1)
    assert held(cache) == [[*before[row], 201] for row in rows]


def test_buffers_grow_if_they_must():
    pool = Watched()
    cache = StaticCache(20, pool=pool)
    cache.join([filled([6, 4])], [(0, 0), (0, 1)])
    (slots,) = {group.shape[3] for group in cache.buffers.groups}
    assert slots == 256
    old, before = cache.buffers, held(cache)
    feed(cache, [list(range(240, 488)), list(range(240, 488))])
    assert pool.discarded == [old] and cache.buffers.slots > 256
    cache.keep([[0], [0, 247]], fed=248)
    assert held(cache) == [[*before[0], 240], [*before[1], 240, 487]]


@pytest.mark.parametrize(("tokens", "slots"), [(60, 256), (127, 256), (128, 384), (700, 1024), (10**6, 6144)])
def test_slots_are_for_the_longest_text_and_the_largest_tree(tokens, slots):
    cache = static(5, tokens=tokens)
    assert cache.buffers.slots == slots


def test_what_it_holds_is_handed_out():
    cache, other = static(4, 6), TreeCache()
    before = held(cache)
    cache.copy_to(other)
    cache.reset()
    assert cache.room == (0, 0) and other.lengths == [4, 6]
    again = StaticCache(20)
    again.join([other], [(0, 0), (0, 1)])
    assert held(again) == before


# --- rows that come and go -------------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from([1, 5, 130, 300])),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 9), st.integers(0, 2**30)),
        st.tuples(st.just("reserve"), st.integers(1, 6), st.integers(1, 700)),
        st.tuples(st.just("reset")),
        st.tuples(st.just("full"), st.booleans()),
    ),
    max_size=14,
)


class Mirrored:
    """A static cache, and lists of what its rows should hold. Where there is no memory, all stays as it was."""

    def __init__(self):
        self.pool = Watched()
        self.cache, self.texts = StaticCache(pool=self.pool), []
        self.numbers = iter(range(1, 10**4, 11))

    def tried(self, call, *given):
        room = self.cache.room
        try:
            call(*given)
        except torch.OutOfMemoryError:
            assert self.pool.full and self.cache.room == room
            return False
        return True

    def take(self, length):
        first = next(self.numbers)
        part = filled([length], first=first)
        if self.tried(self.cache.take, part):
            self.texts.append(list(range(first, first + length)))
            assert part.room == (0, 0)
        else:
            assert part.lengths == [length], "it can still go elsewhere"

    def leave(self, row):
        if self.texts:
            row %= len(self.texts)
            self.cache.leave(row)
            self.texts[row] = self.texts[-1]
            self.texts.pop()

    def step(self, size, bits):
        if not self.texts or max(map(len, self.texts)) + 16 >= self.cache.room[1]:
            return
        fed = [[next(self.numbers) for _ in range(size)] for _ in self.texts]
        feed(self.cache, fed)
        paths = [[0, *(node for node in range(1, size) if bits >> (node + row) & 1)] for row in range(len(fed))]
        self.cache.keep(paths, fed=size)
        for text, path, tokens in zip(self.texts, paths, fed, strict=True):
            text += [tokens[node] for node in path]

    def reserve(self, rows, slots):
        self.tried(self.cache.reserve, rows, slots)

    def reset(self):
        self.cache.reset()
        self.texts.clear()

    def full(self, is_full):
        self.pool.full = is_full

    def check(self):
        """What rows hold, and that all else is zero."""
        rows, slots = self.cache.room
        if self.cache.room == (0, 0):
            assert not self.texts and self.cache.lengths == [0] and (rows, slots) == (0, 0)
            return
        assert rows >= len(self.texts) and slots > max(map(len, self.texts), default=0)
        assert batch_bucket(rows) == rows and key_bucket(slots) == slots
        if self.texts:
            assert all(held(self.cache, layer) == self.texts for layer in range(LAYERS))
        else:
            assert self.cache.lengths == [0] and not any(group.any() for group in self.cache.buffers.groups)


@settings(max_examples=examples(60))
@given(operations)
def test_whatever_is_done_each_row_holds_its_own_text(operations):
    mirrored = Mirrored()
    for kind, *numbers in operations:
        getattr(mirrored, kind)(*numbers)
        mirrored.check()


def test_rows_are_taken_without_the_others_being_copied():
    cache = StaticCache()
    cache.reserve(4, 500)
    for row, length in enumerate((5, 3, 400, 1)):
        cache.take(filled([length], first=10 * row + 1))
        if row == 0:
            buffers = cache.buffers
        assert cache.buffers is buffers and cache.room == (4, 512)
    cache.take(filled([2], first=51))
    assert cache.buffers is not buffers and cache.room == (8, 512)
    assert [row[0] for row in held(cache)] == [1, 11, 21, 31, 51]


def test_a_row_that_is_too_long_makes_room_for_all():
    cache = StaticCache()
    cache.reserve(2, 256)
    cache.take(filled([5]))
    cache.take(filled([255], first=7))
    assert cache.room == (2, 256), "the last slot is where zeros come from"
    cache.leave(1)
    cache.take(filled([256], first=7))
    assert cache.room == (2, 384) and held(cache) == [list(range(1, 6)), list(range(7, 263))]


@pytest.mark.parametrize(("rows", "slots", "room"), [(3, 300, (4, 384)), (1, 1, (2, 512)), (2, 512, (2, 512))])
def test_what_is_reserved_is_rounded_up_and_never_drops_what_is_there(rows, slots, room):
    pool = Watched()
    cache = StaticCache(pool=pool)
    cache.reserve(2, 512)
    for _ in range(2):
        cache.take(filled([390 if room[1] == 512 else 5]))
    before, buffers = held(cache), cache.buffers
    cache.reserve(rows, slots)
    assert cache.room == room and held(cache) == before
    assert pool.discarded == ([] if room == (2, 512) else [buffers]) and not pool.released


def test_what_is_reserved_before_the_first_row_is_forgotten_with_the_last():
    cache = StaticCache()
    cache.reserve(4, 700)
    cache.reset()
    cache.take(filled([5]))
    assert cache.room[0] == 1 and cache.room[1] > 4096


def test_rows_move_by_way_of_the_host_when_their_buffers_are_gone():
    pool = Watched()
    cache, other = StaticCache(60, pool=pool), TreeCache()
    cache.join([filled([4, 6, 2])], [(0, 0), (0, 1), (0, 2)])
    expected, buffers = held(cache), cache.buffers
    buffers.groups[0][:, :, :, 6:] = torch.nan  # left by a capture that failed
    buffers.groups[0][:, 2, :, 2:] = torch.nan
    update = TreeLayer.update

    def updating(self, *states):
        assert pool.discarded == [buffers] and cache.room == (0, 0)
        assert all(each.untyped_storage().data_ptr() not in addresses for each in states)
        return update(self, *states)

    addresses = {group.untyped_storage().data_ptr() for group in buffers.groups}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeLayer, "update", updating)
        cache.move_to(other)
    assert other.lengths == [4, 6, 2] and cache.lengths == [0] and not pool.released
    assert all(torch.isfinite(layer.keys).all() for layer in other.layers)
    again = StaticCache(20)
    again.join([other], [(0, 0), (0, 1), (0, 2)])
    assert held(again) == expected


# States of recurrent layers


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


def filled_with_states(first):
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
        part = filled_with_states(10 * number)
        expected.append(states_of(part))
        cache.take(part)
    cache.leave(0)
    expected = [expected[2], expected[1]]
    cache.reserve(4, 700)
    addresses = {group.untyped_storage().data_ptr() for group in cache.buffers.fixed}
    for move in (cache.copy_to, cache.move_to):
        other = TreeCache()
        move(other)
        handed_out = [state for layer in other.recurrent for state in layer.states.values()]
        assert handed_out and all(state.untyped_storage().data_ptr() not in addresses for state in handed_out)
        for number, state in enumerate(states_of(other)):
            assert torch.equal(state, torch.cat([row[number] for row in expected]))
        assert other.lengths == [4, 4] and all(all(layer.has_previous_state.values()) for layer in other.recurrent)
    assert cache.room == (0, 0)


def test_buffers_are_zero_for_the_next_generation():
    pool = BufferPool(EagerReplay)
    cache = StaticCache(60, pool=pool)
    cache.take(filled_with_states(1))
    buffers = cache.buffers
    cache.reset()
    again = StaticCache(60, pool=pool)
    again.take(filled_with_states(2))
    assert again.buffers is buffers
    again.leave(0)
    again.reset()
    assert pool.acquire(again, buffers.layers, 1, 256) is buffers
    assert not any(group.any() for group in buffers.fixed)
