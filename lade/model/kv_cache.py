"""A KV cache whose rows have lengths of their own, and which can keep a path of a token tree.

To transformers it is an ordinary dynamic cache: what a forward pass feeds is appended, in the same slots of every row,
after the longest one. After a pass over a tree, `keep` moves the accepted nodes to the end of what their row has and
forgets the others:

    row 0   [ cached ........ | root a b c d ]   keep [0, 2, 4]  ->  [ cached ........ | root b d ]
    row 1   [ cached .. |     | root a b c d ]   keep [0]        ->  [ cached .. | root ]

So a pass writes each layer's keys at once, however long the rows are, and what is moved is moved in all layers at once.
Rows come and go without the others being copied: there may be room for more rows than there are, and where one leaves,
the last one takes its place.

All layers keep all positions, those of sliding windows too: their masks leave out what lies outside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lade.model.cache_moves import Moves

_ROOM_TOKENS = 256
_JOINED_LAYERS = 8
"""Layers whose buffers are made one; more would take fewer operations, but more memory whenever the cache grows."""


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: buffers `[rows, H, capacity, D]`, of which row b uses the first `lengths[b]`.

    There are B rows in use, the first ones. Between a pass and `TreeCache.keep` the tokens fed lie after the longest
    row, in all rows.
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
        rows, fed, first = len(self.lengths), key_states.shape[2], max(self.lengths)
        visible = first + fed
        if visible > self.keys.shape[2]:
            self.keys, self.values = _grown(self.keys, visible), _grown(self.values, visible)
        self.keys[:rows, :, first:visible] = key_states
        self.values[:rows, :, first:visible] = value_states
        self.lengths = [length + fed for length in self.lengths]
        return self.keys[:rows, :, :visible], self.values[:rows, :, :visible]

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of just this size; see `TreeCache.reserve`."""
        assert self.keys is not None and self.values is not None
        used = len(self.lengths), self.get_seq_length()
        self.keys, self.values = (_resized(buffer, used, rows, slots) for buffer in (self.keys, self.values))

    def take(self, part: TreeLayer) -> None:
        """Append the only row of another layer; see `TreeCache.take`."""
        assert self.keys is not None and self.values is not None and part.keys is not None and part.values is not None
        rows, length = len(self.lengths), part.lengths[0]
        if rows == self.keys.shape[0] or length > self.keys.shape[2]:
            self.reserve(max(1, 2 * rows), max(length, self.keys.shape[2]))
        self.keys[rows, :, :length] = part.keys[0, :, :length]
        self.values[rows, :, :length] = part.values[0, :, :length]
        self.keys[rows, :, length:] = self.values[rows, :, length:] = 0  # no weight makes zero of another row's NaN
        self.lengths = [*self.lengths, length]

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
        """B; transformers reads it when a user passes the cache again."""
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

    Layers replace their buffers when these grow or when rows are selected; then they are joined again. Buffers that
    differ in shape, type or device stay by themselves.
    """

    def __init__(self, layers: Sequence[TreeLayer]) -> None:
        self.layers = layers
        self._views: list[torch.Tensor] = []
        self._wholes: list[torch.Tensor] = []

    def put(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one row to another, in all layers."""
        for whole in self.joined():
            whole[:, target, :, :length] = whole[:, source, :, :length]

    def joined(self) -> list[torch.Tensor]:
        """What the buffers of these layers are views of, `[N, rows, H, capacity, D]` each."""
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
    """KV cache of B rows for any decoder-only transformers model; layers are added as the model updates them."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self.layers: list[TreeLayer]  # type: ignore[assignment]
        self._groups: list[JoinedLayers] = []

    @staticmethod
    def buffer_rows(rows: int) -> int:
        """See `lade.model.row_cache.BufferSizes`: as many as there are."""
        return rows

    @staticmethod
    def buffer_slots(tokens: int, tree: int = 0) -> int:
        """See `lade.model.row_cache.BufferSizes`: as many as there are tokens."""
        return tokens + tree

    @staticmethod
    def spare_tokens(tokens: int) -> int:
        """See `lade.model.row_cache.BufferSizes`: half as many again."""
        return max(_ROOM_TOKENS, tokens // 2)

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
        return self.layers[0].lengths if self.layers and self.layers[0].lengths else [0]

    def reset(self) -> None:
        """Forget everything: the cache is empty, and falsy, which transformers tests before it drops a cache."""
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
        moves = Moves()
        lengths: list[int] = []
        first = max(self.lengths) - fed  # slot of the first token fed
        for row, (path, length, own) in enumerate(zip(paths, self.lengths, held or [0] * len(paths), strict=True)):
            start, unused = length - fed - own, first + fed - length
            slots = [node if node < own else node + unused for node in path]  # counted from `start`
            lengths.append(start + len(path))
            in_place = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            if in_place < len(slots):
                moves.add(row, [start + slot for slot in slots[in_place:]], start + in_place)
        if moves.rows:
            moves.make([whole for group in self._grouped() for whole in group.joined()])
        for layer in self.layers:
            layer.lengths = lengths

    def give_back(self, tokens: int) -> None:
        """End a generation: keep the first tokens of the only row, whatever layers an interrupted pass has updated.

        Args:
            tokens: number of tokens to keep; every layer holds them.
        """
        if not tokens:
            self.reset()
        for layer in self.layers:
            layer.lengths = [tokens]

    def join(self, parts: Sequence[TreeCache], places: Sequence[tuple[int, int]]) -> None:
        """Become a cache of rows that others hold; those are emptied on the way, layer by layer.

        Args:
            parts: caches of the same model, none of them empty.
            places: `[B]`, for each row the number of its part, and its number there; a row may occur twice.
        """
        self.reset()
        for layers in zip(*(part.layers for part in parts), strict=True):
            self.layers.append(TreeLayer())
            self.layers[-1].join(layers, places)
            for layer in layers:
                layer.reset()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row, in all layers together; 0 before the first pass."""
        buffers = [buffer for layer in self.layers for buffer in (layer.keys, layer.values) if buffer is not None]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and tokens of each, that there are buffers for; none before the first pass."""
        keys = self.layers[0].keys if self.layers else None
        return (0, 0) if keys is None else (keys.shape[0], keys.shape[2])

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers to this many rows and slots, at least to what is cached, which is copied."""
        for layer in self.layers:
            layer.reserve(rows, slots)

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model, which is then empty."""
        if not self.layers:
            self.layers, part.layers = part.layers, []
            self._groups.clear()
            return
        for layer, other in zip(self.layers, part.layers, strict=True):
            layer.take(other)
        part.reset()

    def leave(self, row: int) -> None:
        """Evict a row; the last one takes its place and its number."""
        last = len(self.lengths) - 1
        if row < last:
            for group in self._grouped():
                group.put(last, row, max(self.lengths))  # with its zeros after it, in place of the old row's tokens
        lengths = list(self.lengths)
        lengths[row] = lengths[last]
        for layer in self.layers:
            layer.lengths = lengths[:last]

    def _grouped(self) -> list[JoinedLayers]:
        if sum(len(group.layers) for group in self._groups) != len(self.layers):
            firsts = range(0, len(self.layers), _JOINED_LAYERS)
            self._groups = [JoinedLayers(self.layers[first : first + _JOINED_LAYERS]) for first in firsts]
        return self._groups


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    """A buffer `[B, H, capacity, D]` with capacity for `needed` tokens, and half as many again: copies stay rare."""
    rows, _, tokens, _ = buffer.shape
    return _resized(buffer, (rows, tokens), rows, needed + max(_ROOM_TOKENS, needed // 2))


def _resized(buffer: torch.Tensor, used: tuple[int, int], rows: int, tokens: int) -> torch.Tensor:
    """A buffer of this size, with what is used of the old one: its first rows and tokens."""
    most_rows, longest = used
    resized = buffer.new_zeros(max(rows, most_rows), buffer.shape[1], max(tokens, longest), buffer.shape[3])
    resized[:most_rows, :, :longest] = buffer[:most_rows, :, :longest]
    return resized


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
