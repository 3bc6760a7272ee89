"""Rows rounded to int8 codes, each by its own largest element."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lade.backends.cpu.kernels.instructions import field, next_part, room, store_one
from lade.backends.cpu.kernels.lanes import (
    LANES,
    LINE,
    in_all_lanes,
    larger,
    largest,
    no_sizes,
    put_codes,
    take,
    take_some,
)
from lade.compilation import TeamKernel, inlined

CODES = 64
"""Codes, of one row or one output, that lie together: a block of inputs."""


class Coding(NamedTuple):
    """Rows to round to int8 codes, each by its own largest element.

    Attributes:
        x: where they lie, `[rows, inputs]`, contiguous.
        kind: of their dtype.
        codes: what becomes of them, `[rows / together, blocks, together, 64]`, in which the last block is filled up
            with zeros; rows that are missing are left as they are.
        scales: `[rows]` float32, what a step is worth.
        rows, inputs: how many.
        together: how many rows lie together.
        zero: what stands for zero: 0 in signed codes, 128 in unsigned ones.
    """

    x: int
    kind: int
    codes: int
    scales: int
    rows: int
    inputs: int
    together: int
    zero: int


@inlined
def _code_row(x: Any, kind: Any, inputs: Any, to: Any, stride: Any, zero: Any) -> Any:
    """Round a row; blocks of codes are so many bytes apart. Returns what a step is worth."""
    item, spare, whole = 2 if kind else 4, room(LINE), inputs // LANES * LANES
    sizes = no_sizes()
    for at in range(0, inputs, LANES):
        sizes = larger(sizes, take_some(x + item * at, kind, inputs - at, spare))
    size = largest(sizes)
    step = (np.float32(1e-30) if size < np.float32(1e-30) else size) / np.float32(127)  # a row of zeros has one, too
    steps = in_all_lanes(step)
    for at in range(0, whole, LANES):
        put_codes(to + at // CODES * stride + at % CODES, take(x + item * at, kind), steps, zero)
    for at in range(whole, -(-inputs // CODES) * CODES, LANES):
        last = take_some(x + item * at, kind, max(0, inputs - at), spare)
        put_codes(to + at // CODES * stride + at % CODES, last, steps, zero)
    return step


def _code_rows(address: Any) -> None:
    """Round rows, see `Coding`: each part has as many of them."""
    x, kind, codes, scales = field(address, 2), field(address, 3), field(address, 4), field(address, 5)
    rows, inputs, together, zero = field(address, 6), field(address, 7), field(address, 8), field(address, 9)
    stride, blocks, length = CODES * together, -(-inputs // CODES), (2 if kind else 4) * inputs
    parts = field(address, 1)
    part = next_part(address)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            to = codes + CODES * (row // together * together * blocks + row % together)
            store_one(scales + 4 * row, _code_row(x + length * row, kind, inputs, to, stride, zero))
        part = next_part(address)


code_rows = TeamKernel(_code_rows)
"""The kernel that rounds rows to codes, by a team of threads: as many parts as one likes."""
