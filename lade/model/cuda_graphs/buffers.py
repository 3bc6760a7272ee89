"""Keys and values of all layers, and states of recurrent ones, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lade.model.cuda_graphs.states import RowState, StateBuffers
from lade.model.host_to_device import upload


@dataclass(frozen=True)
class States:
    """Shape, dtype and device of the keys, or of the values, of one layer."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, states: torch.Tensor) -> States:
        """Those of a tensor `[B, H, T, D]`."""
        return cls(states.shape[1], states.shape[3], states.dtype, states.device)


Layers = Sequence[tuple[States, States] | RowState]
"""Keys and values of each layer that has some, and states of recurrent ones."""


@dataclass(frozen=True)
class StepShape:
    """Shape of a forward pass: B rows, S tokens of each, and K cache slots that attention reads.

    A position that is not the slot's has several axes.
    """

    rows: int
    size: int
    keys: int
    axes: int = 0


class Buffers:
    """Keys and values of all layers, at addresses that never change. Those of equal shape are views of one tensor.

    Args:
        layers: keys and values of each layer, and states.
        rows: B, rows of a batch.
        slots: tokens of each row. The last slot is never written: zeros are copied from it.

    Attributes:
        keys, values: `[B, H, slots, D]`, one for each layer.
        groups: `[N, B, H, slots, D]` each, the tensors whose views N of these buffers are.
        states: of recurrent layers.
        passes: what was captured on these addresses, by shape; it is freed with them.
    """

    def __init__(self, layers: Layers, rows: int, slots: int) -> None:
        self.layers, self.rows, self.slots = tuple(layers), rows, slots
        self.passes: dict[StepShape, Any] = {}
        self.states = StateBuffers([each for each in layers if isinstance(each, RowState)], rows)
        kinds = [kind for each in layers if not isinstance(each, RowState) for kind in each]
        self.groups: list[torch.Tensor] = []
        found: dict[int, torch.Tensor] = {}
        for kind in dict.fromkeys(kinds):
            equal = [number for number, other in enumerate(kinds) if other == kind]
            shape = len(equal), rows, kind.heads, slots, kind.dim
            with torch.inference_mode(False):  # generations outside of it write to them, too
                self.groups.append(torch.zeros(shape, dtype=kind.dtype, device=kind.device))
            found.update(zip(equal, self.groups[-1].unbind(), strict=True))
        self.keys = [found[number] for number in range(0, len(kinds), 2)]
        self.values = [found[number] for number in range(1, len(kinds), 2)]

    @property
    def fixed(self) -> list[torch.Tensor]:
        """All tensors whose addresses passes depend on."""
        return [*self.groups, *self.states.groups.values()]

    def fit(self, layers: Layers, rows: int, slots: int) -> bool:
        """Whether there is space for `rows` and `slots` of these layers."""
        return self.layers == tuple(layers) and rows <= self.rows and slots <= self.slots

    def clear(self) -> None:
        """Set everything to zero."""
        for group in self.groups:
            group.zero_()
        self.states.clear()

    def clear_rows(self, rows: int | slice, slots: slice) -> None:
        """Set some slots of one row, or of several, to zero, in all layers at once."""
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
        """Make these the first rows, in this order; `used` slots of each are copied."""
        moved = [(target, source) for target, source in enumerate(rows) if target != source]
        if not moved:
            return
        numbers = [np.array(column) for column in zip(*moved, strict=True)]
        self.states.select(*zip(*moved, strict=True))
        for group in self.groups:
            targets, sources = upload(numbers, group.device)
            group[:, targets, :, :used] = group[:, sources, :, :used]
