"""Captures without a device: calling again, and what would be wrong with a graph."""

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from inside import buffers_in
from pretend import pool_for

import lade
from lade.backends.cuda_graphs import backend as graphs
from lade.backends.cuda_graphs import pool as model_pools
from lade.backends.cuda_graphs.buffers import EagerReplay
from lade.backends.cuda_graphs.pool import BufferPool, capture_setup, pool_of
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.errors import CaptureWarning
from lade.model.kv_cache import TreeCache
from lade.testing import toy_model


def test_a_rerun_returns_the_same_tensor_with_new_content():
    read = torch.tensor([1.0, 2.0])
    replay = EagerReplay().record(lambda: 2 * read, [read])
    first = replay(lambda: 2 * read)
    assert first.tolist() == [2, 4]
    read += 1
    again = replay(lambda: 2 * read)
    assert again is first and first.tolist() == [4, 6]


def test_a_tensor_that_moves_is_noticed():
    read = torch.ones(2)
    replay = EagerReplay().record(lambda: 2 * read, [read])
    replay(lambda: 2 * read)
    with pytest.raises(RuntimeError, match="a captured tensor has moved"):
        replay(lambda: read.set_(torch.ones(2)) * 2)


def test_a_result_of_another_shape_is_noticed():
    replay = EagerReplay().record(lambda: torch.ones(2), [])
    replay(lambda: torch.ones(2))
    with pytest.raises(RuntimeError, match=r"a call returned \[1\] after \[2\]"):
        replay(lambda: torch.ones(1))


def test_a_failure_is_reported_with_what_went_wrong_first():
    pool = BufferPool(EagerReplay)
    try:
        try:
            raise RuntimeError("the model looked at a tensor\nat some place")
        finally:
            raise RuntimeError("the capture could not be ended")
    except RuntimeError as problem:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pool.capture_failed("setup", problem)
    (warning,) = caught
    assert warning.category is CaptureWarning and str(warning.message).endswith("the model looked at a tensor")
    assert "ended" not in str(warning.message)


def test_a_failure_belongs_to_a_setup():
    model, device = toy_model(), torch.device("cuda")
    pool = pool_of(model, device)
    assert pool_of(model, device) is pool
    with pytest.warns(CaptureWarning):
        pool.capture_failed(capture_setup(model), RuntimeError("no"))
    assert pool_of(model, device) is pool
    model.set_attn_implementation("eager")
    assert pool_of(model, device) is not pool


def test_a_setup_is_the_weights_and_what_computes_with_them():
    model = toy_model()
    setup = capture_setup(model)
    assert setup == capture_setup(model) != capture_setup(toy_model())
    for change in (
        lambda: model.set_attn_implementation("eager"),
        model.train,
        lambda: torch.use_deterministic_algorithms(True),
        lambda: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    ):
        before = capture_setup(model)
        change()
        assert capture_setup(model) != before
    torch.use_deterministic_algorithms(False)


def one_token():
    part = TreeCache()
    part.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0)
    return part


def cache_on(pool, rows, tokens):
    """A cache of rows of one token each, with room for `tokens`."""
    filled = TreeCache()
    filled.update(torch.ones(rows, 1, 1, 4), torch.ones(rows, 1, 1, 4), 0)
    cache = StaticCache(tokens, pool=pool)
    cache.join([filled], [(0, row) for row in range(rows)])
    return cache


@pytest.mark.parametrize("first", [0, 1])
def test_of_idle_buffers_the_larger_ones_are_kept(first):
    pool = BufferPool(EagerReplay)
    caches = [cache_on(pool, 1, 10), cache_on(pool, 2, 600)]
    large = caches[1].buffers
    caches[first].reset()
    caches[1 - first].reset()
    (entry,) = buffers_in(pool)
    assert entry.buffers is large and entry.idle
    again = cache_on(pool, 2, 20)
    assert again.buffers is large and not entry.idle


def test_buffers_that_are_too_small_make_way():
    setups = ["setup"]
    pool = BufferPool(EagerReplay, lambda: setups[-1])
    small = cache_on(pool, 1, 10)
    small.reset()
    for rows, tokens in ((2, 10), (2, 600)):
        larger = cache_on(pool, rows, tokens)
        assert [entry.buffers for entry in buffers_in(pool)] == [larger.buffers]
        larger.reset()
    setups.append("another one")
    other = cache_on(pool, 1, 10)
    assert [entry.buffers for entry in buffers_in(pool)] == [other.buffers]


def test_each_of_two_borrowers_has_a_capture_of_its_own():
    pool = BufferPool(EagerReplay)
    caches = [cache_on(pool, 1, 10) for _ in range(2)]
    one, other = buffers_in(pool)
    assert caches[0].buffers is not caches[1].buffers and one.capture is not other.capture


def test_what_is_lent_again_is_zero():
    pool = BufferPool(EagerReplay)
    cache = cache_on(pool, 2, 10)
    buffers = cache.buffers
    buffers.groups[0].fill_(7.0)
    cache.reset()
    assert cache_on(pool, 1, 10).buffers is buffers and buffers.groups[0].sum() == 2 * 4  # one token


def test_buffers_larger_than_they_may_be_are_not_lent():
    pool = BufferPool(EagerReplay)
    cache = cache_on(pool, 2, 600)
    large = cache.buffers
    cache.reset()
    for limit, used in ((2 * large.slots, True), (2 * large.slots - 1, False)):
        other = StaticCache(limit=limit, pool=pool)
        other.reserve(1, 256)
        other.take(one_token())
        assert (other.buffers is large) is used
        other.reset()


def test_buffers_that_are_outgrown_are_not_kept():
    """Not even where the new ones have fewer rows."""
    pool = BufferPool(EagerReplay)
    cache = StaticCache(pool=pool)
    cache.reserve(4, 256)
    cache.take(one_token())
    cache.reserve(1, 600)
    (entry,) = buffers_in(pool)
    assert entry.buffers is cache.buffers and cache.room == (1, 768)


def test_after_a_failure_nothing_is_kept():
    pool = BufferPool(EagerReplay, lambda: "setup")
    cache = cache_on(pool, 1, 10)
    with pytest.warns(CaptureWarning):
        pool.capture_failed("setup", RuntimeError("no"))
    cache.reset()
    assert buffers_in(pool) == []


class NoMemory:
    def record(self, call, fixed):
        try:
            raise torch.OutOfMemoryError("the reason")
        finally:
            raise RuntimeError("the capture could not be ended")


def test_a_capture_without_memory_is_no_failure_of_the_model():
    pool = BufferPool(NoMemory)
    cache = cache_on(pool, 1, 10)
    with pytest.raises(torch.OutOfMemoryError, match="the reason"):
        pool.record(cache.buffers, lambda: torch.ones(1), [])
    assert pool.capture_failed_in is None and isinstance(buffers_in(pool)[0].capture, NoMemory)


def test_release_frees_idle_buffers(monkeypatch):
    model, pool = toy_model(), BufferPool(EagerReplay)
    lade.release(model)
    assert model not in model_pools._pools, "there was nothing"
    pool_for(monkeypatch, model, pool)
    caches = [cache_on(pool, 1, 10), cache_on(pool, 2, 600)]
    gone = weakref.ref(caches[1].buffers)
    caches[1].reset()
    assert gone() is not None
    lade.release(SimpleNamespace(_orig_mod=model))  # as `torch.compile` wraps it
    (entry,) = buffers_in(pool)
    assert entry.buffers is caches[0].buffers and gone() is None
    caches[0].reset()
    lade.release(model)
    assert buffers_in(pool) == []


def test_on_a_device_the_memory_is_for_others_too(monkeypatch):
    model, emptied = toy_model(), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    pool_for(monkeypatch, model, BufferPool(EagerReplay))
    lade.release(model)
    assert not emptied
    monkeypatch.setattr(graphs, "input_device", lambda model: torch.device("cuda"))
    lade.release(model)
    assert emptied


def test_recordings_share_the_memory_of_their_results():
    """Only the last one's is ever read; a larger one has memory of its own, which later ones share."""
    capture, read = EagerReplay(), torch.ones(6)
    small, large, other = (
        capture.record(make, [read]) for make in (lambda: read[:2] + 1, lambda: 3 * read, lambda: read.long()[:3])
    )
    first = small(lambda: read[:2] + 1)
    assert first.tolist() == [2, 2]
    last = large(lambda: 3 * read)
    assert last.tolist() == [3] * 6 and first.tolist() == [2, 2]
    seen = other(lambda: read.long()[:3])
    assert seen.tolist() == [1, 1, 1] and seen.dtype == torch.long and seen.data_ptr() == last.data_ptr()
    assert last.tolist() != [3] * 6
    assert large(lambda: 3 * read) is last and last.tolist() == [3] * 6
