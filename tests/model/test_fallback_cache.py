"""A cache that is static until memory runs out, and then grows."""

import weakref

import pytest
import torch
from spies import failing, watched

from lade.backends.cuda_graphs.buffers import EagerReplay
from lade.backends.cuda_graphs.fallback_cache import FallbackCache
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.errors import CaptureWarning
from lade.model.cache_layers import TreeLayer
from lade.model.kv_cache import TreeCache


class BoundedPool(BufferPool):
    full = False

    def acquire(self, owner, layers, rows, slots, limit=None):
        if self.full:
            raise torch.OutOfMemoryError(f"Tried to allocate {rows} x {slots}.\nMore of it.")
        return super().acquire(owner, layers, rows, slots, limit)


@pytest.fixture
def pool():
    return BoundedPool(EagerReplay)


@pytest.fixture
def cache(pool):
    return FallbackCache(lambda: StaticCache(pool=pool))


def filled(*lengths):
    """Token i of row b is 100 b + i + 1."""
    made = TreeCache()
    states = torch.zeros(len(lengths), 1, max(lengths), 2)
    for row, length in enumerate(lengths):
        states[row, :, :length] = (100 * row + 1 + torch.arange(length))[:, None]
    for layer in range(2):
        made.update(states + layer, -states, layer)
        made.layers[-1].lengths = list(lengths)
    return made


def held(cache):
    if isinstance(cache.current, StaticCache):
        tree = TreeCache()
        cache.current.copy_to(tree)
    else:
        tree = cache.current
    keys = tree.layers[0].keys
    return [[int(token) for token in keys[row, 0, :length, 0]] for row, length in enumerate(tree.lengths)]


def no_memory():
    return pytest.warns(CaptureWarning, match=r"no memory .* slower: Tried to allocate \d+ x \d+\. \(allow fewer")


def test_rows_lie_in_static_buffers_while_there_is_memory(cache):
    assert cache.room == (0, 0) and cache.lengths == [0] and cache.buffer_rows(3) == 4
    cache.reserve(2, 256)
    cache.take(filled(3))
    cache.take(filled(5))
    assert isinstance(cache.current, StaticCache) and cache.room == (2, 256) and cache.lengths == [3, 5]
    assert held(cache) == [[1, 2, 3], [1, 2, 3, 4, 5]]
    cache.leave(0)
    assert held(cache) == [[1, 2, 3, 4, 5]]
    cache.take(filled(5))
    cache.keep([[], []], fed=2)
    assert held(cache) == [[1, 2, 3]] * 2
    cache.reset()
    assert cache.room == (0, 0) and cache.lengths == [0]


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_rows_that_were_there_and_the_one_that_joins_go_elsewhere(taken, cache, pool):
    cache.reserve(2, 256)
    for row in range(taken):
        cache.take(filled(3 + row))
    pool.full = True
    with no_memory() as caught:
        cache.take(filled(300))
    cache.take(filled(2))
    assert len(caught) == 1 and isinstance(cache.current, TreeCache) and cache.buffer_rows(3) == 3
    lengths = [*(3 + row for row in range(taken)), 300, 2]
    assert cache.lengths == lengths and held(cache) == [list(range(1, length + 1)) for length in lengths]
    cache.leave(0)
    cache.keep([[]] * (taken + 1), fed=1)
    assert cache.lengths[0] == 1


def test_what_cannot_be_reserved_is_not_reserved_by_the_other_one(cache, pool, monkeypatch):
    cache.take(filled(3))
    monkeypatch.setattr(TreeCache, "reserve", None)
    pool.full = True
    with no_memory():
        cache.reserve(8, 9000)
    assert cache.room[0] == 1 and held(cache) == [[1, 2, 3]]
    monkeypatch.undo()
    cache.reserve(3, 20)
    assert cache.room == (3, 20) and held(cache) == [[1, 2, 3]]


@pytest.mark.parametrize("full", [False, True])
def test_rows_are_adopted(full, cache, pool):
    pool.full, rows = full, filled(2, 4, 3)
    if full:
        with no_memory():
            cache.adopt(rows)
        assert cache.current is rows, "not copied"
    else:
        cache.adopt(rows)
        assert isinstance(cache.current, StaticCache)
    assert cache.lengths == [2, 4, 3] and held(cache) == [[1, 2], [101, 102, 103, 104], [201, 202, 203]]


@pytest.mark.parametrize("full", ["never", "before", "meanwhile"])
def test_what_it_holds_is_handed_over(full, pool, monkeypatch):
    target = TreeCache()
    cache = FallbackCache(lambda: StaticCache(pool=pool), target)
    cache.take(filled(4))

    if full == "before":
        pool.full = True
        with no_memory():
            cache.reserve(2, 256)
    if full == "meanwhile":
        failing(monkeypatch, TreeLayer, "update", torch.OutOfMemoryError("Tried to allocate 1 x 1."), calls={2})
        with no_memory():
            cache.give_back(4)
    else:
        cache.give_back(4)
    assert cache.room == (0, 0)
    assert target.lengths == [4] and len(target.layers) == 2
    assert target.layers[1].keys[0, 0, :4, 0].tolist() == [2, 3, 4, 5]
    for tokens in (0, 4):
        other = TreeCache()
        unused = FallbackCache(lambda: StaticCache(pool=pool), other)
        unused.give_back(tokens)
        assert other.room == (0, 0)


def test_a_new_text_begins_in_static_buffers_again(cache, pool):
    for full in (True, False, True):
        pool.full = full
        if full:
            with no_memory():
                cache.take(filled(3))
        else:
            cache.take(filled(3))
        assert isinstance(cache.current, TreeCache) is full
        cache.reset()


def test_an_answer_that_takes_memory(cache, pool):
    cache.take(filled(3))
    assert cache.try_static(lambda static: static.lengths[0]) == 3

    def fails(static):
        raise torch.OutOfMemoryError("Tried to allocate 7 x 7.")

    with no_memory():
        assert cache.try_static(fails) is None
    assert cache.try_static(fails) is None and held(cache) == [[1, 2, 3]], "there is no static cache any more"


def test_what_a_failure_held_is_gone_when_the_rows_move(cache, monkeypatch):
    """Its frames would keep what was made before memory ran out, just when some is needed."""
    cache.take(filled(3))
    made = []

    def fails(static):
        held = torch.zeros(3)
        made.append(weakref.ref(held))
        raise torch.OutOfMemoryError("Tried to allocate 7 x 7.")

    gone = watched(monkeypatch, StaticCache, "move_to", lambda *_: made[0]() is None)
    with no_memory():
        cache.try_static(fails)
    assert gone == [True]


def test_other_errors_are_raised(cache):
    cache.take(filled(3))
    with pytest.raises(ZeroDivisionError):
        cache.try_static(lambda static: 1 / 0)
    assert isinstance(cache.current, StaticCache) and held(cache) == [[1, 2, 3]]
