"""Inputs of a captured pass: static tensors, cache views and the ancestry of nodes.

One copy transfers token ids, positions, row lengths and each tree's ancestor closure. Everything else, above all the
attention mask over thousands of cached tokens, is computed from these on the device as part of the pass.

Trees are padded to the size of the pass, and the batch to its number of rows. Padding consists of copies of the root
that see only the root; no other node sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lade.backends.cuda_graphs.buffers import Buffers, StepShape
from lade.backends.recurrent.layer import RecurrentLayer
from lade.backends.tree_attention.tree_mask import TreeInputs, TreeSlots, pack_bits
from lade.decoding.tree import TokenTree
from lade.model.cache_layers import Ancestry, TreeLayer
from lade.model.inputs import PackedLayout, StepInputs
from lade.model.kv_cache import PositionOffsets


class ClosureAncestry:
    """Ancestry of nodes computed on the device; see `lade.model.cache_layers.Ancestry`.

    Nodes come after their ancestors. Padding may descend from the root without being its own descendant.
    """

    def __init__(self, closure: torch.Tensor) -> None:  # [B, S, S] bool, see `TokenTree.closure`
        self.size: int = closure.shape[1]
        self.state: torch.Tensor | None = None
        self._closure = closure
        self._windows: dict[tuple[int, int], torch.Tensor] = {}

    def closure(self, device: torch.device) -> torch.Tensor:
        """See `Ancestry.closure`."""
        return self._closure.to(device)

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """See `Ancestry.windows`."""
        key = width, cached
        if key not in self._windows:
            numbers = torch.arange(self.size, device=self._closure.device)
            earlier = self._closure & (numbers < numbers[:, None])
            parents = torch.where(earlier, numbers, -1).amax(-1)  # [B, S]: the last ancestor; -1 for roots
            columns = [numbers.expand_as(parents)]
            for _ in range(width - 1):
                node = columns[-1]
                columns.append(torch.where(node >= 0, parents.gather(1, node.clamp(min=0)), node - 1))
            self._windows[key] = torch.stack(columns[::-1], dim=-1) + cached
        return self._windows[key].to(device)


class StaticInputs:
    """Input tensors of passes over B rows of S tokens, with so many position axes; 0 if positions equal slots.

    Attributes:
        memory: uint8 tensor that all others are views of.
        ids, positions: `[B, S]` int64.
        lengths: `[B]` int64, tokens cached before the trees.
        closure: `[B, S, S]` bool, see `TokenTree.closure`.
        offsets: `[axes, B, 1]` int64, positions minus slots; None without axes.
    """

    def __init__(self, rows: int, size: int, device: torch.device, axes: int = 0) -> None:
        self.rows, self.size, self._device = rows, size, device
        numbers = [(np.int64, (rows, size)), (np.int64, (rows, size)), (np.int64, (rows,))]
        self._layout = PackedLayout([*numbers, (np.bool_, (rows, size, size)), (np.int64, (axes, rows, 1))])
        self.memory = self._layout.memory(device)
        self.ids, self.positions, self.lengths, self.closure, offsets = self._layout.tensors(self.memory)
        self.offsets = offsets if axes else None
        self._staged = self._layout.memory(device, staged=True)
        self._whole, self._arrays = self._staged.numpy(), self._layout.arrays(self._staged)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, trees: Sequence[TokenTree], lengths: Sequence[int], offsets: PositionOffsets | None = None) -> None:
        """Copy in one tree per row, at most B trees of at most S nodes; row b has `lengths[b]` cached tokens."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy, which was done before a result of its pass was read
        self._whole.fill(0)
        ids, positions, starts, closure, shifts = self._arrays
        if offsets:
            shifts[:, : len(trees)] = offsets.array()
        for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            size = len(tree)
            ids[row], starts[row] = tree.ids[0], length
            ids[row, :size] = tree.ids
            positions[row, :size] = tree.depths
            positions[row] += length
            closure[row, :size, :size] = tree.closure()
            closure[row, size:, 0] = True
        closure[len(trees) :, :, 0] = True
        self.memory.copy_(self._staged, non_blocking=True)
        if self._copied is not None:
            torch.cuda.current_stream(self._device).record_event(self._copied)

    def slots(self) -> torch.Tensor:
        """Return the cache slots of the nodes, `[B, S]` int64: after the cached tokens of their row."""
        return self.lengths[:, None] + torch.arange(self.size, device=self._device)

    def step(self, keys: int) -> StepInputs:
        """Return the inputs of a pass that reads the first `keys` slots of each row."""
        slots = torch.arange(keys, device=self._device)
        place = slots - self.lengths[:, None]  # [B, K] node in each slot; negative for cached tokens
        node = place.clamp(0, self.size - 1)
        fed = (place >= 0) & (place < self.size)
        seen = self.closure.gather(2, node[:, None].expand(-1, self.size, -1))  # [B, S, K]
        real = self.closure.diagonal(dim1=1, dim2=2)[..., None]  # [B, S, 1]; padding does not see itself
        return StepInputs(
            ids=self.ids,
            positions=self.positions,
            key_positions=torch.where(fed, self.positions.gather(1, node), slots),
            allowed=torch.where(fed[:, None], seen, (place < 0)[:, None] & real),
        )

    def tree_step(self, keys: int) -> TreeInputs:
        """Return the inputs of a pass for attention that reads `TreeMask`; padding sees the cached text as well."""
        lengths, positions = self.lengths.int(), self.positions.int()
        slots = TreeSlots(lengths, lengths, positions, positions, pack_bits(self.closure), keys)
        return TreeInputs(self.ids, self.positions, slots)


class StaticLayerView(CacheLayerMixin):
    """One layer of a `StaticCacheView`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, shape: StepShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: torch.Tensor = keys[: shape.rows]
        self.values: torch.Tensor = values[: shape.rows]
        self._slots, self._shape = slots, shape
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the buffers exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[B, H, S, D]` to their slots; return the first K slots, views of the buffers."""
        slots = self._slots.to(key_states.device)[:, None, :, None]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.scatter_(2, slots.expand_as(states), states)
        return self.keys[:, :, : self._shape.keys], self.values[:, :, : self._shape.keys]

    def get_seq_length(self) -> int:
        """Return K - S: the slots before those of the pass."""
        return self._shape.keys - self._shape.size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the width and offset of the mask."""
        return self._shape.keys, 0

    def get_max_length(self) -> int:
        """Return K, the number of slots."""
        return self._shape.keys


class StaticRecurrentTreeLayerView(RecurrentLayer, StaticLayerView):
    """View of a layer with recurrent states along with keys and values."""

    dtype: Any
    device: Any
    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int, keys_values: Sequence[Any]) -> None:
        StaticLayerView.__init__(self, *keys_values)
        RecurrentLayer.__init__(self, number_of_states)


class StaticCacheView(Cache):
    """The cache that the model sees in a pass of one shape: the first rows and slots of the buffers.

    The layers are those of the rows, see `StaticRows`. Keys and values of nodes are written to `slots`, `[B, S]` int64.
    """

    def __init__(self, layers: Sequence[Any], buffers: Buffers, slots: torch.Tensor, shape: StepShape) -> None:
        pairs = zip(buffers.keys, buffers.values, strict=True)
        views: list[Any] = []
        for layer in layers:
            keys_values: list[Any] = []
            if isinstance(layer, TreeLayer):
                keys, values = next(pairs)
                keys_values = [keys, values, slots, shape]
            views.append(_view_of(layer, keys_values, shape.rows))
        super().__init__(layers=views)

    @property
    def recurrent(self) -> list[RecurrentLayer]:
        """Layers with recurrent states."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def begin(self, ancestry: Ancestry) -> None:
        """Begin a pass over trees in the recurrent layers."""
        for layer in self.recurrent:
            layer.begin(ancestry)


def _view_of(layer: Any, keys_values: Sequence[Any], rows: int) -> Any:
    """Return the view of a layer in a pass; a layer without data is its own view."""
    if not isinstance(layer, RecurrentLayer):
        return StaticLayerView(*keys_values) if keys_values else layer
    count = layer.number_of_states
    view = StaticRecurrentTreeLayerView(count, keys_values) if keys_values else RecurrentLayer(count)
    view.become(layer, lambda states: states[0][:rows], [layer])
    return view
