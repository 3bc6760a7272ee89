"""One layer of a `TreeCache`, and layers whose buffers are joined to one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from transformers.cache_utils import CacheLayerMixin

SPARE_TOKENS = 256
"""Tokens that a buffer has room for beyond those needed, at least."""


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

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> TreeLayer:
        """A layer with copies of these, `[B, H, T, D]`, and no room for more."""
        layer = cls()
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values = (each.clone(memory_format=torch.contiguous_format) for each in (keys, values))
        layer.lengths, layer.is_initialized = [keys.shape[2]] * keys.shape[0], True
        return layer

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


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    """A buffer `[B, H, capacity, D]` with capacity for `needed` tokens, and half as many again: copies stay rare."""
    rows, _, tokens, _ = buffer.shape
    return _resized(buffer, (rows, tokens), rows, needed + max(SPARE_TOKENS, needed // 2))


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
    buffer = first.new_zeros(len(rows), first.shape[1], longest + max(SPARE_TOKENS, longest // 2), first.shape[3])
    for number, ((part, row), length) in enumerate(zip(rows, lengths, strict=True)):
        assert part is not None
        buffer[number, :, :length] = part[row, :, :length]
    return buffer
