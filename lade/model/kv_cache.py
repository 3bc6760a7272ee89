"""A KV cache with rows of different lengths, which keeps the accepted paths of token trees.

To transformers it is an ordinary dynamic cache: each forward pass appends its tokens, in the same slots of every row,
after the longest one. After a pass over trees, `keep` moves the accepted nodes to the end of their row's tokens and
drops the others:

    row 0   [ cached ........ | root a b c d ]   keep [0, 2, 4]  ->  [ cached ........ | root b d ]
    row 1   [ cached .. |     | root a b c d ]   keep [0]        ->  [ cached .. | root ]

So a pass writes each layer's keys at once, whatever the lengths of the rows, and accepted tokens are moved in all
layers at once. Rows join and leave without copying the others: buffers may have spare rows, and where a row leaves,
the last one takes its place.

All layers keep all positions, even with a sliding window: masks hide the tokens outside it.

Recurrent layers hold the states of the text. A pass over a tree leaves these unchanged, and `keep` advances them along
the accepted path. They cannot be rewound, so removing the last tokens of a cache with such layers empties it.

In models whose positions count time, height and width (Qwen's multimodal ones), an image takes fewer positions than
tokens: the text after it has positions at a constant offset from the slots, per axis and row (`PositionOffsets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from lade.decoding.loop import KVCache
from lade.errors import UnsupportedArgumentError
from lade.model.cache_layers import (
    Ancestry,
    JoinedLayers,
    Move,
    StatefulLayer,
    TokenCounter,
    TreeLayer,
    apply_moves,
    spare_capacity,
)

Axes = tuple[int, ...]
"""Offsets from slot to position, one per axis; empty if positions equal slots."""


@dataclass(frozen=True)
class PositionOffsets:
    """Position offsets of the rows of a cache, `[B]`; empty if no row has any."""

    rows: tuple[Axes, ...] = ()
    _uploaded: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @classmethod
    def collected(cls, places: Sequence[tuple[PositionOffsets, int]]) -> PositionOffsets:
        """Gather the offsets of rows of several caches, given as (offsets, index of the row)."""
        rows = tuple(offsets.rows[row] if offsets else () for offsets, row in places)
        return cls(rows) if any(rows) else cls()

    def selected(self, rows: Sequence[int]) -> PositionOffsets:
        """Return the offsets of these rows, in this order."""
        return self.collected([(self, row) for row in rows])

    @property
    def axes(self) -> int:
        """Number of axes of a position; 0 if positions equal slots."""
        return max(map(len, self.rows), default=0)

    def array(self) -> npt.NDArray[np.int64]:
        """Return the offsets as `[axes, B, 1]`, with zeros for rows of text alone."""
        rows = [row or (0,) * self.axes for row in self.rows]
        return np.array(rows, dtype=np.int64).T[..., None]

    def on(self, device: torch.device) -> torch.Tensor | None:
        """Return the offsets as `[axes, B, 1]` int64, uploaded once per device; None if no row has any."""
        if self.rows and device not in self._uploaded:
            self._uploaded[device] = torch.from_numpy(self.array().copy()).to(device)
        return self._uploaded.get(device)


_JOINED_LAYERS = 8
"""Number of layers whose buffers are joined; more need fewer operations, but more memory when the cache grows."""


class TreeCache(Cache):
    """KV cache of B rows for any decoder-only transformers model; layers are added as the model updates them.

    Attributes:
        offsets: offsets of the positions that follow the cached tokens.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self.layers: list[Any]
        self._groups: list[JoinedLayers] = []
        self._grouped_layers = 0
        self._tree_pass: Ancestry | None = None
        self._state_tokens: int | None = None  # number of tokens in the states of a single row, if known
        self.offsets = PositionOffsets()

    @staticmethod
    def buffer_rows(rows: int) -> int:
        """Return `rows`; see `BufferSizes`."""
        return rows

    @staticmethod
    def buffer_slots(tokens: int, tree: int = 0) -> int:
        """Return `tokens + tree`; see `BufferSizes`."""
        return tokens + tree

    @staticmethod
    def spare_tokens(tokens: int) -> int:
        """Return half as many tokens again; see `BufferSizes`."""
        return spare_capacity(tokens)

    @classmethod
    def of_length(cls, tokens: int) -> TreeCache:
        """Return a cache that reports `tokens` but holds none, to probe what a model would do with it."""
        cache, layer = cls(), TreeLayer()
        layer.lengths = [tokens]
        cache.layers.append(layer)
        return cache

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each row, `[B]`; `[0]` before the first pass."""
        for layer in self.layers:
            if isinstance(layer, TreeLayer):
                return layer.lengths or [0]
        return [0]

    @property
    def attending(self) -> list[TreeLayer]:
        """Layers with keys and values."""
        return [layer for layer in self.layers if isinstance(layer, TreeLayer)]

    @property
    def recurrent(self) -> list[StatefulLayer]:
        """Layers with recurrent states."""
        return [layer for layer in self.layers if isinstance(layer, StatefulLayer)]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Update a convolution state, as `transformers.Cache` does.

        Raises:
            UnsupportedArgumentError: there are no layers with states: plain `model.generate` was given an empty cache.
        """
        if layer_idx >= len(self.layers) or not isinstance(self.layers[layer_idx], StatefulLayer):
            raise UnsupportedArgumentError(
                "an empty lade.TreeCache has no layers for the states of this model",
                "fill it with lade.generate, which decodes plainly with lookahead=None, or give model.generate a "
                "DynamicCache(config=model.config)",
            )
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a convolution state, as `transformers.Cache` does; None for a layer that does not exist yet."""
        return super().get_conv_state(layer_idx, state_idx) if layer_idx < len(self.layers) else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state, as `transformers.Cache` does; None for a layer that does not exist yet."""
        return super().get_recurrent_state(layer_idx, state_idx) if layer_idx < len(self.layers) else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle; the copy joins its layers' buffers anew."""
        return {**vars(self), "_groups": [], "_grouped_layers": 0}

    def begin(self, tree_pass: Ancestry | None = None) -> None:
        """Begin a pass over trees with this ancestor relation; None for a plain one, which updates recurrent states."""
        self._tree_pass = tree_pass
        for layer in self.recurrent:
            layer.begin(tree_pass)
        if tree_pass is None:
            self._state_tokens = None

    def count(self, rows: int, tokens: int) -> None:
        """After a pass, count the `tokens` fed to each row, in models without attention layers to do so."""
        for layer in self.layers:
            if type(layer) is TokenCounter:  # `isinstance` of an abstract class takes 1 us a layer
                layer.count(rows, tokens)

    def settle(self) -> None:
        """End a plain pass: the states now include all tokens fed."""
        self._end_tree_pass()
        lengths = self.lengths
        self._state_tokens = lengths[0] if len(lengths) == 1 else None

    def _end_tree_pass(self) -> None:
        """End a pass over trees, if one has begun; after an interruption the states are those before it."""
        if self._tree_pass is not None:
            self._tree_pass = None
            for layer in self.recurrent:
                layer.begin(None)

    def reset(self) -> None:
        """Drop everything. The cache is then falsy, which transformers tests before it drops a cache."""
        self.layers.clear()
        self._groups.clear()
        self._tree_pass = self._state_tokens = None
        self.offsets = PositionOffsets()

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Keep the tokens on each row's path, and drop the others among the row's last ones.

        Args:
            paths: for each row the indices to keep, ascending, counted from the first of the `fed` tokens, or of the
                `held` ones before them. A path begins with the root; it may be empty only without recurrent layers, or
                if the states no longer matter.
            fed: number of tokens that the last forward pass appended to every row.
            held: for each row, number of tokens before the `fed` ones that its path includes; None for zeros.
        """
        if not self.layers:
            return
        if len(paths) == fed == 1 and paths[0] and not held:  # a lone root stays in place
            self.settle()
            return
        before, lengths = self.lengths, list[int]()
        moves: list[Move] = []
        first = max(before) - fed  # slot of the first token fed
        for row, (path, length, own) in enumerate(zip(paths, before, held or [0] * len(paths), strict=True)):
            start, unused = length - fed - own, first + fed - length
            slots = [node if node < own else node + unused for node in path]  # counted from `start`
            lengths.append(start + len(path))
            in_place = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            if in_place < len(slots):
                moves.append(Move(row, [start + slot for slot in slots[in_place:]], start + in_place))
        if moves:
            apply_moves(moves, [whole for group in self._grouped() for whole in group.joined()])
        for layer in self.attending:
            layer.lengths = lengths
        if self._tree_pass is not None and all(paths):  # a plain pass fed only the root, which is always kept
            last = torch.tensor([path[-1] for path in paths])
            for recurrent in self.recurrent:
                recurrent.keep(last)
        self.settle()

    def trim(self, lengths: Sequence[int]) -> None:
        """After a plain pass over rows padded on the right, keep the first `lengths[b]` tokens of row b.

        The cache must have no recurrent layers, whose states would include the padding.
        """
        for layer in self.attending:
            layer.lengths = list(lengths)
        self.settle()

    def repeat(self, tokens: int) -> None:
        """Append `tokens` copies of cached ones to every row, to time passes over a longer text than was fed."""
        for layer in self.attending:
            layer.repeat(tokens)

    def give_back(self, tokens: int) -> None:
        """End a generation: keep the first tokens of the only row, whichever layers an interrupted pass has updated.

        Every layer holds that many tokens. If the recurrent states are those of another number, nothing is kept.
        """
        if not tokens or (self._state_tokens != tokens and self.recurrent):
            self.reset()
        self._end_tree_pass()
        self.offsets = PositionOffsets()
        for layer in self.attending:
            layer.lengths = [tokens]

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens of every row; with recurrent layers, which cannot go back, all."""
        if self.recurrent:
            if tokens_to_remove:
                self.reset()
            return
        for layer in self.attending:
            layer.crop(tokens_to_remove)

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Take over rows of other caches of the same model, none of them empty, which are emptied layer by layer.

        `places` has for each of B rows the index of its part, and of the row in it; a row may be used twice.
        """
        self.reset()
        self.offsets = PositionOffsets.collected([(parts[part].offsets, row) for part, row in places])
        for layers in zip(*(part.layers for part in parts), strict=True):
            first = layers[0]
            joined = first.blank() if isinstance(first, TreeLayer | StatefulLayer) else first
            self.layers.append(joined)
            if joined is not first:
                joined.join(layers, places)
            for layer in layers:
                layer.reset()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row over all layers; 0 before the first pass."""
        return sum(self.device_bytes.values())

    @property
    def device_bytes(self) -> dict[torch.device, int]:
        """Bytes of one token of one row by device, as a model's layers may be on several."""
        found: dict[torch.device, int] = {}
        for buffer in (buffer for layer in self.attending for buffer in layer.buffers.values()):
            size = buffer.shape[1] * buffer.shape[3] * buffer.element_size()
            found[buffer.device] = found.get(buffer.device, 0) + size
        return found

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's states over all recurrent layers; 0 before the first pass."""
        return sum(layer.state_bytes for layer in self.recurrent)

    @property
    def room(self) -> tuple[int, int]:
        """Allocated rows, and slots of each; zeros before the first pass."""
        for layer in self.layers:
            if isinstance(layer, TreeLayer):
                return (0, 0) if layer.keys is None else (layer.keys.shape[0], layer.keys.shape[2])
        return (0, 0)

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers to this many rows and slots, at least to those in use, and copy their content."""
        for layer in self.layers:
            if isinstance(layer, TreeLayer | StatefulLayer):
                layer.reserve(rows, slots)

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model, which is emptied."""
        rows = range(len(self.lengths) if self.layers else 0)
        self.offsets = PositionOffsets.collected([*((self.offsets, row) for row in rows), (part.offsets, 0)])
        if not self.layers:
            self.layers, part.layers = part.layers, []
            self._groups.clear()
            return
        for layer, other in zip(self.layers, part.layers, strict=True):
            if isinstance(layer, TreeLayer | StatefulLayer):
                layer.take(other)
        part.reset()

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """Return a cache with a copy of the first tokens of a row, see `RowCache`."""
        if self.recurrent:
            raise ValueError("states cannot go back to the first tokens of a text")
        copy = TreeCache()
        copy.layers += [layer.copy_row(row, tokens) for layer in self.attending]
        copy.offsets = self.offsets.selected([row])
        return copy

    def dynamic_pair(self) -> Any:
        """Return the self- and cross-attention caches of plain encoder-decoder generation; None without an encoder."""
        return None

    def adopt(self, other: TreeCache) -> None:
        """Take over the content of another cache, which must not be used afterwards."""
        self.layers, other.layers = other.layers, []
        self._groups.clear()

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row < last:
            longest = max(self.lengths)  # so that nothing of the old row stays
            for whole in (buffer.tensor for group in self._grouped() for buffer in group.joined()):
                whole[:, row, :, :longest] = whole[:, last, :, :longest]
        lengths, order = list(self.lengths), list(range(last + 1))
        lengths[row], order[row] = lengths[last], last
        self.offsets = self.offsets.selected(order[:last])
        for layer in self.attending:
            layer.lengths = lengths[:last]
        for recurrent in self.recurrent:
            recurrent.leave(row)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        super().batch_select_indices(indices)
        self.offsets = self.offsets.selected(indices.tolist())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def _grouped(self) -> list[JoinedLayers]:
        if not self._groups or len(self.layers) != self._grouped_layers:
            layers, self._grouped_layers = self.attending, len(self.layers)
            firsts = range(0, len(layers), _JOINED_LAYERS)
            self._groups = [JoinedLayers(layers[first : first + _JOINED_LAYERS]) for first in firsts]
        return self._groups


class BufferSizes(Protocol):
    """Sizes that a type of cache allocates for given contents."""

    def buffer_rows(self, rows: int) -> int:
        """Return the number of rows to allocate for `rows`."""

    def buffer_slots(self, tokens: int, tree: int = 0) -> int:
        """Return the number of slots to allocate for a row of `tokens` with `tree` nodes after them."""

    def spare_tokens(self, tokens: int) -> int:
        """Return how many tokens to reserve beyond `tokens`, so that buffers are seldom replaced."""


class RowCache(KVCache, BufferSizes, Protocol):
    """Keys and values of rows that join one by one, each prefilled separately."""

    @property
    def room(self) -> tuple[int, int]:
        """Allocated rows, and slots of each; zeros while it is empty."""

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers, at least to the size in use; `BufferSizes` gives suitable sizes."""

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model, which is emptied."""

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """Return a separate cache with the first tokens of a row; the cache must have no recurrent layers."""

    def give_back(self, tokens: int) -> None:
        """End a generation: a user's cache keeps the first `tokens` of the only row, other buffers are released."""

    def reset(self) -> None:
        """Drop everything."""
