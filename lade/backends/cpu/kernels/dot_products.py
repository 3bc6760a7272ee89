"""GEMM by dot-product instructions with weights in panels; each output is one chain of fused additions."""

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
from lade.backends.cpu.kernels.instructions import clear, copy, field, next_part, stack_memory
from lade.backends.cpu.kernels.lanes import LINE
from lade.backends.cpu.kernels.panel_products import load_product, write_results
from lade.compilation import TeamKernel


class RowBlocks(NamedTuple):
    """Arguments of the kernel that lays bfloat16 rows out in blocks, all integers.

    Attributes:
        x: address of the rows, `[rows, inputs]`, contiguous.
        to: address of the result, `[rows / together, blocks, together, 64 bytes]`. The last block is padded with zeros;
            rows that pad the last group are not written.
        rows, inputs: shape of `x`.
        together: number of rows interleaved in a group, see `rows_together`.
    """

    x: int
    to: int
    rows: int
    inputs: int
    together: int


def _block_rows(address: Any) -> None:
    """Lay out the rows of a `RowBlocks`; each part takes an equal share of them."""
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
    """Build the kernel for few rows: of int8 codes (1) or bfloat16 (0), a compile-time constant."""

    def multiply_few(address: Any) -> None:
        """Multiply few rows; bound by the time it takes to read the weights once."""
        product, sums = load_product(address), stack_memory(FEW_SUMS)
        panels, size = -(-product.outputs // DOT_PANEL), PANEL_BLOCK * product.blocks
        part = next_part(address)
        while part < field(address, 1):
            first = product.panel_group * part
            for panel in range(first, min(first + product.panel_group, panels)):
                start, weight = product.start + LINE * panel, product.weight + size * panel
                sum_few(codes, product.together, product.x, start, weight, product.blocks, sums)
                write_results(product, 0, product.rows, DOT_PANEL * panel, sums, DOT_PANEL)
            part = next_part(address)

    return multiply_few


def _many(codes: int) -> Callable[[Any], None]:
    """Build the kernel for many rows: of int8 codes (1) or bfloat16 (0), a compile-time constant."""

    def multiply_many(address: Any) -> None:
        """Multiply many rows; a group of panels stays in a core's cache while a group of rows passes through it."""
        product, sums = load_product(address), stack_memory(MANY_SUMS)
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
                        write_results(product, row, rows, DOT_PANEL * panel, sums, 2 * DOT_PANEL)
                    else:
                        sum_group(codes, 1, x, start, weight, 0, blocks, sums)
                        write_results(product, row, rows, DOT_PANEL * panel, sums, DOT_PANEL)
            part = next_part(address)

    return multiply_many


block_rows = TeamKernel(_block_rows)
"""Team kernel that lays rows out in blocks; takes any number of parts."""
multiply_few, multiply_many = TeamKernel(_few(0)), TeamKernel(_many(0))
"""Team kernels for few and many bfloat16 rows; one part per group of rows and group of panels."""
multiply_few_codes, multiply_many_codes = TeamKernel(_few(1)), TeamKernel(_many(1))
"""Team kernels for few and many rows of int8 codes; parts as above."""
