"""Matrix products for processors with tiles (AMX), compiled: each output is one chain of sums, in the order of inputs.

A tile is a register of 16 rows of 64 bytes. One instruction adds to each number of a tile `[16 rows, 16 outputs]` the
products of 32 inputs in bfloat16 (64 in int8), in an order of its own, which no other row changes. So what an output is
depends on its row and its weights alone, however many rows there are and however the work is cut.

Weights lie in *panels* of 64 outputs, `[N / 64][K / 32][4][16][16][2]` in bfloat16: the panel, the block of inputs, the
tile, and in it pairs of inputs by outputs (`[N / 64][K / 64][4][16][16][4]` in int8, fours of inputs). Inputs and
outputs that fill up the last block and the last panel are zeros. So a product reads a panel from its first byte to its
last, a kilobyte for each tile.

All of it is in one file, since numba looks at the file alone to see whether its machine code is up to date. Addresses
and strides are in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.registry import cpu_target

from lade.decoding.compilation import CONSTANT, inlined, instruction

ROWS, TILE = 16, 1024
"""Rows of a tile, and its bytes."""
PANEL = 64
"""Outputs of a panel of weights."""
BLOCK = 4 * TILE
"""Bytes of a panel's block of inputs."""
BLOCK_INPUTS = 32
"""Inputs of such a block in bfloat16; of int8 there are twice as many."""
_ROW = 64  # bytes


@cache
def has_tiles() -> bool:
    """Whether this processor has tiles, the system lets this process use them, and numba compiles for them."""
    told = getattr(torch.cpu, "_init_amx", None)  # which asks Linux for them
    _, _, features = cast(Any, cpu_target).target_context.codegen().magic_tuple()
    compiles = {"+amx-tile", "+amx-bf16", "+amx-int8"} <= set(features.split(","))
    return bool(compiles and not cast(Any, numba).config.DISABLE_JIT and told is not None and told())


# -------------------------------------------------------------------------------------------------------- instructions

_utils = cast(Any, cgutils)
_AT, _NONE = numba.int64, numba.void
_INT, _LONG, _BYTE = ir.IntType(32), ir.IntType(64), ir.IntType(8)


def _call(builder: Any, name: str, *values: Any) -> None:
    """One of LLVM's intrinsic functions, of which numbers of tiles are bytes."""
    given = [ir.Constant(_BYTE, value) if isinstance(value, int) else value for value in values]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
    builder.call(_utils.get_or_insert_function(builder.module, kind, name), given)


def _pointer(builder: Any, address: Any, kind: Any = _BYTE) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@instruction(_NONE, _AT)
def _configure(builder: Any, address: Any) -> None:
    """Say how many rows and bytes the tiles have, see `_shape_tiles`; all become zero."""
    _call(builder, "llvm.x86.ldtilecfg", _pointer(builder, address))


@instruction(_NONE)
def _release(builder: Any) -> None:
    """Give the tiles up, which makes changes of threads cheap again."""
    _call(builder, "llvm.x86.tilerelease")


@instruction(_NONE, CONSTANT)
def _zero(builder: Any, tile: Any) -> None:
    _call(builder, "llvm.x86.tilezero", tile)


@instruction(_NONE, CONSTANT, _AT, _AT)
def _load_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    """Its rows, so many bytes one behind the other."""
    _call(builder, "llvm.x86.tileloadd64", tile, _pointer(builder, address), stride)


@instruction(_NONE, CONSTANT, _AT, _AT)
def _stream_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    """The same of what will not be read again soon."""
    _call(builder, "llvm.x86.tileloaddt164", tile, _pointer(builder, address), stride)


@instruction(_NONE, CONSTANT, _AT, _AT)
def _store_tile(builder: Any, tile: Any, address: Any, stride: Any) -> None:
    _call(builder, "llvm.x86.tilestored64", tile, _pointer(builder, address), stride)


@instruction(_NONE, CONSTANT, CONSTANT, CONSTANT)
def _multiply_bfloat16(builder: Any, sums: Any, rows: Any, weights: Any) -> None:
    """Add the products of two tiles to a third one, of float32."""
    _call(builder, "llvm.x86.tdpbf16ps", sums, rows, weights)


@instruction(_NONE, CONSTANT, CONSTANT, CONSTANT)
def _multiply_int8(builder: Any, sums: Any, rows: Any, weights: Any) -> None:
    """The same of signed bytes, and of int32."""
    _call(builder, "llvm.x86.tdpbssd", sums, rows, weights)


@instruction(_NONE, _AT)
def _prefetch(builder: Any, address: Any) -> None:
    """Begin to read 64 bytes into the nearest cache; where there is no memory nothing happens."""
    read, near, data = (ir.Constant(_INT, value) for value in (0, 3, 1))
    _call(builder, "llvm.prefetch.p0", _pointer(builder, address), read, near, data)


@instruction(numba.int64, CONSTANT)
def _room(builder: Any, size: Any) -> Any:
    """Address of so many bytes of a function's own, until it returns."""
    place = _utils.alloca_once(builder, ir.ArrayType(_BYTE, size))
    place.align = _ROW
    return builder.ptrtoint(place, _LONG)


@instruction(_NONE, _AT, numba.int64)
def _clear(builder: Any, to: Any, count: Any) -> None:
    """So many bytes."""
    _utils.memset(builder, _pointer(builder, to), count, 0)


@instruction(_NONE, _AT, _AT, numba.int64)
def _copy(builder: Any, to: Any, address: Any, count: Any) -> None:
    """So many bytes."""
    _utils.raw_memcpy(builder, _pointer(builder, to), _pointer(builder, address), count, 1)


@instruction(numba.int64, _AT, numba.int64)
def _field(builder: Any, address: Any, number: Any) -> Any:
    """The integer of that number from an address on."""
    place = builder.add(address, builder.mul(number, ir.Constant(_LONG, 8)))
    return builder.load(_pointer(builder, place, _LONG), align=8)


@instruction(_NONE, _AT, numba.int64)
def _set_byte(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.trunc(value, _BYTE), _pointer(builder, address), align=1)


@instruction(numba.int64, _AT)
def _next(builder: Any, address: Any) -> Any:
    """Count an integer up, which no other thread comes between, and return what it was."""
    return builder.atomic_rmw("add", _pointer(builder, address, _LONG), ir.Constant(_LONG, 1), "monotonic")


@inlined
def _shape_tiles(rows: Any) -> None:
    """Configure all tiles but weights' (number 5 to 7) to so many rows, and those to 16."""
    shapes = _room(64)
    _clear(shapes, 64)
    _set_byte(shapes, 1)
    for tile in range(8):
        _set_byte(shapes + 16 + 2 * tile, _ROW)
        _set_byte(shapes + 48 + tile, ROWS if tile > 4 else rows)
    _configure(shapes)
