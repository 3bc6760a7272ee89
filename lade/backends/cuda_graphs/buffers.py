"""Static buffers for keys, values and recurrent states, and capture and replay of CUDA graphs on them.

    pass    reads the states without changing them   ──▶  NodeBuffers.take: inputs of the state update, per node
    keep    the accepted paths are known              ──▶  NodeBuffers.fold: update the states of all layers at once

So a pass may run any number of times, as a capture does, and a pass whose tokens are rejected changes nothing.

A graph replays exactly what was captured: the same kernels on the same addresses. Data that changes between replays
must be in tensors that stay in place. `EagerReplay` replays by calling again, on any device, and checks that none of
these tensors has moved.
"""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lade.backends.recurrent.layer import LinearFolding, RecurrentLayer, gather_columns
from lade.model.inputs import upload

Call = Callable[[], torch.Tensor]
Replay = Callable[[Call], torch.Tensor]
"""Runs a captured call again, on the present contents of the fixed tensors.

It is given the call, for captures that call again: they do not keep it, which would keep its model alive. The result is
always the same tensor, which the next replay of any captured call may overwrite.
"""
_WARM_UPS = 2
"""Calls before a capture: in the first one, libraries choose kernels and allocate workspaces."""
_one_at_a_time = threading.Lock()  # torch captures one graph at a time in a process


class Capture(Protocol):
    """Captures calls."""

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Replay:
        """Capture a call.

        Args:
            call: launches kernels that read and write `fixed`, and returns a new tensor.
            fixed: tensors whose addresses will not change.

        Raises:
            RuntimeError: the call does something that cannot be captured, such as waiting for the device.
        """
        ...


class CudaCapture:
    """Captures CUDA graphs in one memory pool: they are replayed one at a time and share scratch memory.

    Follows "CUDA graphs" in torch's notes on CUDA semantics: warm-up on a side stream, capture on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._results = ResultMemory()

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Replay:
        """See `Capture.record`."""
        with _one_at_a_time, torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    result = call()
            here.wait_stream(self._stream)
            result = self._results.like(result)
            graph = torch.cuda.CUDAGraph()
            with (
                warnings.catch_warnings()
            ):  # of a call that fails before its first kernel, which raises an error as well
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                # Other threads may keep allocating: only this thread is checked.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result.copy_(call())

        def replay(_: Call, _kept: Sequence[torch.Tensor] = fixed) -> torch.Tensor:  # not freed before the graph
            graph.replay()
            return result

        return replay


class EagerReplay:
    """Captures nothing: a replay calls again."""

    def __init__(self) -> None:
        self._results = ResultMemory()

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Replay:
        """See `Capture.record`."""
        addresses = _addresses(fixed)
        own: torch.Tensor | None = None

        def replay(call: Call) -> torch.Tensor:
            nonlocal own
            result = call()
            if _addresses(fixed) != addresses:
                raise RuntimeError("a captured tensor has moved: a graph would read its old address")
            if own is None:
                own = self._results.like(result)
            elif own.shape != result.shape:
                raise RuntimeError(f"a call returned {list(result.shape)} after {list(own.shape)}")
            return own.copy_(result)

        return replay


class ResultMemory:
    """Memory shared by the results of recordings that are replayed one at a time.

    Otherwise every recording would keep its own result: the logits of 128 tokens over a vocabulary of 128k take 33 MB
    per row in bfloat16, for every captured shape.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def like(self, result: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape and dtype at a fixed address, in the shared memory."""
        if self._memory is None or self._memory.nbytes < result.nbytes or self._memory.device != result.device:
            with torch.inference_mode(False):  # as in `_allocated`
                self._memory = torch.empty(result.nbytes, dtype=torch.uint8, device=result.device)
        return self._memory[: result.nbytes].view(result.dtype).view(result.shape)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


_CONVOLUTION = "conv_states"


@dataclass(frozen=True)
class StateShape:
    """Shape of one recurrent state: its attribute, its shape without the rows, dtype and device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


NodeMemory = defaultdict[tuple[StateShape, str], ResultMemory]


@dataclass(frozen=True)
class KVShape:
    """Shape, dtype and device of the keys, or of the values, of one layer."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, states: torch.Tensor) -> KVShape:
        """Return the shape of a tensor `[B, H, T, D]`."""
        return cls(states.shape[1], states.shape[3], states.dtype, states.device)


Layers = Sequence[tuple[KVShape, KVShape] | StateShape]
"""Keys and values of each attention layer, and states of recurrent layers."""


@dataclass(frozen=True)
class StepShape:
    """Shape of a forward pass: B rows, S tokens per row, and K cache slots that attention reads.

    If positions differ from slots, `axes` is the number of position axes. With `states`, the pass leaves the hidden
    states of its nodes. With `reads`, its result is what a step reads of the logits: `lade.decoding.readout.reduced`.
    """

    rows: int
    size: int
    keys: int
    axes: int = 0
    states: bool = False
    reads: bool = False


Kind = TypeVar("Kind", KVShape, StateShape)


def _allocated(
    kinds: Sequence[Kind], shape_of: Callable[[Kind, int], tuple[int, ...]], dim: int
) -> tuple[dict[Kind, torch.Tensor], list[torch.Tensor]]:
    """Return zeros for all tensors of each kind together, and the tensors one by one: views along `dim`."""
    groups: dict[Kind, torch.Tensor] = {}
    views: dict[int, torch.Tensor] = {}
    for kind in dict.fromkeys(kinds):
        equal = [number for number, other in enumerate(kinds) if other == kind]
        with torch.inference_mode(False):  # generations outside inference mode write to them as well
            groups[kind] = torch.zeros(shape_of(kind, len(equal)), dtype=kind.dtype, device=kind.device)
        views.update(zip(equal, groups[kind].unbind(dim), strict=True))
    return groups, [views[number] for number in range(len(kinds))]


class Buffers:
    """Keys, values and recurrent states of all layers, at fixed addresses.

    Those of equal shape are views of one tensor. There are B rows. The last slot of each is never written: zeros are
    copied from it.

    Attributes:
        keys, values: `[B, H, slots, D]` per layer.
        groups: `[N, B, H, slots, D]` each, the tensors that N layers' keys or values are views of.
        states: `[B, ...]` per state, layer by layer.
        state_groups: `[B, N, ...]` per shape, for the N states of that shape.
        node_memory: for node inputs, shared by passes of all shapes, since one is replayed at a time.
    """

    def __init__(self, layers: Layers, rows: int, slots: int) -> None:
        self.layers, self.rows, self.slots = tuple(layers), rows, slots
        self.passes: dict[StepShape, Any] = {}  # captured on these addresses, and freed with them
        self.hidden = ResultMemory()  # for hidden states, shared by passes of all shapes
        self.node_memory: NodeMemory = defaultdict(ResultMemory)
        states = [each for each in layers if isinstance(each, StateShape)]
        self.state_groups, self.states = _allocated(states, lambda kind, count: (rows, count, *kind.shape), 1)
        kinds = [kind for each in layers if not isinstance(each, StateShape) for kind in each]
        groups, views = _allocated(kinds, lambda kind, count: (count, rows, kind.heads, slots, kind.dim), 0)
        self.groups, self.keys, self.values = list(groups.values()), views[::2], views[1::2]

    @property
    def fixed(self) -> list[torch.Tensor]:
        """Tensors whose addresses captured passes depend on."""
        return [*self.groups, *self.state_groups.values()]

    def fit(self, layers: Layers, rows: int, slots: int) -> bool:
        """Return True if these layers fit, with `rows` and `slots`."""
        return self.layers == tuple(layers) and rows <= self.rows and slots <= self.slots

    def clear(self) -> None:
        """Set everything to zero."""
        for group in self.fixed:
            group.zero_()

    def clear_rows(self, rows: int | slice, slots: slice) -> None:
        """Set slots of one row or several to zero, in all layers at once."""
        for group in self.groups:
            group[:, rows, ..., slots, :].zero_()

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy slots to other slots of the same row, `[B, W]` each, in all layers: one gather and one scatter."""
        for group in self.groups:
            here = upload([sources, targets], group.device)
            rows = group[:, : len(sources)]
            into = (len(group), len(sources), group.shape[2], sources.shape[1], group.shape[4])
            source, target = (slots[None, :, None, :, None].expand(into) for slots in here)
            rows.scatter_(3, target, rows.gather(3, source))

    def copy_row(self, source: int, target: int, used: int) -> None:
        """Copy the states of one row, and its first `used` slots, to another."""
        for group in self.state_groups.values():
            group[target] = group[source]
        for group in self.groups:
            group[:, target, :, :used] = group[:, source, :, :used]


class NodeBuffers:
    """Inputs of the state update that the nodes of a pass of one shape leave, at fixed addresses."""

    def __init__(self, groups: Mapping[StateShape, torch.Tensor], memory: NodeMemory) -> None:
        self._groups, self._memory = groups, memory  # of `Buffers`
        self._tensors: dict[tuple[StateShape, str], torch.Tensor] = {}
        self._value_first: dict[StateShape, bool] = {}

    def take(self, layers: Sequence[RecurrentLayer]) -> None:
        """Copy the node inputs of these layers into the buffers; the captured end of a pass."""
        left: defaultdict[tuple[StateShape, str], list[torch.Tensor]] = defaultdict(list)
        for layer in layers:
            for kind, (name, idx) in zip(state_shapes(layer), layer.states, strict=True):
                if name == _CONVOLUTION:
                    left[kind, "inputs"].append(layer.inputs[idx])
                    continue
                folding = layer.foldings[idx]
                assert isinstance(folding, LinearFolding), "models with other cores run eagerly"
                self._value_first[kind] = folding.value_first
                for part in ("keys", "values", "decay"):
                    left[kind, part].append(getattr(folding, part))
        for key, tensors in left.items():
            if key not in self._tensors:
                self._tensors[key] = self._memory[key].like(torch.stack(tensors, dim=1))
            torch.stack(tensors, dim=1, out=self._tensors[key])  # [B, N, ...]

    def fold(self, paths: Sequence[Sequence[int]]) -> None:
        """Fold the accepted path of each row, from the root on, into its states, in all layers at once."""
        for kind, group in self._groups.items():
            rows, count = len(paths), group.shape[1]
            state = group[:rows].flatten(0, 1)  # [B * N, ...], a view
            if kind.name == _CONVOLUTION:
                inputs = self._node_tensors(kind, "inputs", rows)  # [B * N, L, C]
                (columns,) = upload([_windows(paths, kind.shape[-1]).repeat(count, axis=0)], kind.device)
                state.copy_(gather_columns(inputs, columns).mT)
                continue
            keys, values, decay = (self._node_tensors(kind, part, rows) for part in ("keys", "values", "decay"))
            on_path, last = upload([each.repeat(count, axis=0) for each in _paths(paths, keys.shape[2])], kind.device)
            closure = on_path[:, None].expand(-1, keys.shape[2], -1)  # only the entries of the last nodes are read
            LinearFolding(keys, values, decay, closure, self._value_first[kind]).fold(state, last)

    def _node_tensors(self, kind: StateShape, part: str, rows: int) -> torch.Tensor:
        """Return `[B * N, ...]` node inputs, a view."""
        return self._tensors[kind, part][:rows].flatten(0, 1)


def state_shapes(layer: RecurrentLayer) -> list[StateShape]:
    """Return the shapes of one layer's states, in the layer's order."""
    return [
        StateShape(name, tuple(state.shape[1:]), state.dtype, state.device) for (name, _), state in layer.states.items()
    ]


def _windows(paths: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int64]:
    """Return columns of the last inputs of each path, `[B, width]`; inputs of the text precede those of nodes."""
    return np.array([[*range(width), *(width + node for node in path)][-width:] for path in paths])


def _paths(paths: Sequence[Sequence[int]], size: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return `[B, S]` bool, true for nodes on the path of their row, and the last node of each path, `[B]` int64."""
    on_path = np.zeros((len(paths), size), dtype=np.bool_)
    for row, path in enumerate(paths):
        on_path[row, list(path)] = True
    return on_path, np.array([path[-1] for path in paths])
