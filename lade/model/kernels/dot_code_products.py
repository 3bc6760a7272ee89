"""Rows of int8 codes by weights in panels, by dot products: exact sums."""

from __future__ import annotations

from typing import Any

from lade.decoding.compilation import TeamKernel, inlined
from lade.model.kernels.code_products import give_sums_out
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
    sum_codes,
)
from lade.model.kernels.instructions import field, next_part, room
from lade.model.kernels.lanes import LINE


@inlined
def _few_codes(together: Any, x: Any, start: Any, weight: Any, blocks: Any, to: Any) -> None:
    """Sums `[together, 16]` of few rows of codes by one panel."""
    if together == 1:
        sum_codes(1, 1, x, start, weight, 0, blocks, to)
    elif together == 2:
        sum_codes(2, 1, x, start, weight, 0, blocks, to)
    elif together == 4 or not WIDE:
        sum_codes(4, 1, x, start, weight, 0, blocks, to)
    elif together == 6:
        sum_codes(6, 1, x, start, weight, 0, blocks, to)
    elif together == 8:
        sum_codes(8, 1, x, start, weight, 0, blocks, to)
    elif together == 12:
        sum_codes(12, 1, x, start, weight, 0, blocks, to)
    elif together == 16:
        sum_codes(16, 1, x, start, weight, 0, blocks, to)
    else:
        sum_codes(24, 1, x, start, weight, 0, blocks, to)


def _multiply_few_codes(address: Any) -> None:
    """A product of few rows, which takes little longer than its weights take to be read."""
    product, sums = asked_for(address), room(FEW_SUMS)
    panels, size = -(-product.outputs // DOT_PANEL), PANEL_BLOCK * product.blocks
    part = next_part(address)
    while part < field(address, 1):
        first = product.panel_group * part
        for panel in range(first, min(first + product.panel_group, panels)):
            start, weight = product.start + LINE * panel, product.weight + size * panel
            _few_codes(product.together, product.x, start, weight, product.blocks, sums)
            give_sums_out(product, 0, product.rows, DOT_PANEL * panel, sums, DOT_PANEL)
        part = next_part(address)


def _multiply_many_codes(address: Any) -> None:
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
                    sum_codes(TOGETHER, 2, x, start, weight, size, blocks, sums)
                    give_sums_out(product, row, rows, DOT_PANEL * panel, sums, 2 * DOT_PANEL)
                else:
                    sum_codes(TOGETHER, 1, x, start, weight, 0, blocks, sums)
                    give_sums_out(product, row, rows, DOT_PANEL * panel, sums, DOT_PANEL)
        part = next_part(address)


multiply_few_codes, multiply_many_codes = TeamKernel(_multiply_few_codes), TeamKernel(_multiply_many_codes)
"""The kernels that multiply few rows, and more: a part for each group of rows and each group of panels."""
