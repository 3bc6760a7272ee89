"""A KV cache with rows in static buffers.

    row 0   [ cached ........ | root a b c d . . . | 0 0 0 ]     the pass wrote 8 slots after each row's end
    row 1   [ cached .. | root a b c d . . . | 0 0 0 0 0 0 ]
                                                                 keep [0, 2, 4] and [0, 1]:
    row 0   [ cached ........ | root b d | 0 0 0 0 0 0 0 0 ]     moved
    row 1   [ cached .. | root a | 0 0 0 0 0 0 0 0 0 0 0 0 ]     leading nodes in order are already in place

A pass writes each row's tokens after its own end, at slots given in a tensor, so one captured pass serves all lengths.
Between passes, all slots after a row's end are zero, and so are unused rows. Masks hide them anyway, but attention
multiplies masked values by a weight of zero, and zero times an infinity left there by a rejected guess is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch

from lade.backends.cuda_graphs.buffers import (
    Buffers,
    EagerReplay,
    KVShape,
    Layers,
    NodeBuffers,
    StateShape,
    StepShape,
    state_shapes,
)
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.recurrent.layer import RecurrentLayer, empty_like
from lade.model.cache_layers import TreeLayer
from lade.model.inputs import LARGEST_STEP, batch_bucket, key_bucket, step_bucket
from lade.model.kv_cache import PositionOffsets, TreeCache

AHEAD_TOKENS = 4096
"""Most slots beyond a text in initial buffers: requests may allow far more tokens than they will use."""
T = TypeVar("T")


class StaticCache:
    """The cache of B rows in `Buffers`; see `lade.model.kv_cache.RowCache`.

    Prefill fills a `TreeCache`, which grows on demand. Its rows are then copied here: all at once by `join`, or one by
    one by `take`. An operation that needs larger buffers, and gets none for lack of memory, leaves everything
    unchanged.

    Rows will reach `tokens` at the most, if that is known. Buffers come from the pool, or a new one, and have no more
    slots over all rows than `limit`, if there is one.
    """

    dynamic = None
    """Always None: this cache has no fallback, see `FallbackCache.dynamic`."""

    def __init__(self, tokens: int | None = None, *, limit: int | None = None, pool: BufferPool | None = None) -> None:
        self._tokens, self._limit, self._pool = tokens, limit, pool or BufferPool(EagerReplay)
        self._reserved: tuple[int, int] | None = None  # rows and slots reserved while it was empty
        self._rows: StaticRows | None = None

    @staticmethod
    def buffer_rows(rows: int) -> int:
        """See `BufferSizes.buffer_rows`: a power of two, to which passes are padded."""
        return batch_bucket(max(1, rows))

    @staticmethod
    def buffer_slots(tokens: int, tree: int = 0) -> int:
        """See `BufferSizes.buffer_slots`: a multiple to which passes are padded; the last slot stays zero."""
        return key_bucket(tokens + (step_bucket(tree) if tree else 0) + 1)

    @staticmethod
    def spare_tokens(tokens: int) -> int:
        """See `BufferSizes.spare_tokens`: ample, since resizing loses the captured passes."""
        return max(AHEAD_TOKENS, tokens)

    @property
    def rows(self) -> StaticRows:
        """The rows and their buffers; raises `RuntimeError` while it is empty."""
        if self._rows is None:
            raise RuntimeError("an empty static cache has no buffers: fill a TreeCache and join it")
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
        """Rows, and slots per row, of the present buffers; zeros while it is empty."""
        return (0, 0) if self._rows is None else (self.buffers.rows, self.buffers.slots)

    def try_static(self, call: Callable[[StaticCache], T]) -> T | None:
        """Return the result of `call`; errors propagate, since there is no cache to fall back to."""
        return call(self)

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Replace all rows by rows of other caches; see `TreeCache.join`."""
        self.reset()
        longest = max(parts[part].lengths[row] for part, row in places)
        self._begin(_layers_of(parts[0]), len(places), longest).append(parts, places)

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache, which is empty afterwards."""
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
        """Resize the buffers to this size, rounded up, or to what the rows need; an empty cache does so later."""
        wanted = batch_bucket(rows), key_bucket(slots)
        if self._rows is None:
            self._reserved = wanted
        else:
            self._resize(*wanted)

    def _resize(self, rows: int, slots: int) -> None:
        """Move to other buffers, on which nothing has been captured yet."""
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
        """Return a new cache with the first tokens of a row."""
        copy, one = TreeCache(), (slice(row, row + 1), slice(None), slice(tokens))
        copy.layers += [TreeLayer.of(keys[one], values[one]) for keys, values in self.rows.states()]
        return copy

    def move_to(self, cache: TreeCache) -> None:
        """Move all rows to an empty cache, through host memory, so that the device need not hold both.

        Raises:
            torch.OutOfMemoryError: there is not even memory for the other cache; the rows are lost.
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
        recurrent: list[Any] = cache.recurrent
        for layer in recurrent:
            layer.become(layer, lambda states, layer=layer: states[0].to(layer.device), [layer])
        for keys, values in held:
            for row, length in enumerate(lengths):  # a failed capture may have written after the rows' ends
                keys[row, :, length:] = values[row, :, length:] = 0
        pairs = ((keys.to(device), values.to(device)) for (keys, values), device in zip(held, devices, strict=True))
        _fill(cache, pairs, lengths, offsets)

    def shape(self, size: int) -> StepShape:
        """Return the shape of a pass that feeds at most `size` tokens per row."""
        padded = step_bucket(size)
        keys = key_bucket(max(self.lengths) + padded)
        return StepShape(batch_bucket(len(self.lengths)), padded, keys, self.rows.offsets.axes)

    def make_room(self, size: int) -> None:
        """Ensure slots for a pass that feeds `size` tokens per row."""
        needed = max(self.lengths) + step_bucket(size)
        if needed >= self.buffers.slots:
            self._resize(self.buffers.rows, key_bucket(2 * needed))

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep, of the last `fed` tokens, those on each row's path; see `StaticRows.keep`."""
        self.rows.keep(paths, fed)

    def leave(self, row: int) -> None:
        """Evict a row; the last row takes its index."""
        self.rows.leave(row)

    def reset(self) -> None:
        """Drop all rows, and release the buffers."""
        if self._rows is not None:
            self._pool.release(self._rows.buffers)
        self._rows = self._reserved = None


class StaticRows:
    """The first rows of some buffers, each with its own length. Nothing here allocates memory."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers  # all zero at first
        self.lengths: list[int] = [0]  # [B], cached tokens of each row; [0] while there are no rows
        self.ends: list[int] = []  # [B], slots from which on each row is zero
        self.offsets = PositionOffsets()  # of the positions that follow the cached tokens
        self.layers: list[
            Any
        ] = []  # of the model's cache; states are views of the buffers, keys and values not in them
        self._nodes: NodeBuffers | None = None  # node inputs of the last pass, until `keep`
        self._padded: StepShape | None = None  # shape of the last pass, if it wrote to unused rows

    def append(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Copy in rows of other caches, emptying these layer by layer; see `TreeCache.join`."""
        first, lengths = len(self.ends), [parts[part].lengths[row] for part, row in places]
        others = [(parts[part].offsets, row) for part, row in places]
        self.offsets = PositionOffsets.collected([*((self.offsets, row) for row in range(first)), *others])
        if not self.layers:
            self.layers = [empty_like(layer) for layer in parts[0].layers]
            self._lay_states(parts[0].layers)
        pairs = zip(self.buffers.keys, self.buffers.values, strict=True)
        for number, own in enumerate(self.layers):
            held = [part.layers[number] for part in parts]
            if isinstance(own, TreeLayer):
                keys, values = next(pairs)
                for target, ((part, row), length) in enumerate(zip(places, lengths, strict=True), first):
                    keys[target, :, :length] = held[part].keys[row, :, :length]
                    values[target, :, :length] = held[part].values[row, :, :length]
            if isinstance(own, RecurrentLayer):
                for key, state in own.states.items():
                    for target, (part, row) in enumerate(places, first):
                        state[target] = held[part].states[key][row]
            for layer in held:
                layer.reset()
        for each in parts:
            each.reset()
        self.ends = [*self.ends, *lengths]
        self.lengths = list(self.ends)

    def _lay_states(self, like: Sequence[Any]) -> None:
        """Make the states of recurrent layers views of the buffers; flags are copied from the layers in `like`."""
        states = iter(self.buffers.states)
        for own, layer in zip(self.layers, like, strict=True):
            if isinstance(own, RecurrentLayer):
                own.become(layer, lambda _: next(states), [layer])

    def move_to(self, buffers: Buffers) -> None:
        """Copy the rows to other buffers, all zero, and use those from now on."""
        count, used = len(self.ends), max(self.ends, default=0)
        for new, old in zip(buffers.groups, self.buffers.groups, strict=True):
            new[:, :count, :, :used] = old[:, :count, :, :used]
        for kind, states in buffers.state_groups.items():
            states[:count] = self.buffers.state_groups[kind][:count]
        self.buffers = buffers
        self._lay_states(self.layers)

    def layers_with(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        """Return layers of a `TreeCache` with these rows' states, mapped by `copied`, without keys and values."""
        rows = len(self.lengths)
        layers = [empty_like(layer) for layer in self.layers]
        for layer, own in zip(layers, self.layers, strict=True):
            if isinstance(own, RecurrentLayer):
                layer.become(own, lambda states: copied(states[0][:rows]), [own])
        return layers

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values `[B, H, longest, D]` of each layer, views of the buffers."""
        rows, longest = len(self.lengths), max(self.lengths)
        pairs = zip(self.buffers.keys, self.buffers.values, strict=True)
        return [(keys[:rows, :, :longest], values[:rows, :, :longest]) for keys, values in pairs]

    def fed(self, size: int, shape: StepShape, nodes: NodeBuffers | None = None) -> None:
        """Record a pass of this shape that wrote `size` tokens and padding to each row, leaving inputs in `nodes`."""
        self._nodes = nodes
        self.ends = [max(length + shape.size, end) for length, end in zip(self.lengths, self.ends, strict=True)]
        self.lengths = [length + size for length in self.lengths]
        if shape.rows > len(self.lengths):
            self._padded = shape

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep, of the `fed` tokens that the last pass appended to every row, those on its path; zero the others.

        Paths are ascending indices, counted from the first of these tokens.
        """
        if self._nodes is not None and all(paths):  # states no longer matter if a row keeps nothing
            self._nodes.fold(paths)
        self._nodes = None
        starts = [length - fed for length in self.lengths]
        in_place = [next((i for i, node in enumerate(path) if node != i), len(path)) for path in paths]
        if all(kept == len(path) for kept, path in zip(in_place, paths, strict=True)):
            for row, (start, kept, end) in enumerate(zip(starts, in_place, self.ends, strict=True)):
                if start + kept < end:
                    self.buffers.clear_rows(row, slice(start + kept, end))
        else:
            self._move(paths, starts, in_place)
        self.lengths = [start + len(path) for start, path in zip(starts, paths, strict=True)]
        self.ends = list(self.lengths)
        if self._padded is not None:
            self.buffers.clear_rows(slice(len(paths), self._padded.rows), slice(0, self._padded.size))
            self._padded = None

    def _move(self, paths: Sequence[Sequence[int]], starts: Sequence[int], in_place: Sequence[int]) -> None:
        """Move nodes that are not in place, and copy zeros to the slots after them."""
        zero = self.buffers.slots - 1
        firsts = [start + kept for start, kept in zip(starts, in_place, strict=True)]
        width = max(end - first for end, first in zip(self.ends, firsts, strict=True))
        sources = np.full((len(paths), width), zero)
        targets = np.full((len(paths), width), zero)
        for row, (path, start, kept) in enumerate(zip(paths, starts, in_place, strict=True)):
            moved, places = path[kept:], self.ends[row] - firsts[row]
            sources[row, : len(moved)] = [start + node for node in moved]
            targets[row, :places] = np.arange(firsts[row], self.ends[row])
        self.buffers.move(sources, targets)

    def leave(self, row: int) -> None:
        """Evict a row; the last row takes its index."""
        last, used = len(self.ends) - 1, max(self.ends)
        kept = list(range(last))
        if row < last:
            kept[row] = last
            self.buffers.copy_row(last, row, used)
        self.buffers.clear_rows(last, slice(0, used))
        self.offsets = self.offsets.selected(kept)
        self.ends = [self.ends[each] for each in kept]
        self.lengths = [self.lengths[each] for each in kept] or [0]


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return rows and slots that hold either."""
    return max(one[0], other[0]), max(one[1], other[1])


def _layers_of(cache: TreeCache) -> Layers:
    layers: list[tuple[KVShape, KVShape] | StateShape] = []
    for layer in cache.attending:
        assert layer.keys is not None and layer.values is not None
        assert layer.indexer_keys is None, "models with indexers run eagerly, since static buffers have no indexer keys"
        layers.append((KVShape.of(layer.keys), KVShape.of(layer.values)))
    return [*layers, *(kind for layer in cast(list[RecurrentLayer], cache.recurrent) for kind in state_shapes(layer))]


def _fill(
    cache: TreeCache,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    offsets: PositionOffsets,
) -> None:
    """Give the attention layers of a cache their keys and values; recurrent layers have their states already."""
    for layer, (keys, values) in zip(cache.attending, pairs, strict=True):
        layer.update(keys, values)
        layer.lengths = list(lengths)
    cache.offsets = offsets
    cache.settle()
