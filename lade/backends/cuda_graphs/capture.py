"""CUDA graph capture and replay, with an eager stand-in for tests.

A graph replays exactly what was captured: the same kernels on the same addresses. Data that changes between replays
must be in tensors that stay in place. `EagerReplay` replays by calling again, on any device, and checks that none of
these tensors has moved.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Call = Callable[[], torch.Tensor]
_WARM_UPS = 2
"""Calls before a capture: in the first one, libraries choose kernels and allocate workspaces."""
_one_at_a_time = threading.Lock()  # torch captures one graph at a time in a process


class Recording(Protocol):
    """A captured call."""

    def replay(self, call: Call) -> torch.Tensor:
        """Run the call again, on the present contents of the fixed tensors.

        Args:
            call: the captured call, for recordings that call again; they do not keep it, which would keep its model
                alive.

        Returns:
            The result of the call: always the same tensor, which the next replay of any recording may overwrite.
        """
        ...


class Capture(Protocol):
    """Captures calls."""

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Recording:
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

    Args:
        device: device on which the calls launch their kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._results = ResultMemory()

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Recording:
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
        return _GraphRecording(graph, result, fixed)


class _GraphRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor, fixed: Sequence[torch.Tensor]) -> None:
        self._graph, self._result = graph, result
        self._fixed = fixed  # must not be freed before the graph

    def replay(self, call: Call) -> torch.Tensor:
        """See `Recording.replay`."""
        self._graph.replay()
        return self._result


class EagerReplay:
    """Captures nothing: a replay calls again."""

    def __init__(self) -> None:
        self._results = ResultMemory()

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Recording:
        """See `Capture.record`."""
        return _EagerRecording(fixed, self._results)


class _EagerRecording:
    def __init__(self, fixed: Sequence[torch.Tensor], results: ResultMemory) -> None:
        self._fixed, self._addresses, self._results = fixed, _addresses(fixed), results
        self._result: torch.Tensor | None = None

    def replay(self, call: Call) -> torch.Tensor:
        """See `Recording.replay`."""
        result = call()
        if _addresses(self._fixed) != self._addresses:
            raise RuntimeError("a captured tensor has moved: a graph would read its old address")
        if self._result is None:
            self._result = self._results.like(result)
        elif self._result.shape != result.shape:
            raise RuntimeError(f"a call returned {list(result.shape)} after {list(self._result.shape)}")
        return self._result.copy_(result)


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
            with torch.inference_mode(False):  # as in `Buffers`
                self._memory = torch.empty(result.nbytes, dtype=torch.uint8, device=result.device)
        return self._memory[: result.nbytes].view(result.dtype).view(result.shape)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
