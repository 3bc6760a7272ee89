"""Tiles (AMX), registers of 16 rows of 64 bytes: their instructions, and how rows and weights lie for them.

One instruction adds to each number of a tile `[16 rows, 16 outputs]` the products of 32 inputs in bfloat16 (64 in
int8), in an order of its own, which no other row changes. So what an output is depends on its row and its weights
alone, however many rows there are and however the work is cut.

Weights lie in *panels* of 64 outputs, `[N / 64][K / 32][4][16][16][2]` in bfloat16: the panel, the block of inputs, the
tile, and in it pairs of inputs by outputs (`[N / 64][K / 64][4][16][16][4]` in int8, fours of inputs). Inputs and
outputs that fill up the last block and the last panel are zeros. So a product reads a panel from its first byte to its
last, a kilobyte for each tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.instructions import AT, BYTE, NONE, call_intrinsic, clear, pointer, room
from lade.backends.cpu.kernels.processor import has_features
from lade.compilation import CONSTANT, inlined, instruction

ROWS, TILE = 16, 1024
"""Rows of a tile, and its bytes."""
PANEL = 64
"""Outputs of a panel of weights."""
BLOCK = 4 * TILE
"""Bytes of a panel's block of inputs."""
BLOCK_INPUTS = 32
"""Inputs of such a block in bfloat16; of int8 there are twice as many."""
ROW_BYTES, SUMS_BYTES = 64, 4 * TILE
"""Bytes of a tile's row, and of the sums in four tiles."""
AHEAD = 2 * BLOCK
"""Bytes: what is read of the weights before it is needed."""


@cache
def has_tiles() -> bool:
    """Whether this processor has tiles, the system lets this process use them, and numba compiles for them."""
    told = getattr(torch.cpu, "_init_amx", None)  # which asks Linux for them
    return bool(has_features("amx-tile", "amx-bf16", "amx-int8") and told is not None and told())


def _call(builder: Any, name: str, *values: Any) -> None:
    """One of LLVM's intrinsic functions, of which numbers of tiles are bytes."""
    given = [ir.Constant(BYTE, value) if isinstance(value, int) else value for value in values]
    call_intrinsic(builder, name, ir.VoidType(), *given)


@instruction(NONE, AT)
def _configure(builder: Any, address: Any) -> None:
    """Say how many rows and bytes the tiles have, see `shape_tiles`; all become zero."""
    _call(builder, "llvm.x86.ldtilecfg", pointer(builder, address))


@instruction(NONE)
def release_tiles(builder: Any) -> None:
    """Give the tiles up, which makes changes of threads cheap again."""
    _call(builder, "llvm.x86.tilerelease")


@instruction(NONE, CONSTANT)
def zero_tile(builder: Any, tile: Any) -> None:
    """Make its numbers zeros."""
    _call(builder, "llvm.x86.tilezero", tile)


@instruction(NONE, CONSTANT, AT, AT)
def load_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    """Its rows, so many bytes one behind the other."""
    _call(builder, "llvm.x86.tileloadd64", tile, pointer(builder, address), stride)


@instruction(NONE, CONSTANT, AT, AT)
def store_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    """Into rows likewise."""
    _call(builder, "llvm.x86.tilestored64", tile, pointer(builder, address), stride)


@instruction(NONE, CONSTANT, CONSTANT, CONSTANT)
def multiply_bfloat16(builder: Any, sums: Any, rows: Any, weights: Any) -> None:
    """Add the products of two tiles to a third one, of float32."""
    _call(builder, "llvm.x86.tdpbf16ps", sums, rows, weights)


@instruction(NONE, CONSTANT, CONSTANT, CONSTANT)
def multiply_int8(builder: Any, sums: Any, rows: Any, weights: Any) -> None:
    """The same of signed bytes, and of int32."""
    _call(builder, "llvm.x86.tdpbssd", sums, rows, weights)


@instruction(NONE, AT, numba.int64)
def _set_byte(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.trunc(value, BYTE), pointer(builder, address), align=1)


@inlined
def zero_sums() -> None:
    """Begin the sums, tiles 0 to 3, with nothing."""
    zero_tile(0)
    zero_tile(1)
    zero_tile(2)
    zero_tile(3)


@inlined
def store_panel(sums: Any) -> None:
    """The sums, tiles 0 to 3, side by side: `[rows, 64]`."""
    store_tile(0, sums, 4 * PANEL)
    store_tile(1, sums + ROW_BYTES, 4 * PANEL)
    store_tile(2, sums + 2 * ROW_BYTES, 4 * PANEL)
    store_tile(3, sums + 3 * ROW_BYTES, 4 * PANEL)


@inlined
def store_square(sums: Any) -> None:
    """The same two by two: `[32, 32]`."""
    store_tile(0, sums, 2 * ROW_BYTES)
    store_tile(1, sums + ROW_BYTES, 2 * ROW_BYTES)
    store_tile(2, sums + 2 * TILE, 2 * ROW_BYTES)
    store_tile(3, sums + 2 * TILE + ROW_BYTES, 2 * ROW_BYTES)


@inlined
def shape_tiles(rows: Any) -> None:
    """Configure all tiles but weights' (number 5 to 7) to so many rows, and those to 16."""
    shapes = room(64)
    clear(shapes, 64)
    _set_byte(shapes, 1)
    for tile in range(8):
        _set_byte(shapes + 16 + 2 * tile, ROW_BYTES)
        _set_byte(shapes + 48 + tile, ROWS if tile > 4 else rows)
    _configure(shapes)
