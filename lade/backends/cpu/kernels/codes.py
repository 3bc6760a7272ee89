"""Per-row int8 quantisation: symmetric, scaled by each row's largest_magnitude absolute value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lade.backends.cpu.kernels.instructions import field, next_part, stack_memory, store_one
from lade.backends.cpu.kernels.lanes import (
    LANES,
    LINE,
    broadcast,
    largest_magnitude,
    load_as,
    load_padded,
    max_magnitudes,
    store_codes,
    zero_magnitudes,
)
from lade.compilation import TeamKernel, inlined

CODES = 64
"""Codes per block: 64 consecutive inputs of one row or one output."""


class RowQuantisation(NamedTuple):
    """Arguments of the quantisation kernel, all integers.

    Attributes:
        x: address of the rows, `[rows, inputs]`, contiguous.
        kind: dtype code of `x`, see `dtype_code`.
        codes: address of the result, `[rows / together, blocks, together, 64]` int8. The last block is padded with
            zeros; rows that pad the last group are not written.
        scales: address of the scales, `[rows]` float32: value of one quantisation step.
        rows, inputs: shape of `x`.
        together: number of rows interleaved in a group.
        zero: code of zero: 0 for signed codes, 128 for unsigned ones.
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
def _quantise_row(x: Any, kind: Any, inputs: Any, to: Any, stride: Any, zero: Any) -> Any:
    """Quantise one row into blocks `stride` bytes apart; return its scale."""
    item, spare, whole = 2 if kind else 4, stack_memory(LINE), inputs // LANES * LANES
    sizes = zero_magnitudes()
    for at in range(0, inputs, LANES):
        sizes = max_magnitudes(sizes, load_padded(x + item * at, kind, inputs - at, spare))
    size = largest_magnitude(sizes)
    step = (np.float32(1e-30) if size < np.float32(1e-30) else size) / np.float32(127)  # not 0 for rows of zeros
    steps = broadcast(step)
    for at in range(0, whole, LANES):
        store_codes(to + at // CODES * stride + at % CODES, load_as(x + item * at, kind), steps, zero)
    for at in range(whole, -(-inputs // CODES) * CODES, LANES):
        last = load_padded(x + item * at, kind, max(0, inputs - at), spare)
        store_codes(to + at // CODES * stride + at % CODES, last, steps, zero)
    return step


def _quantise_rows(address: Any) -> None:
    """Quantise the rows of a `RowQuantisation`; each part takes an equal share of them."""
    x, kind, codes, scales = field(address, 2), field(address, 3), field(address, 4), field(address, 5)
    rows, inputs, together, zero = field(address, 6), field(address, 7), field(address, 8), field(address, 9)
    stride, blocks, length = CODES * together, -(-inputs // CODES), (2 if kind else 4) * inputs
    parts = field(address, 1)
    part = next_part(address)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            to = codes + CODES * (row // together * together * blocks + row % together)
            store_one(scales + 4 * row, _quantise_row(x + length * row, kind, inputs, to, stride, zero))
        part = next_part(address)


quantise_rows = TeamKernel(_quantise_rows)
"""Team kernel that quantises rows to int8; takes any number of parts."""
