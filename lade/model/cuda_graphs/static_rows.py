"""Rows that lie in static buffers.

    row 0   [ cached ........ | root a b c d . . . | 0 0 0 ]     the pass wrote 8 slots after each row's end
    row 1   [ cached .. | root a b c d . . . | 0 0 0 0 0 0 ]
                                                                 keep [0, 2, 4] and [0, 1]:
    row 0   [ cached ........ | root b d | 0 0 0 0 0 0 0 0 ]     moved
    row 1   [ cached .. | root a | 0 0 0 0 0 0 0 0 0 0 0 0 ]     the first nodes in order are in place already

A pass writes each row's tokens after its own end, at slots given in a tensor; so one captured pass serves all lengths.
Between passes, all slots after a row's end are zero, and so are unused rows. Masks would hide them anyway, but
attention multiplies what is masked by a weight of zero, and zero times an infinity that some rejected guess left there
is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lade.model.cuda_graphs.buffers import Buffers, StepShape
from lade.model.cuda_graphs.states import NodeBuffers
from lade.model.kv_cache import TreeCache
from lade.model.position_offsets import PositionOffsets
from lade.model.recurrent.layer import RecurrentLayer, empty_like
from lade.model.tree_layer import TreeLayer


class StaticRows:
    """The first rows of some buffers, each with a length of its own. Nothing here allocates memory.

    Args:
        buffers: all zero.

    Attributes:
        lengths: `[B]`, cached tokens of each row; `[0]` while there are no rows.
        ends: `[B]`, slots of each row from here on are zero.
        offsets: of the positions that follow what is cached.
        layers: of the model's cache, in order. The states of recurrent ones are those in the buffers, for all rows of
            these; keys and values are not in them.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.lengths: list[int] = [0]
        self.ends: list[int] = []
        self.offsets = PositionOffsets()
        self.layers: list[Any] = []
        self._nodes: NodeBuffers | None = None  # what the last pass has left for states, until `keep`
        self._padded: StepShape | None = None  # of the last pass, if it has written to unused rows

    def append(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Copy in rows of other caches, which are emptied meanwhile, layer by layer; see `TreeCache.join`."""
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
        """Have the states of recurrent layers lie in the buffers; flags are those of the layers given."""
        states = iter(self.buffers.states.states)
        for own, layer in zip(self.layers, like, strict=True):
            if isinstance(own, RecurrentLayer):
                own.become(layer, lambda _: next(states), [layer])

    def move_to(self, buffers: Buffers) -> None:
        """Copy the rows to other buffers, all zero, and use those from now on."""
        count, used = len(self.ends), max(self.ends, default=0)
        for new, old in zip(buffers.groups, self.buffers.groups, strict=True):
            new[:, :count, :, :used] = old[:, :count, :, :used]
        buffers.states.copy_from(self.buffers.states, count)
        self.buffers = buffers
        self._lay_states(self.layers)

    def layers_with(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        """Layers of a `TreeCache` with the states of these rows, each as `copied`, and no keys and values yet."""
        rows = len(self.lengths)
        layers = [empty_like(layer) for layer in self.layers]
        for layer, own in zip(layers, self.layers, strict=True):
            if isinstance(own, RecurrentLayer):
                layer.become(own, lambda states: copied(states[0][:rows]), [own])
        return layers

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[B, H, longest, D]` of each layer, views of the buffers."""
        rows, longest = len(self.lengths), max(self.lengths)
        pairs = zip(self.buffers.keys, self.buffers.values, strict=True)
        return [(keys[:rows, :, :longest], values[:rows, :, :longest]) for keys, values in pairs]

    def fed(self, size: int, shape: StepShape, nodes: NodeBuffers | None = None) -> None:
        """A pass of this shape has written `size` tokens to each row, and padding after them; `nodes` is for states."""
        self._nodes = nodes
        self.ends = [max(length + shape.size, end) for length, end in zip(self.lengths, self.ends, strict=True)]
        self.lengths = [length + size for length in self.lengths]
        if shape.rows > len(self.lengths):
            self._padded = shape

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the `fed` tokens that came last, keep those of the path and set the others to zero.

        Args:
            paths: for each row the indices to keep, ascending, counted from the first of the `fed` tokens.
            fed: tokens that the last pass appended to every row.
        """
        if self._nodes is not None and all(paths):  # where none of a row is kept, states no longer matter
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
        """Move the nodes that are not in place, and copy zeros to the slots after them."""
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

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        before, used = len(self.ends), max(self.ends)
        self.buffers.select(rows, used)
        self.offsets = self.offsets.selected(rows)
        self.ends = [self.ends[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows] or [0]
        for row in range(max(before, len(rows))):
            self.buffers.clear_rows(row, slice(self.ends[row] if row < len(rows) else 0, used))
