"""A KV cache at fixed addresses, for passes that were captured once and are replayed.

    row 0   [ cached ........ | root a b c d . . . | 0 0 0 ]     the pass wrote 8 slots behind each row's end
    row 1   [ cached .. | root a b c d . . . | 0 0 0 0 0 0 ]
                                                                 keep [0, 2, 4] and [0, 1]:
    row 0   [ cached ........ | root b d | 0 0 0 0 0 0 0 0 ]     moved
    row 1   [ cached .. | root a | 0 0 0 0 0 0 0 0 0 0 0 0 ]     the first nodes in order lie where they belong

A pass writes each row's tokens behind its own end, at slots that it is told in a tensor; so one captured pass serves
all lengths. What lies behind a row's end is zero between passes. Masks would hide it anyway, but attention multiplies
what is masked by a weight of zero, and zero times an infinity that some rejected guess left there is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lade.model.buckets import LARGEST_STEP, batch_bucket, key_bucket, step_bucket
from lade.model.cache import TreeCache
from lade.model.static_buffers import Buffers, Shape, States

AHEAD_TOKENS = 4096
"""Slots beyond the prompt that buffers begin with at most: a request may allow far more tokens than it will get."""


Lend = Callable[["StaticCache", Sequence[tuple[States, States]], int, int], Buffers]
"""(borrower, layers, rows, slots) -> buffers that fit, all zero."""


GiveBack = Callable[[Buffers], None]


def new_buffers(borrower: StaticCache, layers: Sequence[tuple[States, States]], rows: int, slots: int) -> Buffers:
    """Buffers of its own."""
    return Buffers(layers, rows, slots)


class StaticCache:
    """The cache of B rows that lie in `Buffers`; see `lade.decoding.engine.Cache`.

    Prefill fills a `TreeCache`, which grows as it needs; then its rows are taken over by `join`.

    Args:
        tokens: greatest length that a row is going to have.
        lend: where the buffers come from.
        give_back: is given them when they are not needed any more.
    """

    def __init__(self, tokens: int, lend: Lend = new_buffers, give_back: GiveBack = lambda buffers: None) -> None:
        self._tokens, self._lend, self._give_back = tokens, lend, give_back
        self._buffers: Buffers | None = None
        self._ends: list[int] = []  # slots from here on are zero
        self.lengths: list[int] = [0]

    @property
    def empty(self) -> bool:
        """Whether it has no rows."""
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

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Become a cache of rows that others hold; see `TreeCache.join`."""
        lengths = [parts[part].lengths[row] for part, row in places]
        layers = [(States.of(_tensor(layer.keys)), States.of(_tensor(layer.values))) for layer in parts[0].layers]
        longest = max(lengths)
        slots = key_bucket(min(self._tokens, longest + AHEAD_TOKENS) + LARGEST_STEP + 1)
        self.release()
        self._buffers = self._lend(self, layers, batch_bucket(len(places)), slots)
        for number, (keys, values) in enumerate(zip(self._buffers.keys, self._buffers.values, strict=True)):
            for target, (part, row) in enumerate(places):
                layer, length = parts[part].layers[number], lengths[target]
                keys[target, :, :length] = _tensor(layer.keys)[row, :, :length]
                values[target, :, :length] = _tensor(layer.values)[row, :, :length]
            for each in parts:
                each.layers[number].reset()
        for each in parts:
            each.reset()
        self.lengths, self._ends = lengths, list(lengths)

    def copy_to(self, cache: TreeCache) -> None:
        """Give an empty cache what this one holds."""
        longest, rows = max(self.lengths), len(self.lengths)
        for number, (keys, values) in enumerate(zip(self.buffers.keys, self.buffers.values, strict=True)):
            cache.update(keys[:rows, :, :longest], values[:rows, :, :longest], number)
            cache.layers[number].lengths = list(self.lengths)

    def shape(self, size: int) -> Shape:
        """Of a pass that feeds at most `size` tokens a row."""
        padded = step_bucket(size)
        return Shape(batch_bucket(len(self.lengths)), padded, key_bucket(max(self.lengths) + padded))

    def reserve(self, size: int) -> None:
        """Make room for a pass that feeds `size` tokens a row; new buffers, if it takes any, have no passes yet."""
        old, used = self.buffers, max(self.lengths)
        needed = used + step_bucket(size)
        if needed < old.slots:
            return
        self._buffers = self._lend(self, old.layers, old.rows, key_bucket(2 * needed))
        for after, before in zip(self._buffers.groups, old.groups, strict=True):
            after[:, : old.rows, :, :used] = before[..., :used, :]
        self._give_back(old)

    def fed(self, size: int, shape: Shape) -> None:
        """A pass of this shape has written `size` tokens to each row, and behind them what it was padded with."""
        written = [length + shape.size for length in self.lengths]
        self._ends = list(map(max, written, self._ends))
        self.lengths = [length + size for length in self.lengths]

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
                    self.buffers.clear_row(row, slice(start + kept, end))
        else:
            self._move(paths, starts, in_order)
        self.lengths = [start + len(path) for start, path in zip(starts, paths, strict=True)]
        self._ends = list(self.lengths)

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
        before, used = len(self.lengths), max(self._ends)
        self.buffers.select(rows, used)
        self.lengths, self._ends = [self.lengths[row] for row in rows], [self._ends[row] for row in rows]
        # Between passes all that lies behind a row's end is zero, in rows of nobody too.
        for row in range(max(before, len(rows))):
            self.buffers.clear_row(row, slice(self._ends[row] if row < len(rows) else 0, used))

    def release(self) -> None:
        """Be empty, and give the buffers back."""
        if self._buffers is not None:
            self._give_back(self._buffers)
            self._buffers, self.lengths, self._ends = None, [0], []


def _in_order(path: Sequence[int]) -> int:
    """How many nodes of a path lie where they belong."""
    return next((place for place, node in enumerate(path) if node != place), len(path))


def _tensor(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None
    return states
