"""Cache layers with recurrent states, and a tree pass through them: ancestry, convolutions, decays, state folding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from lade.decoding.tree import TokenTree
from lade.model.cache_layers import Ancestry, StatefulLayer, TokenCounter, TreeLayer, empty, selected, writable
from lade.model.inputs import upload


class TreePass:
    """See `Ancestry`, with one tree per row; smaller trees are padded with copies of their root."""

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        shape = len(trees), max(map(len, trees))  # [B, S]
        self.size = shape[1]
        self.parents = np.full(shape, -1)  # of roots and padding
        self.depths = np.zeros(shape, dtype=np.int64)
        self.state: torch.Tensor | None = None
        closure = np.zeros((*shape, shape[1]), dtype=np.bool_)
        closure[:] = np.eye(shape[1], dtype=np.bool_)
        for row, tree in enumerate(trees):
            size = len(tree)
            self.parents[row, :size], self.depths[row, :size] = tree.parents, tree.depths
            closure[row, :size, :size] = tree.closure()
        self._closure = closure
        self._on_device: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    def closure(self, device: torch.device) -> torch.Tensor:
        """See `Ancestry.closure`."""
        key = device, 0, 0
        if key not in self._on_device:
            self._on_device[key] = upload([self._closure], device)[0]
        return self._on_device[key]

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """See `Ancestry.windows`."""
        key = device, width, cached
        if key not in self._on_device:
            nodes = np.broadcast_to(np.arange(self.parents.shape[1]), self.parents.shape)
            columns = [nodes]  # -1 is the last input of the text, -2 the one before
            for _ in range(width - 1):
                node = columns[-1]
                parent = np.take_along_axis(self.parents, np.maximum(node, 0), axis=1)
                columns.append(np.where(node >= 0, parent, node - 1))
            self._on_device[key] = upload([np.stack(columns[::-1], axis=-1) + cached], device)[0]
        return self._on_device[key]


def gather_columns(inputs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return columns `[B, ..., C]` of inputs `[B, L, C]`, contiguous for speed, by their indices `[B, ...]` int64."""
    rows, length, channels = inputs.shape
    if rows > 1:
        columns = columns + length * torch.arange(rows, device=columns.device).view(-1, *[1] * (columns.ndim - 1))
    return inputs.view(-1, channels).index_select(0, columns.flatten()).view(*columns.shape, channels)


def convolution(
    tree_pass: Ancestry,
    original: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,  # [B, C, L], from `RecurrentLayer`: the last inputs of the text, then the nodes'
    weight: torch.Tensor,  # [C, width]
    bias: torch.Tensor | None = None,  # [C]
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute the causal convolution `[B, C, S]` of each node along its ancestors; called like all cores."""
    exact = torch.promote_types(weight.dtype, torch.float32)  # 16-bit results are rounded once, as in the original
    inputs, weights = hidden_states.mT.to(exact).contiguous(), weight.to(exact).mT.contiguous()  # [B, L, C], [width, C]
    cached = inputs.shape[1] - tree_pass.size
    windows = tree_pass.windows(len(weights), cached, inputs.device)  # [B, S, width]
    sums = gather_columns(inputs, windows[..., -1]) * weights[-1]
    for place, own in enumerate(weights[:-1]):
        sums.addcmul_(gather_columns(inputs, windows[..., place]), own)
    if bias is not None:
        sums += bias
    outputs = sums.to(weight.dtype)
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.to(hidden_states.dtype).mT


def path_sums(decay: torch.Tensor, closure: torch.Tensor) -> torch.Tensor:
    """Return the sums of log decays `[B, H, S, D]` from the root down to each node, of the same shape."""
    return closure[:, None].to(decay.dtype) @ decay


def decayed_products(
    readers: torch.Tensor,  # [B, H, S, K] queries, or keys of the reading nodes
    writers: torch.Tensor,  # [B, H, S, K] keys of the ancestors
    decay: torch.Tensor,  # [B, H, S, 1 or K], log decay of the text's state at each node, for all channels or each
    closure: torch.Tensor,  # [B, S, S], see `Ancestry.closure`
) -> torch.Tensor:
    """Return decayed dot products `[B, H, S, S]` of nodes with their ancestors and themselves; other entries are 0.

    An ancestor has decayed less than its descendants, so no exponential exceeds 1.
    """
    if decay.shape[-1] == 1:
        between = (decay - decay.mT).masked_fill(~closure[:, None], -torch.inf)
        return readers @ writers.mT * between.exp()
    channels = (decay[:, :, :, None] - decay[:, :, None]).masked_fill(~closure[:, None, ..., None], -torch.inf)
    return torch.einsum("bhik,bhjk,bhijk->bhij", readers, writers, channels.exp_())


class Folding(Protocol):
    """Returned by a core instead of the final state; the mixer passes it on to the cache layer."""

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """Fold the path to node `last[b]`, `[B]` int64, into the state `[B, ...]` of the text before, in place."""
        ...


@dataclass(frozen=True)
class LinearFolding:
    """Folding of linear attention: the state decays, and each node of the path adds its key times its value."""

    keys: torch.Tensor  # [B, H, S, K]
    values: torch.Tensor  # [B, H, S, V], what the nodes add at their keys
    decay: torch.Tensor  # [B, H, S, 1 or K], log decay of the text's state at each node
    closure: torch.Tensor  # [B, S, S], see `Ancestry.closure`
    value_first: bool = False  # states are [B, H, V, K] rather than [B, H, K, V]

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """See `Folding.fold`."""
        rows = torch.arange(len(last), device=last.device)
        own = self.decay[rows, :, last][:, :, None]  # [B, H, 1, 1 or K]
        on_path = self.closure[rows, last][:, None, :, None]  # [B, 1, S, 1]
        weights = (own - self.decay).masked_fill(~on_path, -torch.inf).exp()  # [B, H, S, 1 or K]
        added = (self.keys * weights).mT @ self.values  # [B, H, K, V]
        left = own.exp().mT  # [B, H, 1 or K, 1]
        if self.value_first:
            added, left = added.mT, left.mT
        if state.dtype == added.dtype:
            state.mul_(left).add_(added)
        else:  # rounded once
            state.copy_(left * state + added)

    def to(self, *args: Any, **kwargs: Any) -> LinearFolding:
        """Return itself: some mixers convert the final state, but foldings keep their dtype."""
        return self


States = dict[int, torch.Tensor | None]
_KINDS = ("conv_states", "recurrent_states")
_FLAGS = ("conv_kernel_size", "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")
"""Flags of transformers' class, by the number of the state."""


class RecurrentLayer(StatefulLayer, LinearAttentionLayer):
    """The states of one layer, `[B, ...]` each, and, between a pass over trees and `keep`, the inputs of their update.

    A mixer has so many states of each kind. A pass over trees does not change them, so an interrupted one does no harm.
    """

    conv_states: States
    recurrent_states: States

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        super().__init__(number_of_states)
        self.tree_pass: Ancestry | None = None  # None in passes that are not over trees
        self.inputs: dict[int, torch.Tensor] = {}  # of convolutions, [B, L, C]: of the text's end, then of the nodes
        self.foldings: dict[int, Folding] = {}  # of a path into each recurrent state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(writable(state))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate states; ordinary tensors in inference mode as well, since later passes write to them."""
        with torch.inference_mode(False):
            super().lazy_initialization(*args, **kwargs)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return inputs `[B, C, T]` with those of the preceding text, `[B, C, L]`; called by the mixer."""
        if self.tree_pass is None:
            whole: torch.Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
            return whole
        cached = self.conv_states[state_idx]
        assert cached is not None, "trees are fed after a prompt"
        self.tree_pass.state = self.recurrent_states[state_idx]
        inputs = self.inputs[state_idx] = torch.cat([cached.mT, conv_states.mT], dim=1)  # [B, L, C]
        return inputs.mT

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Store the state after a pass, or the `Folding` of a pass over trees."""
        if hasattr(recurrent_states, "fold"):
            self.foldings[state_idx] = recurrent_states
            return None
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def begin(self, tree_pass: Ancestry | None) -> None:
        """Begin a pass over trees, or with None a plain one, which updates the states itself."""
        self.tree_pass = tree_pass
        self.inputs, self.foldings = {}, {}

    def keep(self, last: torch.Tensor) -> None:
        """Fold the path that ends with node `last[b]`, `[B]` int64, into the states of each row."""
        assert self.tree_pass is not None
        for idx, inputs in self.inputs.items():
            cached = self.conv_states[idx]
            assert cached is not None
            here = last.to(cached.device)
            windows = self.tree_pass.windows(cached.shape[-1], cached.shape[-1], cached.device)
            rows = torch.arange(len(here), device=cached.device)
            cached.copy_(gather_columns(inputs, windows[rows, here]).mT)
        for idx, folding in self.foldings.items():
            state = self.recurrent_states[idx]
            assert state is not None
            folding.fold(state, last.to(state.device))
        self.begin(None)

    def join(self, parts: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        """Replace all rows by rows of other layers; see `TreeCache.join`."""

        def joined(states: Sequence[torch.Tensor]) -> torch.Tensor:
            rows = [states[part][row] for part, row in places]
            return torch.stack(rows, out=empty(rows[0], (len(rows), *rows[0].shape)))

        self.become(parts[0], joined, parts)

    def reserve(self, rows: int, slots: int) -> None:
        """Reallocate for this number of rows, or for the present rows if these are more; see `TreeCache.reserve`."""
        self._replace(lambda state: _reallocated(state, max(rows, len(state))))

    def take(self, part: Any) -> None:
        """Append the only row of another layer; see `TreeCache.take`. Reallocates if there is no spare memory."""
        for (name, idx), row in part.states.items():
            states: States = getattr(self, name)
            if (state := states[idx]) is not None:
                states[idx] = _appended(state, row)

    def leave(self, row: int) -> None:
        """Evict a row; the last row takes its index. Other rows are not copied."""

        def without(state: torch.Tensor) -> torch.Tensor:
            state[row] = state[-1]
            return state[:-1]

        self._replace(without)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        self._replace(lambda state: selected(state, indices))

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for (name, idx), state in self.states.items():
            getattr(self, name)[idx] = change(state)

    def reset(self) -> None:
        """Drop all rows, and free the states."""
        vars(self).update(vars(self.blank()))

    def blank(self) -> Any:
        """Return an empty layer of the same kind."""
        return type(self)(self.number_of_states)

    @property
    def states(self) -> dict[tuple[str, int], torch.Tensor]:
        """The existing states, `[B, ...]` each, by attribute and number."""
        named = ((name, idx, state) for name in _KINDS for idx, state in getattr(self, name).items())
        return {(name, idx): state for name, idx, state in named if state is not None}

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's states."""
        return sum(state[:1].numel() * state.element_size() for state in self.states.values())

    def become(self, first: RecurrentLayer, joined: Any, parts: Sequence[RecurrentLayer]) -> None:
        """Hold the states that `joined` makes of those of the parts; transformers' flags are copied from `first`."""
        for name in _KINDS:
            own: States = getattr(self, name)
            for idx, state in getattr(first, name).items():
                own[idx] = None if state is None else joined([getattr(part, name)[idx] for part in parts])
        for name in _FLAGS:
            setattr(self, name, dict(getattr(first, name)))
        self.dtype, self.device = first.dtype, first.device


class RecurrentTreeLayer(RecurrentLayer, TreeLayer):
    """Recurrent states along with keys and values."""

    dtype: Any
    device: Any
    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        TreeLayer.__init__(self)
        RecurrentLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values, which are passed by position, or states, which are passed by name."""
        kind: Any = TreeLayer if args else RecurrentLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def join(self, parts: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        """Replace all rows by rows of other layers; see `TreeCache.join`."""
        RecurrentLayer.join(self, parts, places)
        TreeLayer.join(self, parts, places)

    def take(self, part: Any) -> None:
        """Append the only row of another layer; see `TreeCache.take`."""
        RecurrentLayer.take(self, part)
        TreeLayer.take(self, part)

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers; see `TreeCache.reserve`."""
        RecurrentLayer.reserve(self, rows, slots)
        TreeLayer.reserve(self, rows, slots)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        RecurrentLayer.batch_select_indices(self, indices)
        TreeLayer.batch_select_indices(self, indices)


def _reallocated(state: torch.Tensor, rows: int) -> torch.Tensor:
    """Copy a state `[B, ...]` into memory for `rows` rows."""
    return empty(state, (rows, *state.shape[1:]))[: len(state)].copy_(state)


def _appended(state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return a state `[B, ...]` with one more row `[1, ...]`, in the same memory if it has room."""
    count, size = len(state), state[0].numel()
    room = state.untyped_storage().nbytes() // state.element_size() - state.storage_offset()
    if room < (count + 1) * size or not state.is_contiguous():
        state = _reallocated(state, 2 * count)
    # The row stride of a single row is arbitrary.
    longer = state.as_strided((count + 1, *state.shape[1:]), (size, *state.stride()[1:]))
    longer[count] = row[0]
    return longer


def layers_for(config: PretrainedConfig) -> list[Any]:
    """Return empty `TreeCache` layers for a model with recurrent layers, in the order of transformers' own cache."""
    layers = [empty_like(layer) for layer in DynamicCache(config=config).layers]
    return layers if any(isinstance(layer, TreeLayer) for layer in layers) else [*layers, TokenCounter()]


def empty_like(layer: Any) -> Any:
    """Return the empty `TreeCache` layer for a layer of transformers; a layer without data is returned itself."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kind = RecurrentTreeLayer if isinstance(layer, CacheLayerMixin) else RecurrentLayer
        return kind(layer.number_of_states)
    if isinstance(layer, TreeLayer):
        return layer.blank()
    return TreeLayer() if isinstance(layer, CacheLayerMixin) else layer
