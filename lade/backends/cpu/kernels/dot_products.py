"""Rows by weights in panels, by dot products: one chain of sums for each output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lade.backends.cpu.kernels.dots import (
    COLUMNS,
    DOT_BLOCK,
    DOT_PANEL,
    FEW_SUMS,
    MANY_SUMS,
    PANEL_BLOCK,
    TOGETHER,
    sum_few,
    sum_group,
)
from lade.backends.cpu.kernels.instructions import clear, copy, field, next_part, room
from lade.backends.cpu.kernels.lanes import LINE
from lade.backends.cpu.kernels.panel_products import asked_for, give_out
from lade.compilation import TeamKernel


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


def _few(codes: int) -> Callable[[Any], None]:
    """Of codes (1), or of bfloat16 (0), which is known when it is compiled."""

    def multiply_few(address: Any) -> None:
        """A product of few rows, which takes little longer than its weights take to be read."""
        product, sums = asked_for(address), room(FEW_SUMS)
        panels, size = -(-product.outputs // DOT_PANEL), PANEL_BLOCK * product.blocks
        part = next_part(address)
        while part < field(address, 1):
            first = product.panel_group * part
            for panel in range(first, min(first + product.panel_group, panels)):
                start, weight = product.start + LINE * panel, product.weight + size * panel
                sum_few(codes, product.together, product.x, start, weight, product.blocks, sums)
                give_out(product, 0, product.rows, DOT_PANEL * panel, sums, DOT_PANEL)
            part = next_part(address)

    return multiply_few


def _many(codes: int) -> Callable[[Any], None]:
    """Likewise."""

    def multiply_many(address: Any) -> None:
        """A product of more rows: a group of panels stays in a core's cache while a group of rows goes by."""
        product, sums = asked_for(address), room(MANY_SUMS)
        panels, size = -(-product.outputs // DOT_PANEL), PANEL_BLOCK * product.blocks
        groups, blocks = -(-panels // product.panel_group), product.blocks
        part = next_part(address)
        while part < field(address, 1):
            top, first = product.row_group * (part // groups), product.panel_group * (part % groups)
            for panel in range(first, min(first + product.panel_group, panels), COLUMNS):
                start, weight = product.start + LINE * panel, product.weight + size * panel
                for row in range(top, min(top + product.row_group, product.rows), TOGETHER):
                    x, rows = product.x + DOT_BLOCK * blocks * row, min(TOGETHER, product.rows - row)
                    if panel + 1 < panels and COLUMNS == 2:
                        sum_group(codes, 2, x, start, weight, size, blocks, sums)
                        give_out(product, row, rows, DOT_PANEL * panel, sums, 2 * DOT_PANEL)
                    else:
                        sum_group(codes, 1, x, start, weight, 0, blocks, sums)
                        give_out(product, row, rows, DOT_PANEL * panel, sums, DOT_PANEL)
            part = next_part(address)

    return multiply_many


lay_rows = TeamKernel(_lay_rows)
"""The kernel that lays rows out in blocks: as many parts as one likes."""
multiply_few, multiply_many = TeamKernel(_few(0)), TeamKernel(_many(0))
"""Those that multiply rows in bfloat16, few and more: a part for each group of rows and each group of panels."""
multiply_few_codes, multiply_many_codes = TeamKernel(_few(1)), TeamKernel(_many(1))
"""The same of codes."""
