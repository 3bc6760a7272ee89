"""Small arrays on their way to the device: packed into one piece of memory, and copied at once.

A copy takes some ten microseconds whatever its size, and one from ordinary memory makes the host wait for all that the
device has to do before it. From page-locked memory it is queued like a kernel. Torch's allocator of such memory keeps a
piece from being used again before the copy is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ALIGNMENT = 16
_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


class Layout:
    """Arrays of known shapes, one after the other in one piece of memory.

    Args:
        parts: dtype (int64, int32 or bool) and shape of each.
    """

    def __init__(self, parts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        self._parts = [(np.dtype(dtype), tuple(shape)) for dtype, shape in parts]
        self._spans: list[slice] = []
        end = 0
        for dtype, shape in self._parts:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + dtype.itemsize * math.prod(shape)
            self._spans.append(slice(start, end))
        self.size_bytes = end

    def memory(self, device: torch.device, *, staged: bool = False) -> torch.Tensor:
        """Zeros, `[size_bytes]` uint8: on the device, or on the host where they are `staged` on their way to it."""
        if not staged:
            with torch.inference_mode(False):  # it is written to again, outside of it, too
                return torch.zeros(self.size_bytes, dtype=torch.uint8, device=device)
        return torch.zeros(self.size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def arrays(self, memory: torch.Tensor) -> list[Array]:
        """Views of memory on the host."""
        whole = memory.numpy()
        return [
            whole[span].view(dtype).reshape(shape)
            for span, (dtype, shape) in zip(self._spans, self._parts, strict=True)
        ]

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Views of memory on any device."""
        parts = zip(self._spans, self._parts, strict=True)
        return [memory[span].view(_TORCH_DTYPES[dtype]).view(shape) for span, (dtype, shape) in parts]


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays (int64, int32 or bool) on the device, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]  # already there: a layout would only take time
    layout = Layout([(array.dtype, array.shape) for array in arrays])
    host = layout.memory(device, staged=True)
    for place, array in zip(layout.arrays(host), arrays, strict=True):
        place[...] = array
    return layout.tensors(host.to(device, non_blocking=True))


def filled(columns: Sequence[list[int]], held: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Lists as rows `[B, length]`, without what is held of them; the shorter ones filled up with their first number."""
    rows = zip(columns, held, strict=True)
    return np.array([column[own:] + column[:1] * (length - len(column) + own) for column, own in rows], dtype=np.int64)
