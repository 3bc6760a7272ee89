"""AMX tiles, registers of 16 rows of 64 bytes: instructions, and the memory layout of rows and weights.

One instruction adds to each element of a tile `[16 rows, 16 outputs]` the products of 32 bfloat16 inputs (64 int8
inputs), in an order that no other row affects. So an output depends on its row and its weights alone, whatever the
number of rows and however the work is split.

Weights lie in *panels* of 64 outputs, `[N / 64][K / 32][4][16][16][2]` in bfloat16: panel, block of inputs, tile, and
within it pairs of inputs by outputs (`[N / 64][K / 64][4][16][16][4]` in int8, with four inputs instead of a pair). The
last block and the last panel are padded with zeros. So a product reads a panel front to back, one KiB per tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.instructions import (
    AT,
    BYTE,
    NONE,
    call_intrinsic,
    clear,
    has_features,
    pointer,
    stack_memory,
)
from lade.compilation import CONSTANT, inlined, instruction

ROWS, TILE = 16, 1024
"""Rows of a tile, and its bytes."""
PANEL = 64
"""Outputs per panel of weights."""
BLOCK = 4 * TILE
"""Bytes of one block of inputs of a panel."""
BLOCK_INPUTS = 32
"""Bfloat16 inputs per block; int8 has twice as many."""
ROW_BYTES, SUMS_BYTES = 64, 4 * TILE
"""Bytes of a tile's row, and of the accumulators in four tiles."""
AHEAD = 2 * BLOCK
"""Prefetch distance in bytes of weights."""


@cache
def has_tiles() -> bool:
    """Return True if the processor has AMX, the system grants it to this process, and numba compiles for it."""
    request = getattr(torch.cpu, "_init_amx", None)  # requests permission from Linux
    return bool(has_features("amx-tile", "amx-bf16", "amx-int8") and request is not None and request())


def _call(builder: Any, name: str, *values: Any) -> None:
    """Emit a call of an LLVM intrinsic; tile indices are byte constants."""
    given = [ir.Constant(BYTE, value) if isinstance(value, int) else value for value in values]
    call_intrinsic(builder, name, ir.VoidType(), *given)


@instruction(NONE, AT)
def _configure(builder: Any, address: Any) -> None:
    """Load the tile configuration, see `shape_tiles`; zeroes all tiles."""
    _call(builder, "llvm.x86.ldtilecfg", pointer(builder, address))


@instruction(NONE)
def release_tiles(builder: Any) -> None:
    """Release the tiles, which makes context switches cheap again."""
    _call(builder, "llvm.x86.tilerelease")


@instruction(NONE, CONSTANT)
def zero_tile(builder: Any, tile: Any) -> None:
    """Set a tile to zero."""
    _call(builder, "llvm.x86.tilezero", tile)


@instruction(NONE, CONSTANT, AT, AT)
def load_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    """Load a tile from rows `stride` bytes apart."""
    _call(builder, "llvm.x86.tileloadd64", tile, pointer(builder, address), stride)


@instruction(NONE, CONSTANT, AT, AT)
def store_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    """Store a tile to rows `stride` bytes apart."""
    _call(builder, "llvm.x86.tilestored64", tile, pointer(builder, address), stride)


@instruction(NONE, CONSTANT, CONSTANT, CONSTANT)
def multiply_bfloat16(builder: Any, sums: Any, rows: Any, weights: Any) -> None:
    """Add the product of two bfloat16 tiles to a float32 tile."""
    _call(builder, "llvm.x86.tdpbf16ps", sums, rows, weights)


@instruction(NONE, CONSTANT, CONSTANT, CONSTANT)
def multiply_int8(builder: Any, sums: Any, rows: Any, weights: Any) -> None:
    """Add the product of two signed int8 tiles to an int32 tile."""
    _call(builder, "llvm.x86.tdpbssd", sums, rows, weights)


@instruction(NONE, AT, numba.int64)
def _set_byte(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.trunc(value, BYTE), pointer(builder, address), align=1)


@inlined
def zero_sums() -> None:
    """Zero the accumulators, tiles 0 to 3."""
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)


@inlined
def store_panel(sums: Any) -> None:
    """Store the accumulators side by side: `[rows, 64]`."""
    store_tile(0, sums, 4 * PANEL)
    store_tile(1, sums + ROW_BYTES, 4 * PANEL)
    store_tile(2, sums + 2 * ROW_BYTES, 4 * PANEL)
    store_tile(3, sums + 3 * ROW_BYTES, 4 * PANEL)


@inlined
def store_square(sums: Any) -> None:
    """Store the accumulators two by two: `[32, 32]`."""
    store_tile(0, sums, 2 * ROW_BYTES)
    store_tile(1, sums + ROW_BYTES, 2 * ROW_BYTES)
    store_tile(2, sums + 2 * TILE, 2 * ROW_BYTES)
    store_tile(3, sums + 2 * TILE + ROW_BYTES, 2 * ROW_BYTES)


@inlined
def shape_tiles(rows: Any) -> None:
    """Configure tiles 0 to 4 to `rows` rows, and the weight tiles 5 to 7 to 16 rows."""
    shapes = stack_memory(64)
    clear(shapes, 64)
    _set_byte(shapes, 1)
    for tile in range(8):
        _set_byte(shapes + 16 + 2 * tile, ROW_BYTES)
        _set_byte(shapes + 48 + tile, ROWS if tile > 4 else rows)
    _configure(shapes)
