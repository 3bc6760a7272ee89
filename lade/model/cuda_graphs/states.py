"""States of recurrent layers at fixed addresses, and what a captured pass leaves to fold into them.

    pass    reads the states, and leaves them alone      ──▶  NodeBuffers.take: what its nodes leave, of all layers
    keep    the accepted paths are known                 ──▶  NodeBuffers.fold: into the states, of all layers at once

So a pass may run any number of times, as a capture does, and one whose tokens are not kept changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lade.model.cuda_graphs.capture import ResultMemory
from lade.model.host_to_device import upload
from lade.model.recurrent.convolution import columns_of
from lade.model.recurrent.folding import LinearFolding
from lade.model.recurrent.layer import RecurrentLayer

_CONVOLUTION = "conv_states"


@dataclass(frozen=True)
class RowState:
    """A state of one layer: the attribute it is in, its shape without the rows, dtype and device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def kinds_of(layer: RecurrentLayer) -> list[RowState]:
    """Those of the states of one layer, in the layer's order."""
    return [
        RowState(name, tuple(state.shape[1:]), state.dtype, state.device) for (name, _), state in layer.states.items()
    ]


class StateBuffers:
    """States of all recurrent layers, at addresses that never change. Those of a kind are views of one tensor.

    Args:
        kinds: of each state, layer by layer.
        rows: rows of a batch.

    Attributes:
        groups: `[rows, N, ...]` for each kind, N states being of it.
        states: `[rows, ...]` for each state.
        memory: for what the nodes of a pass leave, whatever its shape: there is one at a time.
    """

    def __init__(self, kinds: Sequence[RowState], rows: int) -> None:
        self.groups: dict[RowState, torch.Tensor] = {}
        found: dict[int, torch.Tensor] = {}
        for kind in dict.fromkeys(kinds):
            equal = [number for number, other in enumerate(kinds) if other == kind]
            with torch.inference_mode(False):  # as in `Buffers`
                group = torch.zeros(rows, len(equal), *kind.shape, dtype=kind.dtype, device=kind.device)
            self.groups[kind] = group
            found.update(zip(equal, group.unbind(1), strict=True))
        self.states = [found[number] for number in range(len(kinds))]
        self.memory: defaultdict[tuple[RowState, str], ResultMemory] = defaultdict(ResultMemory)

    def clear(self) -> None:
        """Set everything to zero."""
        for group in self.groups.values():
            group.zero_()

    def copy_from(self, other: StateBuffers, rows: int) -> None:
        """Take over the first rows of others of the same kinds."""
        for kind, group in self.groups.items():
            group[:rows] = other.groups[kind][:rows]

    def select(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copy some rows to others, all at once."""
        for group in self.groups.values():
            into, rows = upload([np.array(targets), np.array(sources)], group.device)
            group[into] = group[rows]


class NodeBuffers:
    """What the nodes of a pass of one shape leave, at addresses that do not change.

    Args:
        states: what it will be folded into; passes of other shapes on these leave theirs in the same memory.
    """

    def __init__(self, states: StateBuffers) -> None:
        self._states = states
        self._tensors: dict[tuple[RowState, str], torch.Tensor] = {}
        self._value_first: dict[RowState, bool] = {}

    def take(self, layers: Sequence[RecurrentLayer]) -> None:
        """Copy in what the nodes have left in these layers: the end of a pass, and captured with it."""
        left: defaultdict[tuple[RowState, str], list[torch.Tensor]] = defaultdict(list)
        for layer in layers:
            for kind, (name, idx) in zip(kinds_of(layer), layer.states, strict=True):
                if name == _CONVOLUTION:
                    left[kind, "inputs"].append(layer.inputs[idx])
                    continue
                folding = layer.foldings[idx]
                assert isinstance(folding, LinearFolding), "other models run eagerly"
                self._value_first[kind] = folding.value_first
                for part in ("keys", "values", "decay"):
                    left[kind, part].append(getattr(folding, part))
        for key, tensors in left.items():
            if key not in self._tensors:
                self._tensors[key] = self._states.memory[key].like(torch.stack(tensors, dim=1))
            torch.stack(tensors, dim=1, out=self._tensors[key])  # [B, N, ...]

    def fold(self, paths: Sequence[Sequence[int]]) -> None:
        """Fold the accepted path of each row into its states, in all layers at once.

        Args:
            paths: nodes of the pass, from the root on; none is empty.
        """
        for kind, group in self._states.groups.items():
            rows, count = len(paths), group.shape[1]
            state = group[:rows].flatten(0, 1)  # [B * N, ...], a view
            if kind.name == _CONVOLUTION:
                inputs = self._left(kind, "inputs", rows)  # [B * N, L, C]
                (columns,) = upload([_windows(paths, kind.shape[-1]).repeat(count, axis=0)], kind.device)
                state.copy_(columns_of(inputs, columns).mT)
                continue
            keys, values, decay = (self._left(kind, part, rows) for part in ("keys", "values", "decay"))
            on_path, last = upload([each.repeat(count, axis=0) for each in _paths(paths, keys.shape[2])], kind.device)
            closure = on_path[:, None].expand(-1, keys.shape[2], -1)  # that of the last nodes is all that is read
            LinearFolding(keys, values, decay, closure, self._value_first[kind]).fold(state, last)

    def _left(self, kind: RowState, part: str, rows: int) -> torch.Tensor:
        """`[B * N, ...]`, a view."""
        return self._tensors[kind, part][:rows].flatten(0, 1)


def _windows(paths: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int64]:
    """Columns of the last inputs of each path, `[B, width]`, as many of the text being in front of those of nodes."""
    return np.array([[*range(width), *(width + node for node in path)][-width:] for path in paths])


def _paths(paths: Sequence[Sequence[int]], size: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Whether each of `size` nodes is on the path of its row, `[B, S]` bool, and the path's last one, `[B]` int64."""
    on_path = np.zeros((len(paths), size), dtype=np.bool_)
    for row, path in enumerate(paths):
        on_path[row, list(path)] = True
    return on_path, np.array([path[-1] for path in paths])
