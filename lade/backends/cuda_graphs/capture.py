"""CUDA graph capture and replay, with an eager stand-in for tests.

A graph replays just what was captured: the same kernels on the same addresses. What changes from one replay to the next
must lie in tensors that stay where they are. `EagerReplay` replays by calling again, on any device, and checks that
none of these tensors has moved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Call = Callable[[], torch.Tensor]

_one_at_a_time = threading.Lock()  # torch captures one graph at a time in a process
_WARM_UPS = 2
"""Calls before a capture: libraries choose kernels and allocate workspaces in the first one."""


class Recording(Protocol):
    """What was captured."""

    def replay(self, call: Call) -> torch.Tensor:
        """Run it again, on what the fixed tensors hold now.

        Args:
            call: what was captured, for recordings that have to call again; they do not keep it, since that would
                keep its model alive.

        Returns:
            The call's result: always the same tensor, which the next replay of any recording may overwrite.
        """
        ...


class Capture(Protocol):
    """Makes recordings."""

    def record(self, call: Call, fixed: Sequence[torch.Tensor]) -> Recording:
        """Capture a call.

        Args:
            call: launches kernels that read and write `fixed`, and returns a new tensor.
            fixed: tensors whose addresses will not change.

        Raises:
            RuntimeError: the call does what cannot be captured, such as waiting for the device.
        """
        ...


class ResultMemory:
    """Memory for the results of recordings that are replayed one at a time.

    Where it was computed, each recording's result would keep its memory for good: the logits of 128 tokens over a
    vocabulary of 128k take 33 MB a row in bfloat16, in every shape that was captured.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def like(self, result: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape and dtype at an address that does not change, on memory that recordings share."""
        if self._memory is None or self._memory.nbytes < result.nbytes or self._memory.device != result.device:
            with torch.inference_mode(False):  # as in `Buffers`
                self._memory = torch.empty(result.nbytes, dtype=torch.uint8, device=result.device)
        return self._memory[: result.nbytes].view(result.dtype).view(result.shape)


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
            raise RuntimeError("a tensor that was captured has moved: a graph would read its old address")
        if self._result is None:
            self._result = self._results.like(result)
        elif self._result.shape != result.shape:
            raise RuntimeError(f"a call returned {list(result.shape)} after {list(self._result.shape)}")
        return self._result.copy_(result)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class CudaCapture:
    """Captures CUDA graphs, all in one memory pool: they are replayed one at a time, and share their scratch memory.

    Follows "CUDA graphs" in torch's notes on CUDA semantics: warm-up on a side stream, capture on the same one.

    Args:
        device: the device that the calls launch their kernels on.
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
            # Other threads may continue to allocate: only this one is checked.
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
