"""Inputs of a forward pass: padded shapes, attention spans, packed uploads to the device, root tokens.

    tokens   1   8   16   32   64   128   then multiples of 128
    rows     1   2   4   8   ...
    keys     256   384   512   768   1024   1536   2048   ...

A pass over a bucket costs what its largest member costs, and each bucket is one more graph to capture. For tokens that
is negligible as long as reading the weights takes the time. Keys are different: what is read of the cache grows
with their number, and a graph over the whole capacity would read 32k tokens where a text has one thousand. Two
buckets an octave read at most 1.5 times what is there, 1.2 times on average, and a text that doubles its length meets
two new ones.

A copy takes some ten microseconds whatever its size, and one from ordinary memory makes the host wait for all that the
device has to do before it. From page-locked memory it is queued like a kernel. Torch's allocator of such memory keeps a
piece from being used again before the copy is over.
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
"""Sizes of passes up to 128 tokens."""
LARGEST_STEP = STEP_SIZES[-1]
LEAST_KEYS = 256


def step_bucket(tokens: int) -> int:
    """The size that a pass over `tokens` tokens a row is padded to."""
    return next((size for size in STEP_SIZES if size >= tokens), -(-tokens // LARGEST_STEP) * LARGEST_STEP)


def batch_bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


def key_bucket(tokens: int) -> int:
    """Cache slots that a pass reads where the last one it needs is number `tokens`, counted from 1."""
    octave = max(LEAST_KEYS, batch_bucket(tokens))
    between = octave // 4 * 3
    return between if between > LEAST_KEYS and tokens <= between else octave


@dataclass(frozen=True)
class AttentionSpan:
    """Which keys a layer's queries see, by their positions; by default all of them.

    Attributes:
        window: number of positions seen, ending with the query's own.
        chunk: size of the chunks that positions are divided into; a query sees its own chunk.
    """

    window: int | None = None
    chunk: int | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """(query positions `[B, S, 1]`, key positions `[B, 1, K]`) -> bool `[B, S, K]`: is the key within the span?"""
        if self.window:
            return query - key < self.window
        if self.chunk:
            return query // self.chunk == key // self.chunk
        return torch.ones(1, 1, 1, dtype=torch.bool, device=query.device)


FULL = AttentionSpan()
"""Full attention: no key is too far."""


def sliding(window: int) -> AttentionSpan:
    """The last `window` positions, the query's own included."""
    return AttentionSpan(window=window)


def chunked(size: int) -> AttentionSpan:
    """The positions of the query's own chunk."""
    return AttentionSpan(chunk=size)


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


@dataclass(frozen=True)
class RootInputs:
    """Tensors of such a step over B rows; K = max(P) + 1.

    A single row needs no mask where a layer sees all of the text, so that the model takes the way of plain decoding.

    Attributes:
        ids: `[B, 1]` int64.
        positions: `[B, 1]` int64.
        slots: K, those of the cache and of the step.
        allowed: `[B, 1, 1, K]` bool, what each token may see; None for all of the text of a single row.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: int
    allowed: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], lengths: Sequence[int], device: torch.device) -> RootInputs:
        """The token of each row after so many cached ones."""
        slots = max(lengths) + 1
        if len(tokens) == 1:
            ids, positions = (torch.full((1, 1), number, device=device) for number in (*tokens, *lengths))
            return cls(ids, positions, slots)
        before = np.array(lengths)[:, None]
        allowed = np.arange(slots) < before
        allowed[:, -1] = True  # where all tokens fed lie
        ids, positions, seen = upload((np.array(tokens)[:, None], before, allowed[:, None, None]), device)
        return cls(ids, positions, slots, seen)

    @property
    def key_positions(self) -> torch.Tensor:
        """`[B, K]` int64, position of every slot of the cache and of the step."""
        cached = torch.arange(self.slots - 1, device=self.ids.device).expand(len(self.ids), -1)
        return torch.cat([cached, self.positions], dim=1)

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """What each token may see of what is near enough, `[B, 1, 1, K]` bool; None for all of a single row's text."""
        if span == FULL:
            return self.allowed
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])[:, None]
        return near if self.allowed is None else near & self.allowed
