"""Layers of a `TreeCache`: growth, joined buffers, and moves of accepted tokens."""

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
"""Types of so many bytes that numpy has, too, which knows no bfloat16: what is moved is not looked at."""


class Whole(NamedTuple):
    """Buffers of several layers in one piece.

    Attributes:
        tensor: `[N, rows, H, capacity, D]`.
        array: the same memory, where it is the host's; else None. There operations of torch take several times as long
            as those of numpy.
    """

    tensor: torch.Tensor
    array: npt.NDArray[Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Whole:
        """With the array that belongs to it."""
        if not tensor.is_cpu:
            return cls(tensor, None)
        return cls(tensor, tensor.detach().view(_BITS[tensor.element_size()]).numpy())


class Move(NamedTuple):
    """Tokens of one row that are to follow each other, the same in all layers.

    Attributes:
        row: of the batch.
        sources: `[M]`, slots where the tokens lie, ascending.
        target: the slot where the first one belongs, never after where it lies.
    """

    row: int
    sources: Sequence[int]
    target: int

    @property
    def targets(self) -> range:
        """`[M]`, slots where the tokens belong."""
        return range(self.target, self.target + len(self.sources))

    @property
    def is_one_piece(self) -> bool:
        """Whether the tokens lie side by side."""
        return self.sources[-1] - self.sources[0] == len(self.sources) - 1

    def make_here(self, array: npt.NDArray[Any]) -> None:
        """Make it in `[N, rows, H, capacity, D]`; numpy takes care of pieces that overlap where they belong."""
        own, count, first = array[:, self.row], len(self.sources), self.sources[0]
        moved = own[:, :, first : first + count] if self.is_one_piece else own[:, :, self.sources]
        own[:, :, self.target : self.target + count] = moved

    def make_remotely(self, whole: torch.Tensor, sources: torch.Tensor | None) -> None:
        """Make it in `[N, rows, H, capacity, D]`, given the slots there; None for a piece that does not overlap."""
        row, count = whole.select(1, self.row), len(self.sources)
        moved = row.narrow(2, self.sources[0], count) if sources is None else row.index_select(2, sources)
        row.narrow(2, self.target, count).copy_(moved)


def make_all(moves: Sequence[Move], wholes: Sequence[Whole]) -> None:
    """Make moves, in each row one at most; slots are uploaded once to each device, and only if they have to be."""
    move, lone = moves[0], len(moves) == 1
    needs_no_slots = lone and move.is_one_piece and move.sources[0] > move.targets[-1]
    uploaded: dict[torch.device, list[torch.Tensor]] = {}
    for whole, array in wholes:
        if array is not None:
            for each in moves:
                each.make_here(array)
        elif needs_no_slots:
            move.make_remotely(whole, None)
        else:
            if whole.device not in uploaded:
                uploaded[whole.device] = upload([np.array(column) for column in _columns(moves)], whole.device)
            sources, rows, targets = uploaded[whole.device]
            if lone:  # as a slice, which is faster
                move.make_remotely(whole, sources)
            else:
                whole[:, rows, :, targets] = whole[:, rows, :, sources]


def _columns(moves: Sequence[Move]) -> list[list[int]]:
    """`[M]` each: slots where tokens lie, their rows, and slots where they belong."""
    return [
        [slot for move in moves for slot in move.sources],
        [move.row for move in moves for _ in move.sources],
        [slot for move in moves for slot in move.targets],
    ]


_NAMES = "keys", "values", "indexer_keys"
_buffers_of = attrgetter(*_NAMES)
SPARE_TOKENS = 256
"""Tokens that a buffer has room for beyond those needed, at least."""


class Ancestry(Protocol):
    """Who descends from whom in the trees of one pass.

    Attributes:
        size: S, nodes of each row.
        state: the text's state in the layer whose convolution came last, for cores that mixers do not pass it to.
    """

    size: int
    state: torch.Tensor | None

    def closure(self, device: torch.device) -> torch.Tensor:
        """`[B, S, S]` bool, true where the row's node is the column's node or descends from it."""
        ...

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """Where the last inputs of each node lie: its own, those of its ancestors, and of the text before them.

        Args:
            width: number of inputs that a convolution sees, at least 1.
            cached: number of inputs of the text that are kept, in front of those of the nodes.
            device: where the result goes.

        Returns:
            `[B, S, width]` int64, columns of the `cached + S` inputs, the node's own one last.
        """
        ...


class Recurrence(Protocol):
    """How one model's recurrent layers take part in passes over token trees.

    Attributes:
        forgets: whether a pass over several tokens begins with an empty state.
    """

    @property
    def forgets(self) -> bool:
        """See above."""
        ...

    def layers(self) -> list[Any]:
        """Return the empty layers of a `TreeCache` for the model."""
        ...

    def ancestry(self, trees: Sequence[TokenTree]) -> Ancestry:
        """Return who descends from whom in one pass over trees, one a row."""
        ...

    def patched_for(self, ancestry: Ancestry) -> AbstractContextManager[None]:
        """Have the model's recurrent functions follow the paths of the trees, as long as the context lasts."""
        ...


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: buffers `[rows, H, capacity, D]`, of which row b uses the first `lengths[b]`.

    There are B rows in use, the first ones. Between a pass and `TreeCache.keep` the tokens fed lie after the longest
    row, in all rows.

    Attributes:
        indexer_keys: a third buffer, `[rows, 1, capacity, D]`, where an indexer picks the keys that are seen.
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
        """Those that there are, by the name of the attribute."""
        return {name: buffer for name, buffer in zip(_NAMES, _buffers_of(self), strict=True) if buffer is not None}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers like `key_states` and `value_states` (`[B, H, T, D]`), with room to grow."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.lengths = [0] * key_states.shape[0]
        rows, heads, needed, _ = key_states.shape
        slots = needed + _spare(needed)
        self.keys = _zeros(key_states, (rows, heads, slots, key_states.shape[3]))
        self.values = _zeros(value_states, (rows, value_states.shape[1], slots, value_states.shape[3]))
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
        self.lengths = [length + fed for length in self.lengths]
        return _appended(self.keys, rows, first, key_states), _appended(self.values, rows, first, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Add the indexer's keys of the tokens that `update` has appended; see `transformers.Cache.update_indexer`.

        Args:
            indexer_key_states: `[B, T, D]`.

        Returns:
            Those of all tokens, `[B, max(lengths), D]`, a view of the buffer.
        """
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
        """Append copies of what there is; see `TreeCache.repeat`."""
        held = self.get_seq_length()
        used = [buffer[:, :, :held] for buffer in self.buffers.values()]
        keys, values, *indexer = (states.repeat(1, 1, -(-tokens // held), 1)[:, :, :tokens] for states in used)
        self.update(keys, values)
        for states in indexer:
            self.update_indexer(states[:, 0])

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of just this size; see `TreeCache.reserve`."""
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
            buffer[rows, :, length:] = 0  # no weight makes zero of another row's NaN
        self.lengths = [*self.lengths, length]

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> TreeLayer:
        """A layer with copies of these, `[B, H, T, D]`, and no room for more."""
        layer = cls()
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values = copied(keys), copied(values)
        layer.lengths, layer.is_initialized = [keys.shape[2]] * keys.shape[0], True
        return layer

    def copy_row(self, row: int, tokens: int) -> TreeLayer:
        """A layer with copies of the first tokens of one row; see `TreeCache.copy_row`."""
        layer = TreeLayer()
        layer.dtype, layer.device = self.dtype, self.device
        for name, buffer in self.buffers.items():
            setattr(layer, name, copied(buffer[row : row + 1, :, :tokens]))
        layer.lengths, layer.is_initialized = [tokens], True
        return layer

    def __getstate__(self) -> dict[str, Any]:
        """What copies and saved layers are made of: buffers of their own, without the room that is not used."""
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
        """Forget the last tokens of every row; `tokens_to_remove` <= 0, as transformers wants it."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} is not valid: give minus the number of tokens")
        self.lengths = [length + tokens_to_remove for length in self.lengths]

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self.indexer_keys = None
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
        for name, buffer in self.buffers.items():
            setattr(self, name, selected(buffer, indices))
        if self.lengths:
            self.lengths = [self.lengths[i] for i in indices.tolist()]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))


class TokenCounter(TreeLayer):
    """Counts the tokens of rows whose states do not tell: stands after the layers of a model without attention.

    To the cache it is a layer like others, whose keys and values are of no width.
    """

    def count(self, rows: int, tokens: int) -> None:
        """Each of the rows was fed `tokens` more."""
        nothing = torch.empty(rows, 1, tokens, 0)
        self.update(nothing, nothing)


class StatefulLayer:
    """A layer with recurrent states, which passes over trees take part in; the recurrent backend has one."""

    state_bytes: Any
    """Bytes of one row's states."""

    def begin(self, ancestry: Ancestry | None) -> None:
        """Begin a pass: over trees, or a plain one, which changes the states themselves."""
        raise NotImplementedError

    def keep(self, last: torch.Tensor) -> None:
        """After a pass over trees, fold in the path of each row that ends with node `last[b]`; `[B]` int64."""
        raise NotImplementedError

    def blank(self) -> Any:
        """Return an empty layer of the same kind."""
        raise NotImplementedError

    def join(self, parts: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        """Take over rows of other layers; see `TreeCache.join`."""
        raise NotImplementedError

    def reserve(self, rows: int, slots: int) -> None:
        """Have memory for this many rows, at least for those there are; see `TreeCache.reserve`."""
        raise NotImplementedError

    def take(self, part: Any) -> None:
        """Append the only row of another layer; see `TreeCache.take`."""
        raise NotImplementedError

    def leave(self, row: int) -> None:
        """Evict a row; the last one takes its place."""
        raise NotImplementedError


class JoinedLayers:
    """Layers whose keys and values are made views of one tensor, so that one operation moves what lies in all of them.

    Layers replace their buffers when these grow or when rows are selected; then they are joined again. Buffers that
    differ in shape, type or device stay by themselves.
    """

    def __init__(self, layers: Sequence[TreeLayer]) -> None:
        self.layers = layers
        self._views: list[torch.Tensor | None] = []
        self._wholes: list[Whole] = []

    def put(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one row to another, in all layers."""
        for whole, _ in self.joined():
            whole[:, target, :, :length] = whole[:, source, :, :length]

    def joined(self) -> list[Whole]:
        """What the buffers of these layers are views of."""
        if not self._views or not all(map(is_, self._buffers(), self._views)):
            self._join([buffer for buffer in self._buffers() if buffer is not None])
            self._views = list(self._buffers())
        return self._wholes

    def _buffers(self) -> Iterator[torch.Tensor | None]:
        """Those of all layers, and None for each that there is not; without a call of Python's own for any of them."""
        return chain.from_iterable(map(_buffers_of, self.layers))

    def _join(self, buffers: list[torch.Tensor]) -> None:
        """Make one of buffers, as far as that can be."""
        if len({(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers}) != 1:
            self._wholes = [Whole.of(buffer[None]) for buffer in buffers]
            return
        whole = empty(buffers[0], (len(buffers), *buffers[0].shape))
        self._wholes = [Whole.of(torch.stack(buffers, out=whole))]
        places = ((layer, name) for layer in self.layers for name in layer.buffers)
        for (layer, name), view in zip(places, self._wholes[0].tensor.unbind(), strict=True):
            setattr(layer, name, view)


def _appended(buffer: torch.Tensor, rows: int, first: int, states: torch.Tensor) -> torch.Tensor:
    """Copy states `[rows, H, T, D]` to where they belong; what is visible then, a view of the buffer.

    With as few operations as can be: a small model's step is made of hundreds of them, and these come in every layer.
    """
    used = buffer if buffer.shape[0] == rows else buffer.narrow(0, 0, rows)
    fed = states.shape[2]
    used.narrow(2, first, fed).copy_(states)
    return used.narrow(2, 0, first + fed)


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    """A buffer `[B, H, capacity, D]` with capacity for `needed` tokens and some more."""
    rows, _, tokens, _ = buffer.shape
    return _resized(buffer, (rows, tokens), rows, needed + _spare(needed))


def _spare(tokens: int) -> int:
    """Room beside that for so many: half as much again, so that copies stay rare."""
    return max(SPARE_TOKENS, tokens // 2)


def _resized(buffer: torch.Tensor, used: tuple[int, int], rows: int, tokens: int) -> torch.Tensor:
    """A buffer of this size, with what is used of the old one: its first rows and tokens."""
    most_rows, longest = used
    resized = _zeros(buffer, (max(rows, most_rows), buffer.shape[1], max(tokens, longest), buffer.shape[3]))
    resized[:most_rows, :, :longest] = buffer[:most_rows, :, :longest]
    return resized


def copied(states: torch.Tensor) -> torch.Tensor:
    """A buffer with these states and no room for more."""
    return empty(states, states.shape).copy_(states)


def writable(thing: Any) -> Any:
    """The same, with copies of the tensors in it, and in its dictionaries, that only inference mode may write to."""
    if isinstance(thing, dict):
        return {name: writable(value) for name, value in thing.items()}
    return copied(thing) if isinstance(thing, torch.Tensor) and thing.is_inference() else thing


def selected(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A buffer with these rows `[B]` int64 of another one, in this order."""
    return copied(states[rows.to(states.device)])


def _zeros(states: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A buffer for such states, see `empty`."""
    return empty(states, shape).zero_()


def empty(states: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A buffer for such states; an ordinary tensor in inference mode, too, since it is written to after a pass."""
    with torch.inference_mode(False):
        return states.new_empty(shape)


def _joined(parts: Sequence[torch.Tensor], places: Sequence[tuple[int, int]], lengths: Sequence[int]) -> torch.Tensor:
    """A buffer of these rows, with room to grow."""
    rows = [(parts[part], row) for part, row in places]
    first, longest = parts[0], max(lengths)
    buffer = _zeros(first, (len(rows), first.shape[1], longest + _spare(longest), first.shape[3]))
    for number, ((part, row), length) in enumerate(zip(rows, lengths, strict=True)):
        buffer[number, :, :length] = part[row, :, :length]
    return buffer
