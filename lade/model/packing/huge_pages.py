"""Memory for weights in huge pages, where the system has them: whoever reads it in one go waits less for addresses."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

CHUNK = 2**26
"""Bytes that are asked for at a time. What is not written into takes no memory."""


class HugePages:
    """Memory that is taken piece by piece, one behind the other; a chunk is freed when all its pieces are.

    Copies begin with none.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.int8)

    def __reduce__(self) -> tuple[type[HugePages], tuple[()]]:
        return HugePages, ()

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, a multiple of 64, all 0 and beginning at one: `[size]` int8."""
        if size > len(self._left):
            self._left = _chunk(max(size, CHUNK))
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def _chunk(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.int8)
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system that has none
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(chunk, dtype=torch.int8)
