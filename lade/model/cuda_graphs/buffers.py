"""Keys and values at fixed addresses, and what a model takes for its cache in a pass over some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from lade.model.host_to_device import upload


@dataclass(frozen=True)
class States:
    """What the keys, or the values, of one layer look like."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, states: torch.Tensor) -> States:
        """Those of `[B, H, T, D]`."""
        return cls(states.shape[1], states.shape[3], states.dtype, states.device)


Layers = Sequence[tuple[States, States]]
"""Keys and values of each layer."""


@dataclass(frozen=True)
class Shape:
    """Of a pass: B rows, S tokens a row, and K slots of the cache that attention looks at."""

    rows: int
    size: int
    keys: int


class Buffers:
    """Keys and values of all layers, at addresses that never change. Those that are alike are views of one tensor.

    Args:
        layers: keys and values of each.
        rows: B.
        slots: of a row. The last one is never written: it is where zeros come from.

    Attributes:
        keys, values: `[B, H, slots, D]`, one a layer.
        passes: what was captured on these addresses, and goes with them.
    """

    def __init__(self, layers: Layers, rows: int, slots: int) -> None:
        self.layers, self.rows, self.slots = tuple(layers), rows, slots
        self.passes: dict[Shape, Any] = {}
        kinds = [kind for pair in layers for kind in pair]
        self.groups: list[torch.Tensor] = []  # [N, B, H, slots, D], of N buffers that are alike
        found: dict[int, torch.Tensor] = {}
        for kind in dict.fromkeys(kinds):
            alike = [number for number, other in enumerate(kinds) if other == kind]
            shape = len(alike), rows, kind.heads, slots, kind.dim
            self.groups.append(torch.zeros(shape, dtype=kind.dtype, device=kind.device))
            found.update(zip(alike, self.groups[-1].unbind(), strict=True))
        self.keys = [found[number] for number in range(0, len(kinds), 2)]
        self.values = [found[number] for number in range(1, len(kinds), 2)]

    def fit(self, layers: Layers, rows: int, slots: int) -> bool:
        """Whether they hold so many rows and slots of these layers."""
        return self.layers == tuple(layers) and rows <= self.rows and slots <= self.slots

    def clear(self) -> None:
        """Make all of it zero."""
        for group in self.groups:
            group.zero_()

    def clear_rows(self, rows: int | slice, slots: slice) -> None:
        """Make some slots of one row, or of several, zero, in all layers at once."""
        for group in self.groups:
            group[:, rows, ..., slots, :].zero_()

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy slots to others of the same row, `[B, W]` each, in all layers: one gather and one scatter."""
        for group in self.groups:
            here = upload([sources, targets], group.device)
            rows = group[:, : len(sources)]
            into = (len(group), len(sources), group.shape[2], sources.shape[1], group.shape[4])
            source, target = (slots[None, :, None, :, None].expand(into) for slots in here)
            rows.scatter_(3, target, rows.gather(3, source))

    def select(self, rows: Sequence[int], used: int) -> None:
        """Let these be the first rows, in this order; they use so many slots."""
        moved = [(target, source) for target, source in enumerate(rows) if target != source]
        if not moved:
            return
        numbers = [np.array(column) for column in zip(*moved, strict=True)]
        for group in self.groups:
            targets, sources = upload(numbers, group.device)
            group[:, targets, :, :used] = group[:, sources, :, :used]


class FrameLayer(CacheLayerMixin):
    """One layer of a `Frame`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, shape: Shape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: torch.Tensor = keys[: shape.rows]
        self.values: torch.Tensor = values[: shape.rows]
        self._slots, self._shape = slots, shape
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the buffers are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[B, H, S, D]` into their slots; returns the first K slots, views of the buffers."""
        slots = self._slots[:, None, :, None]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.scatter_(2, slots.expand_as(states), states)
        return self.keys[:, :, : self._shape.keys], self.values[:, :, : self._shape.keys]

    def get_seq_length(self) -> int:
        """Slots before those of the pass, if it were appended to the others."""
        return self._shape.keys - self._shape.size

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask."""
        return self._shape.keys, 0

    def get_max_length(self) -> int:
        """K."""
        return self._shape.keys


class Frame(Cache):
    """What the model takes for its cache in a pass of one shape.

    Args:
        buffers: it looks at their first rows and slots.
        slots: `[B, S]` int64, where the nodes go.
        shape: of the pass.
    """

    def __init__(self, buffers: Buffers, slots: torch.Tensor, shape: Shape) -> None:
        pairs = zip(buffers.keys, buffers.values, strict=True)
        super().__init__(layers=[FrameLayer(keys, values, slots.to(keys.device), shape) for keys, values in pairs])
