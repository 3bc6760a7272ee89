"""A KV cache at fixed addresses, for passes that were captured once and are replayed.

    row 0   [ cached ........ | root a b c d . . . | 0 0 0 ]     the pass wrote 8 slots behind each row's end
    row 1   [ cached .. | root a b c d . . . | 0 0 0 0 0 0 ]
                                                                 keep [0, 2, 4] and [0, 1]:
    row 0   [ cached ........ | root b d | 0 0 0 0 0 0 0 0 ]     moved
    row 1   [ cached .. | root a | 0 0 0 0 0 0 0 0 0 0 0 0 ]     the first nodes in order lie where they belong

A pass writes each row's tokens behind its own end, at slots that it is told in a tensor; so one captured pass serves
all lengths. What lies behind a row's end is zero between passes, and so are rows of nobody. Masks would hide it anyway,
but attention multiplies what is masked by a weight of zero, and zero times an infinity that some rejected guess left
there is not zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lade.model.cuda_graphs.buffers import Buffers, Layers, Shape, States
from lade.model.cuda_graphs.pool import Lender, OwnBuffers
from lade.model.kv_cache import TreeCache
from lade.model.shapes import LARGEST_STEP, batch_bucket, key_bucket, step_bucket
from lade.model.sizing import AHEAD_TOKENS, Bucketed


class StaticCache:
    """The cache of B rows that lie in `Buffers`; see `lade.model.row_cache.RowCache`.

    Prefill fills a `TreeCache`, which grows as it needs. Then its rows are taken over: all at once by `join`, or one by
    one by `take`. Whatever needs other buffers, and gets none for lack of memory, leaves all as it was.

    Args:
        tokens: greatest length that a row is going to have, if that is known.
        limit: slots in all, rows times those of each, that buffers lent to it may have; None for any number.
        lender: where the buffers come from; None for new ones.
    """

    sizing = Bucketed()

    def __init__(self, tokens: int | None = None, *, limit: int | None = None, lender: Lender | None = None) -> None:
        self._tokens, self._limit, self._lender = tokens, limit, lender or OwnBuffers()
        self._wanted: tuple[int, int] | None = None  # rows and slots that were reserved before there were any rows
        self._buffers: Buffers | None = None
        self._ends: list[int] = []  # slots from here on are zero; an entry for each row
        self._spoiled: Shape | None = None  # of the last pass, if it has written to rows of nobody
        self.lengths: list[int] = [0]

    @property
    def empty(self) -> bool:
        """Whether it has no buffers yet."""
        return self._buffers is None

    @property
    def buffers(self) -> Buffers:
        """Where the rows lie.

        Raises:
            RuntimeError: the cache is empty.
        """
        if self._buffers is None:
            raise RuntimeError("an empty static cache has no buffers: fill a TreeCache, and join it")
        return self._buffers

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        return (0, 0) if self._buffers is None else (self._buffers.rows, self._buffers.slots)

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Become a cache of rows that others hold; see `TreeCache.join`."""
        self.reset()
        longest = max(parts[part].lengths[row] for part, row in places)
        self._begin(_layers_of(parts[0]), len(places), longest)
        self._copy_in(parts, places)

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache; that one is empty then."""
        row, length = len(self._ends), part.lengths[0]
        rows, slots = self.room
        if self._buffers is None:
            self._begin(_layers_of(part), 1, length)
        elif row == rows or length >= slots:
            self._resize(max(rows, batch_bucket(row + 1)), max(slots, key_bucket(length + 1)))
        self._copy_in([part], [(0, 0)])

    def _begin(self, layers: Layers, rows: int, longest: int) -> None:
        tokens = longest + AHEAD_TOKENS if self._tokens is None else min(self._tokens, longest + AHEAD_TOKENS)
        wanted_rows, wanted_slots = self._wanted or (1, key_bucket(tokens + LARGEST_STEP + 1))
        rows, slots = max(wanted_rows, batch_bucket(rows)), max(wanted_slots, key_bucket(longest + 1))
        self._buffers, self._wanted = self._lender.lend(self, layers, rows, slots, self._limit), None

    def _copy_in(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Append rows of others, which are emptied meanwhile, layer by layer."""
        first, lengths = len(self._ends), [parts[part].lengths[row] for part, row in places]
        for number, (keys, values) in enumerate(zip(self.buffers.keys, self.buffers.values, strict=True)):
            for target, ((part, row), length) in enumerate(zip(places, lengths, strict=True), first):
                layer = parts[part].layers[number]
                keys[target, :, :length] = _tensor(layer.keys)[row, :, :length]
                values[target, :, :length] = _tensor(layer.values)[row, :, :length]
            for each in parts:
                each.layers[number].reset()
        for each in parts:
            each.reset()
        self._ends = [*self._ends, *lengths]
        self.lengths = list(self._ends)

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of so many rows and slots, rounded up to buckets, at least for what there is.

        An empty cache has them when its first row comes.
        """
        if self._buffers is None:
            self._wanted = batch_bucket(rows), key_bucket(slots)
        else:
            self._resize(batch_bucket(rows), key_bucket(slots))

    def _resize(self, rows: int, slots: int) -> None:
        """Move to other buffers; nothing has been captured on new ones yet."""
        old, count, used = self.buffers, len(self._ends), max(self._ends, default=0)
        rows, slots = max(rows, batch_bucket(max(1, count))), max(slots, key_bucket(used + 1))
        if (rows, slots) == self.room:
            return
        new = self._lender.lend(self, old.layers, rows, slots, self._limit)
        for after, before in zip(new.groups, old.groups, strict=True):
            after[:, :count, :, :used] = before[:, :count, :, :used]
        self._buffers = new
        self._lender.drop(old)

    def copy_to(self, cache: TreeCache) -> None:
        """Give an empty cache what this one holds."""
        for number, (keys, values) in enumerate(self._held()):
            cache.update(keys, values, number)
            cache.layers[number].lengths = list(self.lengths)

    def move_to(self, cache: TreeCache) -> None:
        """The same where there is no memory for both: by way of the host. The buffers are dropped, and this is empty.

        Raises:
            torch.OutOfMemoryError: there is no memory for the other one alone; what was held is lost then.
        """
        if not self._ends:
            self.reset()
            return
        devices = [keys.device for keys in self.buffers.keys]
        held = [[states.to("cpu", copy=True) for states in pair] for pair in self._held()]
        lengths, buffers = self.lengths, self.buffers
        self._forget()
        self._lender.drop(buffers)
        del buffers
        for number, (device, pair) in enumerate(zip(devices, held, strict=True)):
            for row, length in enumerate(lengths):  # what a capture that failed has left behind the rows' ends
                for states in pair:
                    states[row, :, length:] = 0
            keys, values = (states.to(device) for states in pair)
            cache.update(keys, values, number)
            cache.layers[number].lengths = list(lengths)

    def _held(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[B, H, longest, D]` of each layer."""
        rows, longest = len(self.lengths), max(self.lengths)
        pairs = zip(self.buffers.keys, self.buffers.values, strict=True)
        return [(keys[:rows, :, :longest], values[:rows, :, :longest]) for keys, values in pairs]

    def shape(self, size: int) -> Shape:
        """Of a pass that feeds at most `size` tokens a row."""
        padded = step_bucket(size)
        return Shape(batch_bucket(len(self.lengths)), padded, key_bucket(max(self.lengths) + padded))

    def make_room(self, size: int) -> None:
        """For a pass that feeds `size` tokens a row."""
        needed = max(self.lengths) + step_bucket(size)
        if needed >= self.buffers.slots:
            self._resize(self.buffers.rows, key_bucket(2 * needed))

    def fed(self, size: int, shape: Shape) -> None:
        """A pass of this shape has written `size` tokens to each row, and behind them what it was padded with."""
        written = [length + shape.size for length in self.lengths]
        self._ends = list(map(max, written, self._ends))
        self.lengths = [length + size for length in self.lengths]
        if shape.rows > len(self.lengths):
            self._spoiled = shape

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the `fed` tokens that came last, keep those of the path and make the others zero.

        Args:
            paths: for each row the indices to keep, ascending, counted from the first of the `fed` tokens.
            fed: tokens that the last pass appended to every row.
        """
        starts = [length - fed for length in self.lengths]
        in_order = [_in_order(path) for path in paths]
        if all(kept == len(path) for kept, path in zip(in_order, paths, strict=True)):
            for row, (start, kept, end) in enumerate(zip(starts, in_order, self._ends, strict=True)):
                if start + kept < end:
                    self.buffers.clear_rows(row, slice(start + kept, end))
        else:
            self._move(paths, starts, in_order)
        self.lengths = [start + len(path) for start, path in zip(starts, paths, strict=True)]
        self._ends = list(self.lengths)
        if self._spoiled is not None:
            self.buffers.clear_rows(slice(len(paths), self._spoiled.rows), slice(0, self._spoiled.size))
            self._spoiled = None

    def _move(self, paths: Sequence[Sequence[int]], starts: Sequence[int], in_order: Sequence[int]) -> None:
        """Move what is out of order, and copy zeros to where nothing stays."""
        zero = self.buffers.slots - 1
        firsts = [start + kept for start, kept in zip(starts, in_order, strict=True)]
        width = max(end - first for end, first in zip(self._ends, firsts, strict=True))
        sources = np.full((len(paths), width), zero)
        targets = np.full((len(paths), width), zero)
        for row, (path, start, kept) in enumerate(zip(paths, starts, in_order, strict=True)):
            moved, places = path[kept:], self._ends[row] - firsts[row]
            sources[row, : len(moved)] = [start + node for node in moved]
            targets[row, :places] = np.arange(firsts[row], self._ends[row])
        self.buffers.move(sources, targets)

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place and its number."""
        rows = list(range(len(self.lengths)))
        rows[row] = rows[-1]
        self._select(rows[:-1])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order.

        Raises:
            ValueError: there are more of them than the buffers have.
        """
        rows: list[int] = indices.tolist()
        if len(rows) > self.buffers.rows:
            raise ValueError(f"indices={rows} are too many: the buffers have {self.buffers.rows} rows")
        self._select(rows)

    def _select(self, rows: Sequence[int]) -> None:
        before, used = len(self._ends), max(self._ends)
        self.buffers.select(rows, used)
        self._ends = [self._ends[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows] or [0]
        for row in range(max(before, len(rows))):
            self.buffers.clear_rows(row, slice(self._ends[row] if row < len(rows) else 0, used))

    def reset(self) -> None:
        """Forget everything, and give the buffers back."""
        if self._buffers is not None:
            self._lender.take_back(self._buffers)
        self._forget()

    def _forget(self) -> None:
        self._buffers = self._wanted = self._spoiled = None
        self.lengths, self._ends = [0], []


def _in_order(path: Sequence[int]) -> int:
    """How many nodes of a path lie where they belong."""
    return next((place for place, node in enumerate(path) if node != place), len(path))


def _layers_of(cache: TreeCache) -> Layers:
    return [(States.of(_tensor(layer.keys)), States.of(_tensor(layer.values))) for layer in cache.layers]


def _tensor(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None
    return states
