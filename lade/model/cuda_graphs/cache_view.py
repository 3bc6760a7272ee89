"""What a model takes for its cache in a pass of one shape: the first rows and slots of static buffers."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lade.model.cuda_graphs.buffers import Buffers, StepShape


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
        slots = self._slots[:, None, :, None]
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


class StaticCacheView(Cache):
    """The cache that the model sees in a pass of one shape.

    Args:
        buffers: hold the keys and values; their first rows and slots are seen.
        slots: `[B, S]` int64, where the keys and values of the nodes are written.
        shape: B, S and K of the pass.
    """

    def __init__(self, buffers: Buffers, slots: torch.Tensor, shape: StepShape) -> None:
        pairs = zip(buffers.keys, buffers.values, strict=True)
        super().__init__(layers=[StaticLayerView(keys, values, slots.to(keys.device), shape) for keys, values in pairs])
