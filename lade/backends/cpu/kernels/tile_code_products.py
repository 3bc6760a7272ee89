"""Int8 GEMM by AMX tiles: integer sums, exact in any order."""

from __future__ import annotations

from typing import Any

from lade.backends.cpu.kernels.codes import CODES
from lade.backends.cpu.kernels.instructions import field, next_part, prefetch, stack_memory
from lade.backends.cpu.kernels.panel_products import load_product, write_results
from lade.backends.cpu.kernels.tiles import (
    AHEAD,
    BLOCK,
    PANEL,
    ROW_BYTES,
    ROWS,
    SUMS_BYTES,
    TILE,
    load_tile,
    multiply_int8,
    release_tiles,
    shape_tiles,
    store_panel,
    store_square,
    zero_sums,
)
from lade.compilation import TeamKernel, inlined


@inlined
def _read_ahead(weight: Any) -> None:
    for line in range(0, TILE, ROW_BYTES):
        prefetch(weight + AHEAD + line, 3)


@inlined
def _sum_up_few(codes: Any, rows: Any, blocks: Any, weight: Any, sums: Any) -> None:
    """Compute sums `[rows, 64]` of up to 16 rows by a panel, prefetching it."""
    zero_sums()
    for _ in range(blocks):
        load_tile(4, codes, ROW_BYTES)
        _read_ahead(weight)
        load_tile(5, weight, ROW_BYTES)
        _read_ahead(weight + TILE)
        multiply_int8(0, 4, 5)
        load_tile(6, weight + TILE, ROW_BYTES)
        _read_ahead(weight + 2 * TILE)
        multiply_int8(1, 4, 6)
        load_tile(7, weight + 2 * TILE, ROW_BYTES)
        _read_ahead(weight + 3 * TILE)
        multiply_int8(2, 4, 7)
        load_tile(5, weight + 3 * TILE, ROW_BYTES)
        multiply_int8(3, 4, 5)
        codes, weight = codes + CODES * rows, weight + BLOCK
    store_panel(sums)


@inlined
def _sum_up_many(codes: Any, blocks: Any, weight: Any, sums: Any) -> None:
    """Compute sums `[32, 32]` of 32 rows by half a panel."""
    below = codes + TILE * blocks
    zero_sums()
    for _ in range(blocks):
        load_tile(6, weight, ROW_BYTES)
        load_tile(4, codes, ROW_BYTES)
        multiply_int8(0, 4, 6)
        load_tile(7, weight + TILE, ROW_BYTES)
        multiply_int8(1, 4, 7)
        load_tile(5, below, ROW_BYTES)
        multiply_int8(2, 5, 6)
        multiply_int8(3, 5, 7)
        codes, below, weight = codes + TILE, below + TILE, weight + BLOCK
    store_square(sums)


def _multiply_few_codes(address: Any) -> None:
    """Multiply up to 16 rows, see `PanelProduct`; bound by the time it takes to read the weights once."""
    product, sums = load_product(address), stack_memory(SUMS_BYTES)
    panels = -(-product.outputs // PANEL)
    shape_tiles(product.rows)
    part = next_part(address)
    while part < field(address, 1):
        first = product.panel_group * part
        for panel in range(first, min(first + product.panel_group, panels)):
            weight = product.weight + BLOCK * product.blocks * panel
            _sum_up_few(product.x, product.rows, product.blocks, weight, sums)
            write_results(product, 0, product.rows, PANEL * panel, sums, PANEL)
        part = next_part(address)
    release_tiles()


def _multiply_many_codes(address: Any) -> None:
    """Multiply more than 16 rows; a group of panels stays in a core's cache while a group of rows passes through it."""
    product, sums = load_product(address), stack_memory(SUMS_BYTES)
    panels = -(-product.outputs // PANEL)
    groups = -(-panels // product.panel_group)
    shape_tiles(ROWS)
    part = next_part(address)
    while part < field(address, 1):
        top, first = product.row_group * (part // groups), product.panel_group * (part % groups)
        for row in range(top, min(top + product.row_group, product.rows), 2 * ROWS):
            codes, rows = product.x + CODES * product.blocks * row, min(2 * ROWS, product.rows - row)
            for half in range(2 * first, 2 * min(first + product.panel_group, panels)):
                weight = product.weight + BLOCK * product.blocks * (half // 2) + 2 * TILE * (half % 2)
                _sum_up_many(codes, product.blocks, weight, sums)
                write_results(product, row, rows, PANEL // 2 * half, sums, PANEL // 2)
        part = next_part(address)
    release_tiles()


multiply_few_codes, multiply_many_codes = TeamKernel(_multiply_few_codes), TeamKernel(_multiply_many_codes)
"""Team kernels for up to 16 rows of codes, and for more; one part per group of rows and group of panels."""
