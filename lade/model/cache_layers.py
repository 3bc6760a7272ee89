"""Layers of a `TreeCache`: growing buffers, buffers joined across layers, and moves of accepted tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from lade.decoding.tree import TokenTree
from lade.model.inputs import upload

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size: numpy has no bfloat16, and a move needs only the bytes."""


class JoinedBuffer(NamedTuple):
    """Buffers of several layers in one tensor.

    Attributes:
        tensor: `[N, rows, H, capacity, D]`.
        array: numpy view of the same memory if it is on the host, else None. On the host an operation of torch takes
            several times as long as one of numpy.
    """

    tensor: torch.Tensor
    array: npt.NDArray[Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> JoinedBuffer:
        """Return the tensor together with its numpy view."""
        if not tensor.is_cpu:
            return cls(tensor, None)
        return cls(tensor, tensor.detach().view(_BITS[tensor.element_size()]).numpy())


class Move(NamedTuple):
    """Tokens of one row that are to be made contiguous, the same in all layers.

    They are in the slots `sources`, `[M]`, ascending; the first one moves to `target`, never after its present slot.
    """

    row: int
    sources: Sequence[int]
    target: int

    @property
    def targets(self) -> range:
        """Slots to which the tokens move, `[M]`."""
        return range(self.target, self.target + len(self.sources))

    @property
    def is_contiguous(self) -> bool:
        """True if the tokens are in adjacent slots."""
        return self.sources[-1] - self.sources[0] == len(self.sources) - 1

    def apply_on_host(self, array: npt.NDArray[Any]) -> None:
        """Apply the move to `[N, rows, H, capacity, D]`; numpy handles overlapping slices correctly."""
        own, count, first = array[:, self.row], len(self.sources), self.sources[0]
        moved = own[:, :, first : first + count] if self.is_contiguous else own[:, :, self.sources]
        own[:, :, self.target : self.target + count] = moved

    def apply_on_device(self, whole: torch.Tensor, sources: torch.Tensor | None) -> None:
        """Apply the move to `[N, rows, H, capacity, D]`; `sources` holds the slots, None if a slice does."""
        row, count = whole.select(1, self.row), len(self.sources)
        moved = row.narrow(2, self.sources[0], count) if sources is None else row.index_select(2, sources)
        row.narrow(2, self.target, count).copy_(moved)


def apply_moves(moves: Sequence[Move], wholes: Sequence[JoinedBuffer]) -> None:
    """Apply moves, at most one per row; slots are uploaded once per device, and only if needed."""
    move, lone = moves[0], len(moves) == 1
    needs_no_slots = lone and move.is_contiguous and move.sources[0] > move.targets[-1]
    uploaded: dict[torch.device, list[torch.Tensor]] = {}
    for whole, array in wholes:
        if array is not None:
            for each in moves:
                each.apply_on_host(array)
        elif needs_no_slots:
            move.apply_on_device(whole, None)
        else:
            if whole.device not in uploaded:
                columns = (
                    [slot for move in moves for slot in move.sources],
                    [move.row for move in moves for _ in move.sources],
                    [slot for move in moves for slot in move.targets],
                )
                uploaded[whole.device] = upload(list(map(np.array, columns)), whole.device)
            sources, rows, targets = uploaded[whole.device]
            if lone:  # by slices, which is faster
                move.apply_on_device(whole, sources)
            else:
                whole[:, rows, :, targets] = whole[:, rows, :, sources]


_NAMES = "keys", "values", "indexer_keys"
_buffers_of = attrgetter(*_NAMES)
SPARE_TOKENS = 256
"""Minimum number of tokens that a buffer can hold beyond those needed."""


class Ancestry(Protocol):
    """The ancestor relation in the trees of one pass, S nodes per row.

    `state` is the text's in the layer whose convolution ran last, for kernels that mixers do not pass it to.
    """

    size: int
    state: torch.Tensor | None

    def closure(self, device: torch.device) -> torch.Tensor:
        """Return `[B, S, S]` bool, true where the row's node is the column's node or descends from it."""

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """Return the columns of the last inputs of each node: its own, its ancestors' and those of the text before.

        A convolution sees `width` inputs, at least 1; `cached` inputs of the text precede those of the nodes.

        Returns:
            `[B, S, width]` int64, columns of the `cached + S` inputs, the node's own one last.
        """


class Recurrence(Protocol):
    """Handler of one model's recurrent layers in passes over token trees."""

    @property
    def forgets(self) -> bool:
        """True if a pass over several tokens begins with an empty state."""

    def layers(self) -> list[Any]:
        """Return the empty layers of a `TreeCache` for the model."""

    def ancestry(self, trees: Sequence[TokenTree]) -> Ancestry:
        """Return the ancestor relation of one pass over trees, one per row."""

    def patched_for(self, ancestry: Ancestry) -> AbstractContextManager[None]:
        """Patch the model's recurrent functions to follow the paths of the trees, while the context lasts."""


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: buffers `[rows, H, capacity, D]`, of which row b uses the first `lengths[b]` slots.

    The first B rows are in use. Between a pass and `TreeCache.keep` the tokens fed are after the longest row, in all
    rows.

    Attributes:
        indexer_keys: a third buffer, `[rows, 1, capacity, D]`, if an indexer selects the visible keys.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.indexer_keys: torch.Tensor | None = None
        self.lengths: list[int] = []

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The allocated buffers, by attribute name."""
        return {name: buffer for name, buffer in zip(_NAMES, _buffers_of(self), strict=True) if buffer is not None}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers like `key_states` and `value_states` (`[B, H, T, D]`), with room to grow."""
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, _, needed, _ = key_states.shape
        slots = needed + spare_capacity(needed)
        self.keys, self.values = (_resized(states, (0, 0), rows, slots) for states in (key_states, value_states))
        self.lengths, self.is_initialized = [0] * rows, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append T tokens to every row; return keys and values `[B, H, max(lengths), D]`, views of the buffers.

        It makes as few operations as possible: a small model's step consists of hundreds, and these recur in every
        layer.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows, fed, first = len(self.lengths), key_states.shape[2], max(self.lengths)
        visible = first + fed
        if visible > self.keys.shape[2]:
            TreeLayer.reserve(self, self.keys.shape[0], visible + spare_capacity(visible))
        self.lengths = [length + fed for length in self.lengths]  # `fed` is symbolic where a pass is compiled
        keys, values = self.keys, self.values
        if keys.shape[0] != rows:
            keys, values = keys.narrow(0, 0, rows), values.narrow(0, 0, rows)
        keys.narrow(2, first, fed).copy_(key_states)
        values.narrow(2, first, fed).copy_(value_states)
        return keys.narrow(2, 0, visible), values.narrow(2, 0, visible)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Add the indexer's keys `[B, T, D]` of the tokens just appended; return all, a `[B, max(lengths), D]` view."""
        assert self.keys is not None
        rows, visible = len(self.lengths), max(self.lengths)
        first, states = visible - indexer_key_states.shape[1], indexer_key_states[:, None]
        buffer = self.indexer_keys
        if buffer is None or buffer.shape[2] < visible:
            kept, used = (states, (0, 0)) if buffer is None else (buffer, (rows, first))
            buffer = self.indexer_keys = _resized(kept, used, self.keys.shape[0], self.keys.shape[2])
        buffer[:rows, :, first:visible] = states
        return buffer[:rows, 0, :visible]

    def repeat(self, tokens: int) -> None:
        """Append copies of the cached tokens; see `TreeCache.repeat`."""
        held = self.get_seq_length()
        used = [buffer[:, :, :held] for buffer in self.buffers.values()]
        keys, values, *indexer = (states.repeat(1, 1, -(-tokens // held), 1)[:, :, :tokens] for states in used)
        self.update(keys, values)
        for states in indexer:
            self.update_indexer(states[:, 0])

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers to exactly this size; see `TreeCache.reserve`."""
        used = len(self.lengths), self.get_seq_length()
        for name, buffer in self.buffers.items():
            setattr(self, name, _resized(buffer, used, rows, slots))

    def take(self, part: TreeLayer) -> None:
        """Append the only row of another layer; see `TreeCache.take`."""
        assert self.keys is not None
        rows, length = len(self.lengths), part.lengths[0]
        if rows == self.keys.shape[0] or length > self.keys.shape[2]:
            self.reserve(max(1, 2 * rows), max(length, self.keys.shape[2]))
        for buffer, taken in zip(self.buffers.values(), part.buffers.values(), strict=True):
            buffer[rows, :, :length] = taken[0, :, :length]
            buffer[rows, :, length:] = 0  # a NaN left by another row would survive a weight of zero
        self.lengths = [*self.lengths, length]

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, *indexer_keys: torch.Tensor) -> TreeLayer:
        """Return a layer with copies of keys and values, `[B, H, T, D]`, without spare capacity."""
        layer = cls()
        layer.dtype, layer.device = keys.dtype, keys.device
        for name, states in zip(_NAMES, (keys, values, *indexer_keys), strict=False):
            setattr(layer, name, copied(states))
        layer.lengths, layer.is_initialized = [keys.shape[2]] * keys.shape[0], True
        return layer

    def copy_row(self, row: int, tokens: int) -> TreeLayer:
        """Return a layer with copies of the first tokens of one row; see `TreeCache.copy_row`."""
        return TreeLayer.of(*(buffer[row : row + 1, :, :tokens] for buffer in self.buffers.values()))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle: buffers trimmed to the part in use."""
        rows, tokens = len(self.lengths), self.get_seq_length()
        used = {name: copied(buffer[:rows, :, :tokens]) for name, buffer in self.buffers.items()}
        return {**vars(self), **used}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(writable(state))

    def blank(self) -> TreeLayer:
        """Return an empty layer of the same kind."""
        return type(self)()

    def join(self, parts: Sequence[TreeLayer], places: Sequence[tuple[int, int]]) -> None:
        """Take over rows of other layers; see `TreeCache.join`."""
        first = parts[0]
        self.dtype, self.device = first.dtype, first.device
        self.lengths = [parts[part].lengths[row] for part, row in places]
        for name in first.buffers:
            setattr(self, name, _joined([part.buffers[name] for part in parts], places, self.lengths))
        self.is_initialized = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row; `tokens_to_remove` <= 0, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} is not valid: give minus the number of tokens")
        self.lengths = [length + tokens_to_remove for length in self.lengths]

    def reset(self) -> None:
        """Drop all tokens and buffers."""
        self.keys = self.values = self.indexer_keys = None
        self.lengths, self.is_initialized = [], False

    def get_seq_length(self) -> int:
        """Return the number of cached tokens of the longest row."""
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return width and offset of the mask for `query_length` more tokens."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows as needed."""
        return -1

    @property
    def batch_size(self) -> int:
        """B; transformers reads it when a user passes the cache again."""
        return len(self.lengths)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        for name, buffer in self.buffers.items():
            setattr(self, name, selected(buffer, indices))
        if self.lengths:
            self.lengths = [self.lengths[i] for i in indices.tolist()]


class TokenCounter(TreeLayer):
    """Counts the tokens of rows whose layers are all recurrent, as a layer with keys and values of width zero."""

    def count(self, rows: int, tokens: int) -> None:
        """Add `tokens` to the count of each row."""
        nothing = torch.empty(rows, 1, tokens, 0)
        self.update(nothing, nothing)


class StatefulLayer:
    """A layer with recurrent states that supports passes over trees; implemented by the recurrent backend."""

    state_bytes: Any
    """Bytes of the states of one row."""

    def begin(self, ancestry: Ancestry | None) -> None:
        """Begin a pass: over trees, or a plain one, which updates the states in place."""

    def keep(self, last: torch.Tensor) -> None:
        """After a pass over trees, advance each row's states along the path to node `last[b]`; `[B]` int64."""

    def blank(self) -> Any:
        """Return an empty layer of the same kind."""

    def join(self, parts: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        """Take over rows of other layers; see `TreeCache.join`."""

    def reserve(self, rows: int, slots: int) -> None:
        """Allocate memory for this many rows, at least for those in use; see `TreeCache.reserve`."""

    def take(self, part: Any) -> None:
        """Append the only row of another layer; see `TreeCache.take`."""

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its place."""


class JoinedLayers:
    """Layers whose keys and values are views of one tensor, so that a single operation moves tokens in all of them.

    Layers replace their buffers when these grow or when rows are selected; then they are joined again. Buffers that
    differ in shape, dtype or device stay separate.
    """

    def __init__(self, layers: Sequence[TreeLayer]) -> None:
        self.layers = layers
        self._views: list[torch.Tensor | None] = []
        self._joined_buffers: list[JoinedBuffer] = []

    def joined(self) -> list[JoinedBuffer]:
        """Return the joined buffers, joining them first if a layer has replaced its own."""
        if not self._views or not all(map(is_, self._buffers(), self._views)):
            self._join([buffer for buffer in self._buffers() if buffer is not None])
            self._views = list(self._buffers())
        return self._joined_buffers

    def _buffers(self) -> Iterator[torch.Tensor | None]:
        """Yield the buffers of all layers, None for missing ones, without a Python-level call per layer."""
        return chain.from_iterable(map(_buffers_of, self.layers))

    def _join(self, buffers: list[torch.Tensor]) -> None:
        """Move the buffers into one tensor, if shape, dtype and device agree."""
        if len({(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers}) != 1:
            self._joined_buffers = [JoinedBuffer.of(buffer[None]) for buffer in buffers]
            return
        whole = empty(buffers[0], (len(buffers), *buffers[0].shape))
        self._joined_buffers = [JoinedBuffer.of(torch.stack(buffers, out=whole))]
        places = ((layer, name) for layer in self.layers for name in layer.buffers)
        for (layer, name), view in zip(places, self._joined_buffers[0].tensor.unbind(), strict=True):
            setattr(layer, name, view)


def spare_capacity(tokens: int) -> int:
    """Return the spare capacity beyond `tokens`: half as much again, so that copies stay rare."""
    return max(SPARE_TOKENS, tokens // 2)


def _resized(buffer: torch.Tensor, used: tuple[int, int], rows: int, tokens: int) -> torch.Tensor:
    """Return a buffer of this size, zeroed but for the used rows and tokens of the old one."""
    most_rows, longest = used
    resized = empty(buffer, (max(rows, most_rows), buffer.shape[1], max(tokens, longest), buffer.shape[3])).zero_()
    resized[:most_rows, :, :longest] = buffer[:most_rows, :, :longest]
    return resized


def copied(states: torch.Tensor) -> torch.Tensor:
    """Return a buffer with a copy of these states, without spare capacity."""
    return empty(states, states.shape).copy_(states)


def writable(thing: Any) -> Any:
    """Return the value with copies of those tensors in it (also in dicts) that are writable in inference mode alone."""
    if isinstance(thing, dict):
        return {name: writable(value) for name, value in thing.items()}
    return copied(thing) if isinstance(thing, torch.Tensor) and thing.is_inference() else thing


def selected(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a buffer with these rows `[B]` int64 of another one, in this order."""
    return copied(states[rows.to(states.device)])


def empty(states: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a buffer for such states; an ordinary tensor even in inference mode, as it is written to after a pass."""
    with torch.inference_mode(False):
        return states.new_empty(shape)


def _joined(parts: Sequence[torch.Tensor], places: Sequence[tuple[int, int]], lengths: Sequence[int]) -> torch.Tensor:
    """Return a buffer of these rows, with room to grow."""
    longest = max(lengths)
    buffer = _resized(parts[0], (0, 0), len(places), longest + spare_capacity(longest))
    for number, ((part, row), length) in enumerate(zip(places, lengths, strict=True)):
        buffer[number, :, :length] = parts[part][row, :, :length]
    return buffer
