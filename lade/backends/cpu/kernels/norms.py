"""Norms of rows: the sum of a row's squares has one order, whatever is beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from lade.backends.cpu.kernels.instructions import clear, copy, load_long, load_one, next_part, room
from lade.backends.cpu.kernels.kinds import BFLOAT16
from lade.backends.cpu.kernels.vectors import (
    LANES,
    WIDEST,
    WORD,
    as_floats,
    fma,
    load,
    of_bfloat16,
    spread,
    store,
    store_as,
    store_bfloat16,
)
from lade.compilation import TeamKernel, inlined

_ROOM = 2 * WORD * WIDEST
"""Bytes that a norm works with."""


@inlined
def _sum_of_squares(row: Any, kind: Any, columns: Any, sums: Any, spare: Any) -> Any:
    """Of a row's numbers: `WIDEST` partial sums, so that no result depends on `LANES`, added up in order."""
    item, whole = 2 if kind else 4, columns // LANES * LANES
    clear(sums, WORD * WIDEST)
    for at in range(0, columns, LANES):
        place = row + item * at
        if at == whole:
            clear(spare, WORD * LANES)
            copy(spare, place, item * (columns - whole))
            place = spare
        numbers, partial = as_floats(place, kind), sums + WORD * (at % WIDEST)
        store(partial, fma(numbers, numbers, load(partial)))
    total = np.float32(0)
    for lane in range(WIDEST):
        total += load_one(sums + WORD * lane)
    return total


@inlined
def _as_rounded(numbers: Any, kind: Any, spare: Any) -> Any:
    """Numbers as those of a kind, float32 or bfloat16."""
    if kind == BFLOAT16:
        store_bfloat16(spare, numbers)
        return of_bfloat16(spare)
    return numbers


@inlined
def _scaled(numbers: Any, weight: Any, factor: Any, more: Any, kind: Any, rounded: Any, spare: Any) -> Any:
    """Numbers times a factor, rounded there or not, and then times weights, to which something is added before."""
    numbers = fma(numbers, factor, spread(np.float32(0)))
    if rounded:
        numbers = _as_rounded(numbers, kind, spare)
    weights = fma(as_floats(weight, kind), spread(np.float32(1)), more)
    return fma(numbers, weights, spread(np.float32(0)))


@inlined
def _normalise(
    x: Any, weight: Any, found: Any, kind: Any, columns: Any, norm: Any, sums: Any, first: Any, last: Any
) -> None:
    """Divide each row by the root of the mean of its squares, and multiply it by the weights.

    Args:
        x: address of rows of numbers, `[R, columns]`.
        weight: `[columns]`.
        found: address of what becomes of the rows, not that of x.
        kind: of all three, float32 or bfloat16.
        columns: at least `LANES`.
        norm: what is added to the mean, what is added to the weights, and whether (1) or not (0) numbers are rounded
            before they are multiplied by the weights.
        sums: address of twice `WIDEST` float32 numbers to work with.
        first: of the rows.
        last: of them, and one.
    """
    item, spare = 2 if kind else 4, sums + WORD * WIDEST
    epsilon, more, rounded = norm
    for row in range(first, last):
        begin, to = x + item * columns * row, found + item * columns * row
        total = _sum_of_squares(begin, kind, columns, sums, spare)
        factor = spread(np.float32(1) / np.sqrt(total / np.float32(columns) + epsilon))
        for at in range(0, columns, LANES):
            place = item * min(at, columns - LANES)
            numbers = as_floats(begin + place, kind)
            numbers = _scaled(numbers, weight + place, factor, spread(more), kind, rounded, spare)
            store_as(to + place, numbers, kind)


def _normalise_in_team(address: Any) -> None:
    """See `normalise`."""
    part, parts, rows = next_part(address), load_long(address + 8), load_long(address + 56)
    x, weight, found = load_long(address + 16), load_long(address + 24), load_long(address + 32)
    kind, columns = load_long(address + 40), load_long(address + 48)
    norm, sums = (load_one(address + 64), load_one(address + 72), load_long(address + 80)), room(_ROOM)
    while part < parts:
        first, last = rows * part // parts, rows * (part + 1) // parts
        _normalise(x, weight, found, kind, columns, norm, sums, first, last)
        part = next_part(address)


normalise = TeamKernel(_normalise_in_team)
"""`_normalise` by a team of threads: its fields are the addresses and the kind, how many columns and rows there are,
two numbers of the norm in bits of float32 and the third as it is."""
