"""Inputs of a forward pass: size buckets, attention spans, packed uploads to the device, root tokens.

    tokens   1   8   16   32   64   128   then multiples of 128
    rows     1   2   4   8   ...
    keys     256   384   512   768   1024   1536   2048   ...

A pass over a bucket costs as much as its largest member, and each bucket is one more graph to capture. For tokens the
overhead is negligible as long as the pass is bound by reading the weights. Keys are different: the bytes read from the
cache grow with their number, and a graph over the full capacity would read 32k tokens for a text of one thousand. Two
buckets per octave read at most 1.5 times the keys there are, 1.2 times on average, and a text that doubles its length
meets two new ones.

A copy to the device takes some ten microseconds whatever its size, and one from pageable memory synchronizes the host
with the device. From pinned memory it is queued like a kernel; torch's pinned allocator does not reuse a block before
the copy is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

STEP_SIZES = (1, 8, 16, 32, 64, 128)
"""Buckets of passes up to 128 tokens."""
LARGEST_STEP = STEP_SIZES[-1]
LEAST_KEYS = 256


def step_bucket(tokens: int) -> int:
    """Return the size that a pass over `tokens` tokens per row is padded to."""
    return next((size for size in STEP_SIZES if size >= tokens), -(-tokens // LARGEST_STEP) * LARGEST_STEP)


def batch_bucket(rows: int) -> int:
    """Return the next power of two."""
    return 1 << (rows - 1).bit_length()


def key_bucket(tokens: int) -> int:
    """Return the number of cache slots that a pass reads if it needs the first `tokens` of them."""
    octave = max(LEAST_KEYS, batch_bucket(tokens))
    between = octave // 4 * 3
    return between if between > LEAST_KEYS and tokens <= between else octave


@dataclass(frozen=True)
class AttentionSpan:
    """Which keys a layer's queries see, by position; all of them by default.

    Attributes:
        window: number of positions seen, ending with the query's own; None for no window.
        chunk: size of the chunks that positions are divided into, of which a query sees its own; None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether each key is seen, bool `[B, S, K]`, given positions `[B, S, 1]` and `[B, 1, K]`."""
        if self.window:
            return query - key < self.window
        if self.chunk:
            return query // self.chunk == key // self.chunk
        return torch.ones(1, 1, 1, dtype=torch.bool, device=query.device)


FULL = AttentionSpan()
"""Full attention: all keys are seen."""


def sliding(window: int) -> AttentionSpan:
    """Return the span of the last `window` positions, the query's own included."""
    return AttentionSpan(window=window)


def chunked(size: int) -> AttentionSpan:
    """Return the span of the query's own chunk."""
    return AttentionSpan(chunk=size)


Array = npt.NDArray[Any]

_ALIGNMENT = 16
_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


class PackedLayout:
    """Arrays of known shapes, packed into one buffer.

    Args:
        parts: dtype (int64, int32 or bool) and shape of each array.
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
        """Return a zeroed buffer, `[size_bytes]` uint8, on `device`; in host memory if `staged` for a copy to it."""
        if not staged:
            with torch.inference_mode(False):  # it is also written outside of inference mode
                return torch.zeros(self.size_bytes, dtype=torch.uint8, device=device)
        return torch.zeros(self.size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def arrays(self, memory: torch.Tensor) -> list[Array]:
        """Return the arrays as views of a buffer in host memory."""
        whole = memory.numpy()
        return [
            whole[span].view(dtype).reshape(shape)
            for span, (dtype, shape) in zip(self._spans, self._parts, strict=True)
        ]

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the arrays as tensor views of a buffer on any device."""
        parts = zip(self._spans, self._parts, strict=True)
        return [memory[span].view(_TORCH_DTYPES[dtype]).view(shape) for span, (dtype, shape) in parts]


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return arrays (int64, int32 or bool) as tensors on the device, by one asynchronous copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]  # nothing to copy
    layout = PackedLayout([(array.dtype, array.shape) for array in arrays])
    host = layout.memory(device, staged=True)
    for place, array in zip(layout.arrays(host), arrays, strict=True):
        place[...] = array
    return layout.tensors(host.to(device, non_blocking=True))


def filled(columns: Sequence[list[int]], held: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Return lists without their first `held[b]` numbers as rows `[B, length]`, padded with their first number."""
    rows = zip(columns, held, strict=True)
    return np.array([column[own:] + column[:1] * (length - len(column) + own) for column, own in rows], dtype=np.int64)


@dataclass(frozen=True)
class RootInputs:
    """Tensors of a step that feeds the root alone in each of B rows; K = max(P) + 1.

    A single row needs no mask where a layer sees the whole text, so that the model takes the same path as in plain
    decoding.

    Attributes:
        ids: `[B, 1]` int64.
        positions: `[B, 1]` int64.
        slots: K, the number of slots of the cache and of the step.
        allowed: `[B, 1, 1, K]` bool, the slots each token may see; None for a single row, which sees all.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: int
    allowed: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], lengths: Sequence[int], device: torch.device) -> RootInputs:
        """Build the inputs for one token per row, after `lengths[b]` cached ones."""
        slots = max(lengths) + 1
        if len(tokens) == 1:
            ids, positions = (torch.full((1, 1), number, device=device) for number in (*tokens, *lengths))
            return cls(ids, positions, slots)
        before = np.array(lengths)[:, None]
        allowed = np.arange(slots) < before
        allowed[:, -1] = True  # the slot of the tokens that are fed
        ids, positions, seen = upload((np.array(tokens)[:, None], before, allowed[:, None, None]), device)
        return cls(ids, positions, slots, seen)

    @property
    def key_positions(self) -> torch.Tensor:
        """Position of every slot of the cache and of the step, `[B, K]` int64."""
        cached = torch.arange(self.slots - 1, device=self.ids.device).expand(len(self.ids), -1)
        return torch.cat([cached, self.positions], dim=1)

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """Return the slots within `span` that each token may see, `[B, 1, 1, K]` bool; None if it sees all."""
        if span == FULL:
            return self.allowed
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])[:, None]
        return near if self.allowed is None else near & self.allowed
