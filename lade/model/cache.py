"""A KV cache whose rows have lengths of their own, and which can keep a path of a token tree.

To transformers it is an ordinary dynamic cache: what a forward pass feeds is appended, in the same slots of every row,
behind the longest one. After a pass over a tree, `keep` moves the accepted nodes to the end of what their row has and
forgets the others:

    row 0   [ cached ........ | root a b c d ]   keep [0, 2, 4]  ->  [ cached ........ | root b d ]
    row 1   [ cached .. |     | root a b c d ]   keep [0]        ->  [ cached .. | root ]

So a pass writes each layer's keys at once, however long the rows are, and what is moved is moved in all layers at once.

All layers keep all positions, those of sliding windows too: their masks leave out what lies outside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_ROOM_TOKENS = 256
_JOINED_LAYERS = 8
"""Layers whose buffers are made one; more would take fewer operations, but more memory whenever the cache grows."""


@dataclass(frozen=True)
class Move:
    """How what is left of a path gets to where it belongs; the same for all layers.

    Attributes:
        row: of the batch.
        slots: where it lies, int64.
        start: of the slots where it belongs.
    """

    row: int
    slots: torch.Tensor
    start: int


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: buffers `[B, H, capacity, D]`, of which row b uses the first `lengths[b]`.

    Between a pass and `TreeCache.keep` the tokens fed lie behind the longest row, in all rows.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.lengths: list[int] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers like `key_states` and `value_states` (`[B, H, T, D]`), with room to grow."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.lengths = [0] * key_states.shape[0]
        self.keys = _grown(key_states[..., :0, :], key_states.shape[2])
        self.values = _grown(value_states[..., :0, :], value_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append T tokens to every row; returns keys and values `[B, H, max(lengths), D]`, views of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        fed, first = key_states.shape[2], max(self.lengths)
        visible = first + fed
        if visible > self.keys.shape[2]:
            self.keys, self.values = _grown(self.keys, visible), _grown(self.values, visible)
        self.keys[:, :, first:visible] = key_states
        self.values[:, :, first:visible] = value_states
        self.lengths = [length + fed for length in self.lengths]
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def join(self, parts: Sequence[TreeLayer], places: Sequence[tuple[int, int]]) -> None:
        """Take over rows of other layers; see `TreeCache.join`."""
        first = parts[0]
        assert first.keys is not None and first.values is not None
        self.dtype, self.device = first.dtype, first.device
        self.lengths = [parts[part].lengths[row] for part, row in places]
        self.keys = _joined([part.keys for part in parts], places, self.lengths)
        self.values = _joined([part.values for part in parts], places, self.lengths)
        self.is_initialized = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; `tokens_to_remove` <= 0, as transformers wants it."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} is not valid: give minus the number of tokens")
        self.lengths = [length + tokens_to_remove for length in self.lengths]

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.lengths, self.is_initialized = [], False

    def get_seq_length(self) -> int:
        """Cached tokens of the longest row."""
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask for `query_length` more tokens."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """-1: it grows as needed."""
        return -1

    @property
    def batch_size(self) -> int:
        """B; transformers asks when a cache is handed in again."""
        return len(self.lengths)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        if self.keys is None or self.values is None:
            return
        indices = indices.to(self.keys.device)
        self.keys, self.values = self.keys[indices], self.values[indices]
        self.lengths = [self.lengths[i] for i in indices.tolist()]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))


class JoinedLayers:
    """Layers whose keys and values are made views of one tensor, so that one operation moves what lies in all of them.

    Layers replace their buffers when these grow or when rows are selected; then they are joined anew. Buffers that
    differ in shape, type or device stay by themselves.
    """

    def __init__(self, layers: Sequence[TreeLayer]) -> None:
        self.layers = layers
        self._views: list[torch.Tensor] = []
        self._wholes: list[torch.Tensor] = []

    def make(self, moves: Sequence[Move]) -> None:
        """Make these moves in all layers."""
        for whole in self._joined():  # [N, B, H, capacity, D]
            for move in moves:
                states = whole[:, move.row].index_select(2, move.slots.to(whole.device))
                whole[:, move.row, :, move.start : move.start + len(move.slots)] = states

    def _joined(self) -> list[torch.Tensor]:
        buffers = [buffer for layer in self.layers for buffer in (layer.keys, layer.values) if buffer is not None]
        if len(buffers) != len(self._views) or not all(map(is_, buffers, self._views)):
            if len({(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers}) == 1:
                self._wholes = [torch.stack(buffers)]
                self._views = list(self._wholes[0].unbind())
                for layer, keys, values in zip(self.layers, self._views[::2], self._views[1::2], strict=True):
                    layer.keys, layer.values = keys, values
            else:
                self._wholes, self._views = [buffer[None] for buffer in buffers], buffers
        return self._wholes


class TreeCache(Cache):
    """KV cache of B rows for any decoder-only transformers model; layers appear as the model asks for them."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self.layers: list[TreeLayer]  # type: ignore[assignment]
        self._groups: list[JoinedLayers] = []

    @classmethod
    def of_length(cls, tokens: int) -> TreeCache:
        """A cache that says it holds so many tokens, and holds none: for asking what a model would do with it."""
        cache, layer = cls(), TreeLayer()
        layer.lengths = [tokens]
        cache.layers.append(layer)
        return cache

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row; `[0]` before the first pass."""
        return self.layers[0].lengths if self.layers and self.layers[0].lengths else [0]

    def reset(self) -> None:
        """Forget everything: the cache is as new, and as falsy, which transformers asks before it drops a cache."""
        self.layers.clear()
        self._groups.clear()

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """Of the tokens that came last, keep those of the path and drop the others.

        Args:
            paths: for each row the indices to keep, ascending, counted from the first of the `fed` tokens, or of those
                that the row held before them.
            fed: tokens that the last forward pass appended to every row.
            held: for each row, how many tokens before the `fed` ones its path counts, too; none unless given.
        """
        if not self.layers:
            return
        moves: list[Move] = []
        lengths: list[int] = []
        first = max(self.lengths) - fed  # slot of the first token fed
        for row, (path, length, own) in enumerate(zip(paths, self.lengths, held or [0] * len(paths), strict=True)):
            start, unused = length - fed - own, first + fed - length
            slots = [node if node < own else node + unused for node in path]  # counted from `start`
            lengths.append(start + len(path))
            in_place = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            if in_place < len(slots):
                moves.append(Move(row, torch.tensor(slots[in_place:]) + start, start + in_place))
        if moves:
            for group in self._grouped():
                group.make(moves)
        for layer in self.layers:
            layer.lengths = lengths

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Become a cache of rows that others hold; those are emptied meanwhile, layer by layer.

        Args:
            parts: caches of the same model, none of them empty.
            places: `[B]`, for each row the number of its part, and its number there; a row may be wanted twice.
        """
        self.reset()
        for layers in zip(*(part.layers for part in parts), strict=True):
            self.layers.append(TreeLayer())
            self.layers[-1].join(layers, places)
            for layer in layers:
                layer.reset()

    def _grouped(self) -> list[JoinedLayers]:
        if sum(len(group.layers) for group in self._groups) != len(self.layers):
            firsts = range(0, len(self.layers), _JOINED_LAYERS)
            self._groups = [JoinedLayers(self.layers[first : first + _JOINED_LAYERS]) for first in firsts]
        return self._groups


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    """A buffer `[B, H, capacity, D]` with capacity for `needed` tokens, and half as many again: copies stay rare."""
    batch, heads, used, dim = buffer.shape
    grown = buffer.new_zeros(batch, heads, needed + max(_ROOM_TOKENS, needed // 2), dim)
    grown[:, :, :used] = buffer
    return grown


def _joined(
    parts: Sequence[torch.Tensor | None], places: Sequence[tuple[int, int]], lengths: Sequence[int]
) -> torch.Tensor:
    """A buffer of these rows, with room to grow."""
    rows = [(parts[part], row) for part, row in places]
    first, longest = parts[0], max(lengths)
    assert first is not None
    buffer = first.new_zeros(len(rows), first.shape[1], longest + max(_ROOM_TOKENS, longest // 2), first.shape[3])
    for number, ((part, row), length) in enumerate(zip(rows, lengths, strict=True)):
        assert part is not None
        buffer[number, :, :length] = part[row, :, :length]
    return buffer
