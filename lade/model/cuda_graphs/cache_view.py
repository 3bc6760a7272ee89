"""What a model takes for its cache in a pass of one shape: the first rows and slots of static buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lade.model.cuda_graphs.buffers import Buffers, StepShape
from lade.model.recurrent.layer import RecurrentLayer
from lade.model.recurrent.tree_pass import Ancestry
from lade.model.tree_layer import TreeLayer


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
        """No-op: the buffers are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[B, H, S, D]` into their slots; returns the first K slots, views of the buffers."""
        slots = self._slots.to(key_states.device)[:, None, :, None]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.scatter_(2, slots.expand_as(states), states)
        return self.keys[:, :, : self._shape.keys], self.values[:, :, : self._shape.keys]

    def get_seq_length(self) -> int:
        """K - S: slots before those of the pass, as if it were appended to the others."""
        return self._shape.keys - self._shape.size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask."""
        return self._shape.keys, 0

    def get_max_length(self) -> int:
        """K."""
        return self._shape.keys


class StaticRecurrentTreeLayerView(RecurrentLayer, StaticLayerView):
    """States, and keys and values beside them."""

    dtype: Any
    device: Any
    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int, keys_values: Sequence[Any]) -> None:
        StaticLayerView.__init__(self, *keys_values)
        RecurrentLayer.__init__(self, number_of_states)


class StaticCacheView(Cache):
    """The cache that the model sees in a pass of one shape.

    Args:
        layers: of the rows, see `StaticRows`; their states lie in the buffers.
        buffers: hold the keys and values; their first rows and slots are seen.
        slots: `[B, S]` int64, where the keys and values of the nodes are written.
        shape: B, S and K of the pass.
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
        """Layers with states."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def begin(self, ancestry: Ancestry) -> None:
        """Have recurrent layers take part in the pass."""
        for layer in self.recurrent:
            layer.begin(ancestry)


def _view_of(layer: Any, keys_values: Sequence[Any], rows: int) -> Any:
    """What stands for a layer in a pass; where that holds nothing, itself."""
    if not isinstance(layer, RecurrentLayer):
        return StaticLayerView(*keys_values) if keys_values else layer
    count = layer.number_of_states
    view = StaticRecurrentTreeLayerView(count, keys_values) if keys_values else RecurrentLayer(count)
    view.become(layer, lambda states: states[0][:rows], [layer])
    return view
