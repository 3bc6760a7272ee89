"""RMS norms whose sum of squares has a fixed order, independent of neighbouring rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from lade.backends.cpu.kernels.instructions import BFLOAT16, clear, copy, load_long, load_one, next_part, stack_memory
from lade.backends.cpu.kernels.vectors import (
    LANES,
    WIDEST,
    WORD,
    broadcast,
    fma,
    load,
    load_as_float32,
    load_bfloat16,
    store,
    store_as,
    store_bfloat16,
)
from lade.compilation import TeamKernel, inlined

_ROOM = 2 * WORD * WIDEST
"""Bytes of scratch memory that a norm needs."""


@inlined
def _sum_of_squares(row: Any, kind: Any, columns: Any, sums: Any, spare: Any) -> Any:
    """Return a row's sum of squares, over `WIDEST` partial sums added in order, so that `LANES` does not affect it."""
    item, whole = 2 if kind else 4, columns // LANES * LANES
    clear(sums, WORD * WIDEST)
    for at in range(0, columns, LANES):
        place = row + item * at
        if at == whole:
            clear(spare, WORD * LANES)
            copy(spare, place, item * (columns - whole))
            place = spare
        numbers, partial = load_as_float32(place, kind), sums + WORD * (at % WIDEST)
        store(partial, fma(numbers, numbers, load(partial)))
    total = np.float32(0)
    for lane in range(WIDEST):
        total += load_one(sums + WORD * lane)
    return total


@inlined
def _as_rounded(numbers: Any, kind: Any, spare: Any) -> Any:
    """Return numbers rounded to a dtype code, float32 or bfloat16."""
    if kind == BFLOAT16:
        store_bfloat16(spare, numbers)
        return load_bfloat16(spare)
    return numbers


@inlined
def _scaled(numbers: Any, weight: Any, factor: Any, more: Any, kind: Any, rounded: Any, spare: Any) -> Any:
    """Return numbers * factor, optionally rounded to the dtype, times (weights + more)."""
    numbers = fma(numbers, factor, broadcast(np.float32(0)))
    if rounded:
        numbers = _as_rounded(numbers, kind, spare)
    weights = fma(load_as_float32(weight, kind), broadcast(np.float32(1)), more)
    return fma(numbers, weights, broadcast(np.float32(0)))


@inlined
def _normalise(
    x: Any, weight: Any, found: Any, kind: Any, columns: Any, norm: Any, sums: Any, first: Any, last: Any
) -> None:
    """Divide each row by the root mean square of its elements and multiply it by the weights.

    Args:
        x: address of the rows, `[R, columns]`.
        weight: address of the weights, `[columns]`.
        found: address of the result, distinct from `x`.
        kind: dtype code of all three, float32 or bfloat16.
        columns: row length, at least `LANES`.
        norm: epsilon, the number added to the weights, and 1 to round the normalised row before the weights multiply
            it, else 0.
        sums: address of scratch memory, `2 * WIDEST` float32 numbers.
        first: index of the first row.
        last: one past the last row.
    """
    item, spare = 2 if kind else 4, sums + WORD * WIDEST
    epsilon, more, rounded = norm
    for row in range(first, last):
        begin, to = x + item * columns * row, found + item * columns * row
        total = _sum_of_squares(begin, kind, columns, sums, spare)
        factor = broadcast(np.float32(1) / np.sqrt(total / np.float32(columns) + epsilon))
        for at in range(0, columns, LANES):
            place = item * min(at, columns - LANES)
            numbers = load_as_float32(begin + place, kind)
            numbers = _scaled(numbers, weight + place, factor, broadcast(more), kind, rounded, spare)
            store_as(to + place, numbers, kind)


def _normalise_on_team(address: Any) -> None:
    """Entry point of `normalise`: decode the fields and loop over parts."""
    part, parts, rows = next_part(address), load_long(address + 8), load_long(address + 56)
    x, weight, found = load_long(address + 16), load_long(address + 24), load_long(address + 32)
    kind, columns = load_long(address + 40), load_long(address + 48)
    norm, sums = (load_one(address + 64), load_one(address + 72), load_long(address + 80)), stack_memory(_ROOM)
    while part < parts:
        first, last = rows * part // parts, rows * (part + 1) // parts
        _normalise(x, weight, found, kind, columns, norm, sums, first, last)
        part = next_part(address)


normalise = TeamKernel(_normalise_on_team)
"""`_normalise` as a team kernel.

Its fields are x, weight, found, kind, columns, rows, and the three numbers of `norm`: two as float32 bits, the third as
an integer.
"""
