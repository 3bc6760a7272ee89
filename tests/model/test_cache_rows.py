"""Rows of a cache that come and go: they hold what they would hold alone, whatever is done to the others."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend import NO_CUDA
from spies import watched

from lade import TreeCache
from lade.model import cache_layers as module

HEADS, SIZE, LAYERS = 2, 3, 10  # more layers than share a buffer


def states(tokens, layer, shift=0.0):
    """Keys or values `[1, H, T, D]`, another number for each token, layer, head and place."""
    tokens = torch.as_tensor(tokens, dtype=torch.float64)[:, None]  # [T, 1]
    places = torch.arange(HEADS * SIZE).reshape(HEADS, 1, SIZE) / 10
    return (tokens * 100 + layer + places + shift)[None]


def feed(cache, rows):
    """Append as many tokens to every row, in all layers."""
    for layer in range(LAYERS):
        keys, values = (torch.cat([states(row, layer, shift) for row in rows]) for shift in (0.0, 0.5))
        cache.update(keys, values, layer)


def cache_of(tokens):
    cache = TreeCache()
    feed(cache, [tokens])
    return cache


def poison(cache):
    """Make NaN of all that is not used."""
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            buffer[len(cache.lengths) :] = torch.nan
            for row, length in enumerate(cache.lengths):
                buffer[row, :, length:] = torch.nan


def assert_holds(cache, texts):
    assert cache.lengths == [len(text) for text in texts]
    for number, layer in enumerate(cache.layers):
        assert layer.lengths == cache.lengths and layer.batch_size == len(texts)
        for row, text in enumerate(texts):
            assert torch.equal(layer.keys[row, :, : len(text)], states(text, number)[0])
            assert torch.equal(layer.values[row, :, : len(text)], states(text, number, 0.5)[0])


lengths = st.integers(1, 9)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), lengths),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 5), st.integers(0, 2**30)),
        st.tuples(st.just("reserve"), st.integers(0, 6), st.integers(0, 20)),
    ),
    max_size=14,
)


def path_of(size, bits):
    """The root, and some of the other nodes."""
    return [0, *(node for node in range(1, size) if bits >> node & 1)]


@settings(max_examples=examples(120))
@given(operations)
def test_whatever_is_done_each_row_holds_its_own_text(operations):
    cache, texts, next_token = TreeCache(), [], iter(range(1, 10**6))
    for kind, *numbers in operations:
        match kind:
            case "take":
                texts.append([next(next_token) for _ in range(numbers[0])])
                cache.take(cache_of(texts[-1]))
            case "leave" if texts:
                row = numbers[0] % len(texts)
                cache.leave(row)
                texts[row] = texts[-1]
                texts.pop()
            case "step" if texts:
                size, bits = numbers
                fed = [[next(next_token) for _ in range(size)] for _ in texts]
                feed(cache, fed)
                paths = [path_of(size, bits >> row) for row in range(len(texts))]
                cache.keep(paths, fed=size)
                for text, path, tokens in zip(texts, paths, fed, strict=True):
                    text += [tokens[node] for node in path]
            case "reserve" if texts:
                rows, slots = len(texts) + numbers[0], max(map(len, texts)) + numbers[1]
                cache.reserve(rows, slots)
                assert cache.room == (rows, slots)
        assert texts or cache.lengths == [0]
        if texts:
            assert_holds(cache, texts)
            poison(cache)
            rows, slots = cache.room
            assert rows >= len(texts) and slots >= max(map(len, texts))


def test_a_reserve_never_drops_what_is_there():
    cache = cache_of([1, 2, 3])
    cache.take(cache_of([4, 5]))
    cache.reserve(1, 1)
    assert cache.room == (2, 3)
    assert_holds(cache, [[1, 2, 3], [4, 5]])


def test_room_and_bytes_of_a_token():
    cache = TreeCache()
    assert cache.room == (0, 0) and cache.token_bytes == 0
    feed(cache, [[1, 2, 3]])
    assert cache.token_bytes == LAYERS * 2 * HEADS * SIZE * 8
    cache.reserve(4, 10)
    held = sum(
        buffer.numel() * buffer.element_size() for layer in cache.layers for buffer in (layer.keys, layer.values)
    )
    assert cache.room == (4, 10) and held == 4 * 10 * cache.token_bytes
    cache.reset()
    assert cache.room == (0, 0) and cache.token_bytes == 0


def test_a_copied_row_is_not_changed_with_its_source():
    cache = cache_of([1, 2, 3])
    copied = cache.copy_row(0, 2)
    for layer in cache.layers:
        layer.keys[:] = layer.values[:] = torch.nan
    assert_holds(copied, [[1, 2]])


def test_rows_come_and_go_without_the_others_being_copied():
    cache = cache_of([1, 2, 3])
    cache.reserve(4, 20)
    buffers = [layer.keys for layer in cache.layers]
    for tokens in ([4, 5], [6], [7, 8, 9, 10]):
        part = cache_of(tokens)
        cache.take(part)
        assert part.room == (0, 0), "the row that is taken is not kept twice"
    assert all(layer.keys is buffer for layer, buffer in zip(cache.layers, buffers, strict=True))
    cache.leave(1)  # joins the layers' buffers, once
    buffers = [layer.keys for layer in cache.layers]
    cache.leave(0)
    cache.take(cache_of([11, 12]))
    feed(cache, [[20], [21], [22]])
    cache.keep([[0], [0], [0]], fed=1)
    assert all(layer.keys is buffer for layer, buffer in zip(cache.layers, buffers, strict=True))
    assert_holds(cache, [[6, 20], [7, 8, 9, 10, 21], [11, 12, 22]])


def test_the_first_row_that_is_taken_is_not_copied():
    part = cache_of([1, 2, 3])
    buffer, cache = part.layers[0].keys, TreeCache()
    cache.take(part)
    assert cache.layers[0].keys is buffer and not part.layers
    assert_holds(cache, [[1, 2, 3]])


@pytest.fixture
def remote(monkeypatch):
    """Caches are moved as on a device of their own: by operations of torch."""
    monkeypatch.setattr(module.JoinedBuffer, "of", classmethod(lambda cls, tensor: cls(tensor, None)))


@pytest.mark.parametrize("rows", [1, 3])
def test_slots_are_uploaded_once_for_what_is_moved_in_all_layers(rows, remote, monkeypatch):
    cache = cache_of([1, 2])
    for row in range(1, rows):
        cache.take(cache_of([10 * row]))

    def see(arrays, device):
        return [array.tolist() for array in arrays]

    uploads = watched(monkeypatch, module, "upload", see)
    feed(cache, [[20, 21, 22, 23, 24]] * rows)
    cache.keep([[0, 2, 4]] * rows, fed=5)
    moved = [[4, 6, 2, 4, 6, 2, 4, 6], [0, 0, 1, 1, 1, 2, 2, 2], [3, 4, 1, 2, 3, 1, 2, 3]]
    assert uploads == [moved if rows == 3 else [column[:2] for column in moved]], (
        "though the layers are more than share a buffer"
    )
    assert_holds(cache, [[1, 2, 20, 22, 24], *([10 * row, 20, 22, 24] for row in range(1, rows))])


@pytest.mark.parametrize(
    ("path", "uploaded"), [([0, 2], 0), ([0, 3, 4], 0), ([0, 2, 3], 1), ([0, 2, 3, 4], 1), ([0, 3, 5], 1)]
)
def test_a_piece_that_does_not_overlap_where_it_belongs_is_moved_without_an_upload(path, uploaded, remote, monkeypatch):
    cache, uploads = cache_of([1, 2]), watched(monkeypatch, module, "upload")
    feed(cache, [[20, 21, 22, 23, 24, 25]])
    cache.keep([path], fed=6)
    assert len(uploads) == uploaded
    assert_holds(cache, [[1, 2, *(20 + node for node in path)]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("sources", [[4, 6, 7], [3, 4, 5], [5, 6, 7], [7]])
def test_on_the_host_moves_are_those_of_any_device(sources, dtype):
    """Pieces, with and without overlap, and what lies apart; of whatever type, even one that numpy does not know."""
    held = torch.arange(2 * 3 * 2 * 9 * 4).reshape(2, 3, 2, 9, 4).to(dtype)
    moves = [module.Move(2, sources, 2), module.Move(0, sources[:1], 0)]
    for first, last in ((0, 1), (0, 2)):
        here, there = held.clone(), held.clone()
        module.apply_moves(moves[first:last], [module.JoinedBuffer.of(here)])
        module.apply_moves(moves[first:last], [module.JoinedBuffer(there, None)])
        assert torch.equal(here, there) and not torch.equal(here, held)


def test_what_has_grown_is_moved_where_it_is_now():
    cache = cache_of([1, 2])
    for first in (10, 300):  # the second time buffers have been replaced
        feed(cache, [range(first, first + 280)])
        cache.keep([[0, 279]], fed=280)
    assert_holds(cache, [[1, 2, 10, 289, 300, 579]])


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("rows", [1, 3])
def test_keeping_and_leaving_do_not_wait_for_the_device(rows):
    caches = [cache_of([1, 2]) for _ in range(2)]
    for cache in caches:
        for row in range(1, rows):
            cache.take(cache_of([10 * row]))
    ours, theirs = caches
    for layer in ours.layers:
        layer.keys, layer.values = layer.keys.cuda(), layer.values.cuda()
    for cache, device in ((ours, "cuda"), (theirs, "cpu")):
        for layer in range(LAYERS):
            keys, values = (states([20, 21, 22], layer, shift).repeat(rows, 1, 1, 1).to(device) for shift in (0, 0.5))
            cache.update(keys, values, layer)
    theirs.keep([[0, 2]] * rows, fed=3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.keep([[0, 2]] * rows, fed=3)
        if rows > 1:
            ours.leave(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if rows > 1:
        theirs.leave(0)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for row, length in enumerate(theirs.lengths):
            assert torch.equal(layer.keys[row, :, :length].cpu(), other.keys[row, :, :length])
            assert torch.equal(layer.values[row, :, :length].cpu(), other.values[row, :, :length])
