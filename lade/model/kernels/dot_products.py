"""Rows in bfloat16 by weights in panels, by dot products: one chain of sums for each output."""

from __future__ import annotations

from typing import Any, NamedTuple

from lade.decoding.compilation import TeamKernel, inlined
from lade.model.kernels.dots import (
    COLUMNS,
    DOT_BLOCK,
    DOT_PANEL,
    FEW_SUMS,
    MANY_SUMS,
    PANEL_BLOCK,
    TOGETHER,
    WIDE,
    asked_for,
    sum_bfloat16,
)
from lade.model.kernels.instructions import clear, copy, field, next_part, room
from lade.model.kernels.lanes import LINE, plus, put_bfloat16, take_bfloat16, take_float32


class Layout(NamedTuple):
    """Rows in bfloat16 to be laid out in blocks.

    Attributes:
        x: where they lie, `[rows, inputs]`, contiguous.
        to: what becomes of them, `[rows / together, blocks, together, 64 bytes]`; the last block is filled up with
            zeros, rows that are missing are left as they are.
        rows, inputs: how many.
        together: see `rows_together`.
    """

    x: int
    to: int
    rows: int
    inputs: int
    together: int


def _lay_rows(address: Any) -> None:
    """Lay rows out, see `Layout`: each part has as many of them."""
    x, to, together = field(address, 2), field(address, 3), field(address, 6)
    rows, inputs = field(address, 4), field(address, 5)
    blocks, length, parts = -(-2 * inputs // DOT_BLOCK), 2 * inputs, field(address, 1)
    whole = length // DOT_BLOCK
    part = next_part(address)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            place, line = to + DOT_BLOCK * (row // together * together * blocks + row % together), x + length * row
            for block in range(whole):
                copy(place + DOT_BLOCK * together * block, line + DOT_BLOCK * block, DOT_BLOCK)
            if whole < blocks:
                last = place + DOT_BLOCK * together * whole
                clear(last, DOT_BLOCK)
                copy(last, line + DOT_BLOCK * whole, length - DOT_BLOCK * whole)
        part = next_part(address)


@inlined
def _few_in_bfloat16(together: Any, x: Any, weight: Any, blocks: Any, to: Any) -> None:
    """Sums `[together, 16]` of few rows by one panel."""
    if together == 1:
        sum_bfloat16(1, 1, x, weight, 0, blocks, to)
    elif together == 2:
        sum_bfloat16(2, 1, x, weight, 0, blocks, to)
    elif together == 4 or not WIDE:
        sum_bfloat16(4, 1, x, weight, 0, blocks, to)
    elif together == 6:
        sum_bfloat16(6, 1, x, weight, 0, blocks, to)
    elif together == 8:
        sum_bfloat16(8, 1, x, weight, 0, blocks, to)
    elif together == 12:
        sum_bfloat16(12, 1, x, weight, 0, blocks, to)
    elif together == 16:
        sum_bfloat16(16, 1, x, weight, 0, blocks, to)
    else:
        sum_bfloat16(24, 1, x, weight, 0, blocks, to)


@inlined
def _give_out(product: Any, row: Any, rows: Any, panel: Any, sums: Any, stride: Any) -> None:
    """Round the sums of rows and a panel off, with the bias added, into their place.

    Where fewer outputs are left they go by way of `spare`, so that nothing behind them is read or written.
    """
    spare, count = room(LINE), min(DOT_PANEL, product.outputs - DOT_PANEL * panel)
    added = take_float32(sums)  # where there is no bias it is not used
    if product.bias:
        bias = product.bias + 2 * DOT_PANEL * panel
        if count < DOT_PANEL:
            copy(spare, bias, 2 * count)
            bias = spare
        added = take_bfloat16(bias)
    for at in range(rows):
        found = take_float32(sums + stride * at)
        if product.bias:
            found = plus(found, added)
        to = product.out + 2 * ((row + at) * product.outputs + DOT_PANEL * panel)
        if count < DOT_PANEL:
            put_bfloat16(spare, found)
            copy(to, spare, 2 * count)
        else:
            put_bfloat16(to, found)


def _multiply_few(address: Any) -> None:
    """A product of few rows, which takes little longer than its weights take to be read."""
    product, sums = asked_for(address), room(FEW_SUMS)
    panels, size = -(-product.outputs // DOT_PANEL), PANEL_BLOCK * product.blocks
    part = next_part(address)
    while part < field(address, 1):
        first = product.panel_group * part
        for panel in range(first, min(first + product.panel_group, panels)):
            _few_in_bfloat16(product.together, product.x, product.weight + size * panel, product.blocks, sums)
            _give_out(product, 0, product.rows, panel, sums, LINE)
        part = next_part(address)


def _multiply_many(address: Any) -> None:
    """A product of more rows: a group of panels stays in a core's cache while a group of rows goes by."""
    product, sums = asked_for(address), room(MANY_SUMS)
    panels, size = -(-product.outputs // DOT_PANEL), PANEL_BLOCK * product.blocks
    groups, blocks = -(-panels // product.panel_group), product.blocks
    part = next_part(address)
    while part < field(address, 1):
        top, first = product.row_group * (part // groups), product.panel_group * (part % groups)
        for panel in range(first, min(first + product.panel_group, panels), COLUMNS):
            weight = product.weight + size * panel
            for row in range(top, min(top + product.row_group, product.rows), TOGETHER):
                x, rows = product.x + DOT_BLOCK * blocks * row, min(TOGETHER, product.rows - row)
                if panel + 1 < panels and COLUMNS == 2:
                    sum_bfloat16(TOGETHER, 2, x, weight, size, blocks, sums)
                    _give_out(product, row, rows, panel, sums, 2 * LINE)
                    _give_out(product, row, rows, panel + 1, sums + LINE, 2 * LINE)
                else:
                    sum_bfloat16(TOGETHER, 1, x, weight, 0, blocks, sums)
                    _give_out(product, row, rows, panel, sums, LINE)
        part = next_part(address)


lay_rows = TeamKernel(_lay_rows)
"""The kernel that lays rows out in blocks: as many parts as one likes."""
multiply_few, multiply_many = TeamKernel(_multiply_few), TeamKernel(_multiply_many)
"""Those that multiply few rows, and more: a part for each group of rows and each group of panels."""
