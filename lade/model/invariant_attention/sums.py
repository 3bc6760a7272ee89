"""Weighted values summed up from the first key to the last, for each query by itself: compiled.

A sum that is formed key by key does not depend on what else is in a pass: not on other queries, and not on keys between
that the query does not see, since their weight is zero and adds nothing. So a node of a tree, which sees the text and
its path, gets the sums of plain decoding bit for bit. A matrix product promises no order.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch

from lade.decoding.compilation import Kernel

_KEYS, _AT_ONCE = 64, 4  # keys that are converted together, and that are added in one go through a row of values
_LANES = 16  # float32 numbers of the widest vector register
_MANY = 2**23  # multiplications that are worth a thread of their own

_WEIGHTS, _SUMS = numba.float32[:, :, ::1], numba.float32[:, :, ::1]
_HALVES, _FLOATS, _PLACES = numba.uint16[::1], numba.float32[::1], numba.int64[::1]


def weighted_sums(weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of values and of their weights, each formed from the first key to the last.

    Args:
        weights: `[B, Hkv, R, N]` float32, contiguous; 0 where a query does not see a key.
        value: `[B, Hkv, N, Dv]` of 16 or 32 bits, on the CPU.

    Returns:
        `[B, Hkv, R, Dv]` and `[B, Hkv, R, 1]`, float32.
    """
    rows, heads, queries, keys = weights.shape
    size = value.shape[-1]
    width = -(-(size + 1) // _LANES) * _LANES  # the last column of values are ones, whose sum is that of the weights
    sums = torch.empty(rows * heads, queries, width)
    if value.dtype == torch.float16 or value.stride(-1) != 1:
        value = value.float().contiguous()
    halves, floats = _memory_of(value)
    starts = np.add.outer(np.arange(rows) * value.stride(0), np.arange(heads) * value.stride(1)).ravel()
    arguments = weights.view(-1, queries, keys).numpy(), halves, floats, starts, value.stride(2), size, sums.numpy()
    _run(arguments, rows * heads, weights.numel() * width)
    found = sums.view(rows, heads, queries, width)
    return found[..., :size], found[..., size : size + 1]


def _run(arguments: tuple[Any, ...], heads: int, work: int) -> None:
    """Sum up all heads, in several threads where that takes long: torch's setting says in how many."""
    threads = min(torch.get_num_threads(), heads, work // _MANY)
    if threads <= 1:
        sum_up(*arguments, 0, heads)
        return
    ends = [heads * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda part: sum_up(*arguments, ends[part], ends[part + 1]), range(threads)):
            pass


def _memory_of(value: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """All numbers from the first to the last one of a tensor, as bfloat16's bits or as float32; the other is empty."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((span,), (1,))
    if value.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16), np.empty(0, np.float32)
    return np.empty(0, np.uint16), flat.numpy()


def _sum_up(
    weights: Any, halves: Any, floats: Any, starts: Any, step: Any, size: Any, sums: Any, first: Any, last: Any
) -> None:
    """Fill in `sums`, `[H, R, width]`, of the heads from the first to the last one.

    Args:
        weights: float32 `[H, R, N]`.
        halves: uint16, the upper halves of float32 numbers; empty if the values are in `floats`.
        floats: float32.
        starts: int64 `[H]`, where the values of a head begin.
        step: how far it is from one key's values to the next key's.
        size: of a head.
        sums: float32, what becomes of it.
        first: of the heads to sum up.
        last: of these, and one.
    """
    queries, keys, width = weights.shape[1], weights.shape[2], sums.shape[2]
    bits = np.zeros((_KEYS, width), np.uint32)
    line, other_line = np.zeros(_KEYS, np.float32), np.zeros(_KEYS, np.float32)
    total, other_total = np.zeros(width, np.float32), np.zeros(width, np.float32)
    values = bits.view(np.float32)
    for head in range(first, last):
        sums[head] = 0.0
        for begin in range(0, keys, _KEYS):
            count = min(_KEYS, keys - begin)
            for key in range(count):
                start = starts[head] + (begin + key) * step
                if halves.shape[0]:
                    upper = halves[start : start + size]
                    for at in range(size):
                        bits[key, at] = np.uint32(upper[at]) << np.uint32(16)
                else:
                    values[key, :size] = floats[start : start + size]
                values[key, size] = 1.0
            whole = -(-count // _AT_ONCE) * _AT_ONCE
            values[count:whole] = 0.0
            line[count:] = 0.0
            other_line[count:] = 0.0
            for query in range(0, queries, 2):
                # Two queries at a time, which share what is read of the values. Loops over single numbers become vector
                # instructions; slices of arrays in them would have their references counted.
                other = min(query + 1, queries - 1)
                for key in range(count):
                    line[key], other_line[key] = weights[head, query, begin + key], weights[head, other, begin + key]
                for at in range(width):
                    total[at], other_total[at] = sums[head, query, at], sums[head, other, at]
                for key in range(0, whole, _AT_ONCE):
                    a, b, c, d = line[key], line[key + 1], line[key + 2], line[key + 3]
                    e, f, g, h = other_line[key], other_line[key + 1], other_line[key + 2], other_line[key + 3]
                    for at in range(width):
                        one, two = values[key, at], values[key + 1, at]
                        three, four = values[key + 2, at], values[key + 3, at]
                        total[at] = (((total[at] + a * one) + b * two) + c * three) + d * four
                        other_total[at] = (((other_total[at] + e * one) + f * two) + g * three) + h * four
                for at in range(width):
                    sums[head, query, at], sums[head, other, at] = total[at], other_total[at]


sum_up = Kernel(
    _sum_up,
    (_WEIGHTS, _HALVES, _FLOATS, _PLACES, numba.int64, numba.int64, _SUMS, numba.int64, numba.int64),
    nogil=True,
    fastmath={"contract"},
)
"""The kernel: `_sum_up`, which gives up the interpreter's lock."""
