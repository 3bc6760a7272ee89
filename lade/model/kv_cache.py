"""A KV cache with rows of different lengths that keeps an accepted path of a token tree.

An image takes fewer positions than tokens in models that count time, height and width (Qwen's and their kin): after it
the text goes on with positions that are a constant away from the slots, on each axis and in each row.

To transformers it is an ordinary dynamic cache: what a forward pass feeds is appended, in the same slots of every row,
after the longest one. After a pass over a tree, `keep` moves the accepted nodes to the end of what their row has and
forgets the others:

    row 0   [ cached ........ | root a b c d ]   keep [0, 2, 4]  ->  [ cached ........ | root b d ]
    row 1   [ cached .. |     | root a b c d ]   keep [0]        ->  [ cached .. | root ]

So a pass writes each layer's keys at once, however long the rows are, and what is moved is moved in all layers at once.
Rows come and go without the others being copied: there may be room for more rows than there are, and where one leaves,
the last one takes its place.

All layers keep all positions, those of sliding windows too: their masks leave out what lies outside the window.

Recurrent layers keep the states of the text. A pass over a tree leaves them alone, and `keep` folds the path in. They
cannot go back, so a cache with such layers whose last tokens are not wanted is emptied.
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
    SPARE_TOKENS,
    Ancestry,
    JoinedLayers,
    Move,
    StatefulLayer,
    TokenCounter,
    TreeLayer,
    make_all,
)

Axes = tuple[int, ...]
"""What to add to a position, one number an axis; empty where a position is one number, the slot's."""


@dataclass(frozen=True)
class PositionOffsets:
    """The offsets of the rows of a cache.

    Attributes:
        rows: `[B]`, of each row; empty where no row has any.
    """

    rows: tuple[Axes, ...] = ()
    _uploaded: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @classmethod
    def collected(cls, places: Sequence[tuple[PositionOffsets, int]]) -> PositionOffsets:
        """Those of rows that others have: of each the offsets it is among, and its number there."""
        rows = tuple(offsets.rows[row] if offsets else () for offsets, row in places)
        return cls(rows) if any(rows) else cls()

    def selected(self, rows: Sequence[int]) -> PositionOffsets:
        """Those of these rows, in this order."""
        return self.collected([(self, row) for row in rows])

    @property
    def axes(self) -> int:
        """Numbers that make a position; 0 where it is the slot's."""
        return max(map(len, self.rows), default=0)

    def array(self) -> npt.NDArray[np.int64]:
        """`[axes, B, 1]`; zeros for rows of text alone."""
        rows = [row or (0,) * self.axes for row in self.rows]
        return np.array(rows, dtype=np.int64).T[..., None]

    def on(self, device: torch.device) -> torch.Tensor | None:
        """`[axes, B, 1]` int64, uploaded once; None where no row has any."""
        if self.rows and device not in self._uploaded:
            self._uploaded[device] = torch.from_numpy(self.array().copy()).to(device)
        return self._uploaded.get(device)


_JOINED_LAYERS = 8
"""Layers whose buffers are made one; more would take fewer operations, but more memory whenever the cache grows."""


class TreeCache(Cache):
    """KV cache of B rows for any decoder-only transformers model; layers are added as the model updates them.

    Attributes:
        offsets: of the positions that follow what is cached.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self.layers: list[Any]
        self._groups: list[JoinedLayers] = []
        self._grouped_layers = 0
        self._tree_pass: Ancestry | None = None
        self._state_tokens: int | None = None  # what the states of the only row hold, if that is known
        self.offsets = PositionOffsets()

    @staticmethod
    def buffer_rows(rows: int) -> int:
        """See `lade.model.kv_cache.BufferSizes`: as many as there are."""
        return rows

    @staticmethod
    def buffer_slots(tokens: int, tree: int = 0) -> int:
        """See `lade.model.kv_cache.BufferSizes`: as many as there are tokens."""
        return tokens + tree

    @staticmethod
    def spare_tokens(tokens: int) -> int:
        """See `lade.model.kv_cache.BufferSizes`: half as many again."""
        return max(SPARE_TOKENS, tokens // 2)

    @classmethod
    def of_length(cls, tokens: int) -> TreeCache:
        """A cache that reports `tokens` and holds none, to find out what a model would do with it."""
        cache, layer = cls(), TreeLayer()
        layer.lengths = [tokens]
        cache.layers.append(layer)
        return cache

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row; `[0]` before the first pass."""
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
        """Layers with states."""
        return [layer for layer in self.layers if isinstance(layer, StatefulLayer)]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """See transformers' own.

        Raises:
            UnsupportedArgumentError: there are no layers with states: plain `model.generate` was given an empty cache.
        """
        if layer_idx >= len(self.layers) or not isinstance(self.layers[layer_idx], StatefulLayer):
            raise UnsupportedArgumentError(
                "an empty lade.TreeCache has no layers for the states of this model",
                "begin it with lade.generate, which decodes plainly for lookahead=None, or give model.generate a "
                "DynamicCache(config=model.config)",
            )
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See transformers' own; None where there is no such layer, which `update_conv_state` refuses."""
        return super().get_conv_state(layer_idx, state_idx) if layer_idx < len(self.layers) else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See transformers' own; None likewise."""
        return super().get_recurrent_state(layer_idx, state_idx) if layer_idx < len(self.layers) else None

    def __getstate__(self) -> dict[str, Any]:
        """What copies and saved caches are made of; they join their layers' buffers anew, which are then others."""
        return {**vars(self), "_groups": [], "_grouped_layers": 0}

    def begin(self, tree_pass: Ancestry | None = None) -> None:
        """Begin a pass that recurrent layers take part in; `keep` or `settle` ends it.

        Args:
            tree_pass: its trees; None for a plain pass, which changes the states as it goes.
        """
        self._tree_pass = tree_pass
        for layer in self.recurrent:
            layer.begin(tree_pass)
        if tree_pass is None:
            self._state_tokens = None

    def count(self, rows: int, tokens: int) -> None:
        """After a pass: each of the rows was fed `tokens` more, which only attention notices by itself."""
        for layer in self.layers:
            if type(layer) is TokenCounter:  # `isinstance` of an abstract class takes 1 us a layer
                layer.count(rows, tokens)

    def settle(self) -> None:
        """End a plain pass: the states hold all that was fed."""
        self._leave_trees()
        lengths = self.lengths
        self._state_tokens = lengths[0] if len(lengths) == 1 else None

    def _leave_trees(self) -> None:
        """End a pass over trees, if one has begun; where it was interrupted, the states are those before it."""
        if self._tree_pass is not None:
            self._tree_pass = None
            for layer in self.recurrent:
                layer.begin(None)

    def reset(self) -> None:
        """Forget everything: the cache is empty, and falsy, which transformers tests before it drops a cache."""
        self.layers.clear()
        self._groups.clear()
        self._tree_pass = self._state_tokens = None
        self.offsets = PositionOffsets()

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Of the tokens that came last, keep those of the path and drop the others.

        Args:
            paths: for each row the indices to keep, ascending, counted from the first of the `fed` tokens, or of those
                that the row held before them. They begin with the root; only without recurrent layers, or where the
                states no longer matter, may they be empty.
            fed: tokens that the last forward pass appended to every row.
            held: for each row, how many tokens before the `fed` ones its path counts, too; none unless given.
        """
        if not self.layers:
            return
        if len(paths) == fed == 1 and paths[0] and not held:  # a root alone stays where it is
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
            make_all(moves, [whole for group in self._grouped() for whole in group.joined()])
        for layer in self.attending:
            layer.lengths = lengths
        if self._tree_pass is not None and all(paths):  # a plain pass has fed the root alone, which is always kept
            last = torch.tensor([path[-1] for path in paths])
            for recurrent in self.recurrent:
                recurrent.keep(last)
        self.settle()

    def trim(self, lengths: Sequence[int]) -> None:
        """After a plain pass over rows that were padded behind: row b keeps its first `lengths[b]` tokens.

        There may be no layers with states, which would have taken in the padding.
        """
        for layer in self.attending:
            layer.lengths = list(lengths)
        self.settle()

    def repeat(self, tokens: int) -> None:
        """Append so many tokens to every row: copies of the keys and values that it holds, as many times as it takes.

        For timing passes over a text that is longer than what was fed; their content does not change what they cost.
        """
        for layer in self.attending:
            layer.repeat(tokens)

    def give_back(self, tokens: int) -> None:
        """End a generation: keep the first tokens of the only row, whatever layers an interrupted pass has updated.

        Args:
            tokens: number of tokens to keep; every layer holds them. Where states hold others, nothing is kept.
        """
        if not tokens or (self._state_tokens != tokens and self.recurrent):
            self.reset()
        self._leave_trees()
        self.offsets = PositionOffsets()
        for layer in self.attending:
            layer.lengths = [tokens]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; states cannot go back, so where there are any, all is forgotten.

        Args:
            tokens_to_remove: minus their number, as transformers wants it.
        """
        if self.recurrent:
            if tokens_to_remove:
                self.reset()
            return
        for layer in self.attending:
            layer.crop(tokens_to_remove)

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Become a cache of rows that others hold; those are emptied on the way, layer by layer.

        Args:
            parts: caches of the same model, none of them empty.
            places: `[B]`, for each row the number of its part, and its number there; a row may occur twice.
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
        """Bytes of one token of one row, in all layers together; 0 before the first pass."""
        return sum(self.device_bytes.values())

    @property
    def device_bytes(self) -> dict[torch.device, int]:
        """Those bytes by the device that has them: a model's layers may lie on several."""
        found: dict[torch.device, int] = {}
        for buffer in (buffer for layer in self.attending for buffer in layer.buffers.values()):
            size = buffer.shape[1] * buffer.shape[3] * buffer.element_size()
            found[buffer.device] = found.get(buffer.device, 0) + size
        return found

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's states, in all recurrent layers together; 0 before the first pass."""
        return sum(layer.state_bytes for layer in self.recurrent)

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and tokens of each, that there are buffers for; none before the first pass."""
        for layer in self.layers:
            if isinstance(layer, TreeLayer):
                return (0, 0) if layer.keys is None else (layer.keys.shape[0], layer.keys.shape[2])
        return (0, 0)

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers to this many rows and slots, at least to what is cached, which is copied."""
        for layer in self.layers:
            if isinstance(layer, TreeLayer | StatefulLayer):
                layer.reserve(rows, slots)

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model, which is then empty."""
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
        """See `lade.model.kv_cache.RowCache`."""
        if self.recurrent:
            raise ValueError("states cannot go back to the first tokens of a text")
        copy = TreeCache()
        copy.layers += [layer.copy_row(row, tokens) for layer in self.attending]
        copy.offsets = self.offsets.selected([row])
        return copy

    def dynamic_pair(self) -> Any:
        """Return self- and cross-attention as plain decoding behind an encoder leaves them; None without an encoder."""
        return None

    def adopt(self, other: TreeCache) -> None:
        """Become another cache of rows of text, which is not used any more."""
        self.layers, other.layers = other.layers, []
        self._groups.clear()

    def leave(self, row: int) -> None:
        """Evict a row; the last one takes its place and its number."""
        last = len(self.lengths) - 1
        if row < last:
            for group in self._grouped():
                group.put(last, row, max(self.lengths))  # also what lies after it: no other row's states may stay
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
    """How large a kind of cache makes its buffers for what is to lie in them."""

    def buffer_rows(self, rows: int) -> int:
        """Rows of buffers that hold `rows`."""
        ...

    def buffer_slots(self, tokens: int, tree: int = 0) -> int:
        """Slots of a row that has `tokens`, and after them those of a tree."""
        ...

    def spare_tokens(self, tokens: int) -> int:
        """Tokens to reserve beyond `tokens` that there are, so that buffers are seldom replaced."""
        ...


class RowCache(KVCache, BufferSizes, Protocol):
    """Keys and values of rows that join one by one, each prefilled by itself."""

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        ...

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of this size, at least for what there is; see `BufferSizes` for sizes that suit."""
        ...

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model; that one is empty then."""
        ...

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """A cache of its own with the first tokens of a row of text; there may be no layers with states."""
        ...

    def give_back(self, tokens: int) -> None:
        """End a generation: a user's cache holds the first `tokens` of the only row, other buffers are released."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...
