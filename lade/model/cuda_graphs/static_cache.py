"""A KV cache at fixed addresses, for passes that were captured once and are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from lade.model.cuda_graphs.buffers import Buffers, Layers, States, StepShape
from lade.model.cuda_graphs.capture import EagerReplay
from lade.model.cuda_graphs.pool import BufferPool
from lade.model.cuda_graphs.states import RowState, kinds_of
from lade.model.cuda_graphs.static_rows import StaticRows
from lade.model.kv_cache import TreeCache
from lade.model.position_offsets import PositionOffsets
from lade.model.shapes import LARGEST_STEP, batch_bucket, key_bucket, step_bucket
from lade.model.tree_layer import TreeLayer

AHEAD_TOKENS = 4096
"""Slots beyond a text that static buffers begin with at most: a request may allow far more tokens than it will get."""

T = TypeVar("T")


class StaticCache:
    """The cache of B rows that lie in `Buffers`; see `lade.model.row_cache.RowCache`.

    Prefill fills a `TreeCache`, which grows as it needs. Then its rows are copied here: all at once by `join`, or one
    by one by `take`. Whatever needs other buffers, and gets none for lack of memory, leaves everything as it was.

    Args:
        tokens: greatest length that a row is going to have, if that is known.
        limit: slots of all rows together that buffers from the pool may have; None for no limit.
        pool: where buffers are acquired; None for a pool of its own.
    """

    dynamic = None
    """The cache that has replaced this one: none; see `FallbackCache.dynamic`."""

    def __init__(self, tokens: int | None = None, *, limit: int | None = None, pool: BufferPool | None = None) -> None:
        self._tokens, self._limit, self._pool = tokens, limit, pool or BufferPool(EagerReplay)
        self._reserved: tuple[int, int] | None = None  # rows and slots that were reserved while it was empty
        self._rows: StaticRows | None = None

    @staticmethod
    def buffer_rows(rows: int) -> int:
        """See `BufferSizes.buffer_rows`: a power of two, as passes are padded to it."""
        return batch_bucket(max(1, rows))

    @staticmethod
    def buffer_slots(tokens: int, tree: int = 0) -> int:
        """See `BufferSizes.buffer_slots`: a multiple that passes are padded to; the last slot stays zero."""
        return key_bucket(tokens + (step_bucket(tree) if tree else 0) + 1)

    @staticmethod
    def spare_tokens(tokens: int) -> int:
        """See `BufferSizes.spare_tokens`: ample, since other buffers lose what was captured on the old ones."""
        return max(AHEAD_TOKENS, tokens)

    @property
    def empty(self) -> bool:
        """Whether it has no buffers yet."""
        return self._rows is None

    @property
    def rows(self) -> StaticRows:
        """The rows and their buffers.

        Raises:
            RuntimeError: the cache is empty.
        """
        if self._rows is None:
            raise RuntimeError("an empty static cache has no buffers: fill a TreeCache, and join it")
        return self._rows

    @property
    def buffers(self) -> Buffers:
        """The buffers of its rows; raises `RuntimeError` while it is empty."""
        return self.rows.buffers

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row; `[0]` while there are none."""
        return [0] if self._rows is None else self._rows.lengths

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        return (0, 0) if self._rows is None else (self.buffers.rows, self.buffers.slots)

    def try_static(self, call: Callable[[StaticCache], T]) -> T | None:
        """What `call` returns; an error is raised, since there is no other cache to move to."""
        return call(self)

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Become a cache of rows that others hold; see `TreeCache.join`."""
        self.reset()
        longest = max(parts[part].lengths[row] for part, row in places)
        self._begin(_layers_of(parts[0]), len(places), longest).append(parts, places)

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache; that one is empty then."""
        length, rows = part.lengths[0], self._rows
        if rows is None:
            rows = self._begin(_layers_of(part), 1, length)
        elif len(rows.ends) == rows.buffers.rows or length >= rows.buffers.slots:
            self._resize(*_larger(self.room, (self.buffer_rows(len(rows.ends) + 1), self.buffer_slots(length))))
        rows.append([part], [(0, 0)])

    def _begin(self, layers: Layers, count: int, longest: int) -> StaticRows:
        """Acquire the first buffers, for `count` rows of at most `longest` tokens."""
        tokens = longest + AHEAD_TOKENS if self._tokens is None else min(self._tokens, longest + AHEAD_TOKENS)
        wanted = self._reserved or (1, self.buffer_slots(tokens, LARGEST_STEP))
        rows, slots = _larger(wanted, (self.buffer_rows(count), self.buffer_slots(longest)))
        self._rows = StaticRows(self._pool.acquire(self, layers, rows, slots, self._limit))
        self._reserved = None
        return self._rows

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of this size, rounded up, at least for what there is; an empty cache for its first row."""
        wanted = batch_bucket(rows), key_bucket(slots)
        if self._rows is None:
            self._reserved = wanted
        else:
            self._resize(*wanted)

    def _resize(self, rows: int, slots: int) -> None:
        """Move to other buffers; nothing has been captured on new ones yet."""
        held, old = self.rows, self.buffers
        least = self.buffer_rows(len(held.ends)), self.buffer_slots(max(held.ends, default=0))
        rows, slots = _larger((rows, slots), least)
        if (rows, slots) != self.room:
            held.move_to(self._pool.acquire(self, old.layers, rows, slots, self._limit))
            self._pool.discard(old)

    def copy_to(self, cache: TreeCache) -> None:
        """Copy all rows to an empty cache."""
        cache.layers += self.rows.layers_with(torch.Tensor.clone)
        _fill(cache, self.rows.states(), self.lengths, self.rows.offsets)

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """A cache of its own with the first tokens of a row."""
        copy, one = TreeCache(), (slice(row, row + 1), slice(None), slice(tokens))
        copy.layers += [TreeLayer.of(keys[one], values[one]) for keys, values in self.rows.states()]
        return copy

    def move_to(self, cache: TreeCache) -> None:
        """Move all rows to an empty cache, by way of the host where there is no memory for both; then this is empty.

        Raises:
            torch.OutOfMemoryError: there is no memory for the other one alone; the rows are lost then.
        """
        if self._rows is None or not self._rows.ends:
            self.reset()
            return
        cache.layers += self._rows.layers_with(lambda state: state.to("cpu", copy=True))
        devices = [keys.device for keys in self.buffers.keys]
        held = [[states.to("cpu", copy=True) for states in pair] for pair in self._rows.states()]
        lengths, offsets = self._rows.lengths, self._rows.offsets
        self._pool.discard(self._rows.buffers)
        self._rows = None
        for layer in cache.recurrent:
            layer.become(layer, lambda states, layer=layer: states[0].to(layer.device), [layer])
        for keys, values in held:
            for row, length in enumerate(lengths):  # after the rows' ends lies what a failed capture has left
                keys[row, :, length:] = values[row, :, length:] = 0
        pairs = ((keys.to(device), values.to(device)) for (keys, values), device in zip(held, devices, strict=True))
        _fill(cache, pairs, lengths, offsets)

    def shape(self, size: int) -> StepShape:
        """The shape of a pass that feeds at most `size` tokens a row."""
        padded = step_bucket(size)
        keys = key_bucket(max(self.lengths) + padded)
        return StepShape(batch_bucket(len(self.lengths)), padded, keys, self.rows.offsets.axes)

    def make_room(self, size: int) -> None:
        """Have slots for a pass that feeds `size` tokens a row."""
        needed = max(self.lengths) + step_bucket(size)
        if needed >= self.buffers.slots:
            self._resize(self.buffers.rows, key_bucket(2 * needed))

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the `fed` tokens that came last, keep in each row those of its path; see `StaticRows.keep`."""
        self.rows.keep(paths, fed)

    def leave(self, row: int) -> None:
        """Evict a row; the last one takes its place and its number."""
        rows = list(range(len(self.lengths)))
        rows[row] = rows[-1]
        self.rows.select(rows[:-1])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order.

        Raises:
            ValueError: there are more of them than the buffers have.
        """
        rows: list[int] = indices.tolist()
        if len(rows) > self.buffers.rows:
            raise ValueError(f"indices={rows} are too many: the buffers have {self.buffers.rows} rows")
        self.rows.select(rows)

    def reset(self) -> None:
        """Forget everything, and release the buffers."""
        if self._rows is not None:
            self._pool.release(self._rows.buffers)
        self._rows = self._reserved = None


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Rows and slots that hold either."""
    return max(one[0], other[0]), max(one[1], other[1])


def _layers_of(cache: TreeCache) -> Layers:
    layers: list[tuple[States, States] | RowState] = []
    for layer in cache.attending:
        assert layer.keys is not None and layer.values is not None
        assert layer.indexer_keys is None, "models with indexers run eagerly: there is no place for their keys"
        layers.append((States.of(layer.keys), States.of(layer.values)))
    return [*layers, *(kind for layer in cache.recurrent for kind in kinds_of(layer))]


def _fill(
    cache: TreeCache,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    offsets: PositionOffsets,
) -> None:
    """Give the layers of a cache their keys and values; their states they have."""
    for layer, (keys, values) in zip(cache.attending, pairs, strict=True):
        layer.update(keys, values)
        layer.lengths = list(lengths)
    cache.offsets = offsets
    cache.settle()
