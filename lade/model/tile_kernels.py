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
from typing import Any, NamedTuple, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.registry import cpu_target

from lade.decoding.compilation import CONSTANT, TeamKernel, inlined, instruction

ROWS, TILE = 16, 1024
"""Rows of a tile, and its bytes."""
PANEL = 64
"""Outputs of a panel of weights."""
BLOCK = 4 * TILE
"""Bytes of a panel's block of inputs."""
BLOCK_INPUTS = 32
"""Inputs of such a block in bfloat16; of int8 there are twice as many."""
_ROW, _PANEL_ROW = 64, 4 * PANEL
_SUMS = 4 * TILE  # bytes


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


# ------------------------------------------------------------------------------------------------------------ bfloat16

_AHEAD = 2 * BLOCK  # bytes: what is read of the weights before it is needed
_FLOATS, _HALVES, _INTS = (ir.VectorType(kind, ROWS) for kind in (ir.FloatType(), ir.IntType(16), _INT))


class Product(NamedTuple):
    """Rows by the weights of a layer in bfloat16.

    Attributes:
        x: where the rows lie, `[rows, inputs]`, contiguous.
        rest: the inputs behind the last whole block, `[rows, 32]`, filled up with zeros; 0 if there are none.
        weight: the panels.
        bias: `[outputs]`; 0 if there is none.
        out: `[rows, outputs]`, contiguous, what becomes of it.
        rows, inputs, outputs: how many.
    """

    x: int
    rest: int
    weight: int
    bias: int
    out: int
    rows: int
    inputs: int
    outputs: int


@inlined
def _product(address: Any) -> Any:
    """From the fields behind the header that a team is given."""
    places = _field(address, 2), _field(address, 3), _field(address, 4), _field(address, 5), _field(address, 6)
    return Product(*places, _field(address, 7), _field(address, 8), _field(address, 9))


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * ROWS)


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2)


@instruction(_NONE, _AT, _AT)
def _add_bfloat16(builder: Any, to: Any, address: Any) -> None:
    """Add 16 numbers in bfloat16 to as many in float32."""
    bits = builder.shl(builder.zext(_read(builder, address, _HALVES), _INTS), _all(16))
    found = builder.fadd(_read(builder, to, _FLOATS), builder.bitcast(bits, _FLOATS))
    builder.store(found, _pointer(builder, to, _FLOATS), align=4)


@instruction(_NONE, _AT, _AT)
def _round_off(builder: Any, to: Any, address: Any) -> None:
    """Write 16 numbers in float32 as bfloat16: the nearest, of two as near the even one."""
    bits = _read(builder, address, _INTS)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _all(0x7FFF))), _all(16))
    number = builder.icmp_unsigned("<=", builder.and_(bits, _all(0x7FFFFFFF)), _all(0x7F800000))
    rounded = builder.select(number, rounded, _all(0x7FC0))
    builder.store(builder.trunc(rounded, _HALVES), _pointer(builder, to, _HALVES), align=2)


@inlined
def _give_out(product: Any, row: Any, rows: Any, output: Any, sums: Any, stride: Any, tiles: Any) -> None:
    """Round so many rows of so many tiles of sums off, with the bias added, into their place.

    What is left over of the outputs goes by way of `spare`, so that nothing behind them is read or written.
    """
    spare = _room(_ROW)
    for column in range(0, min(ROWS * tiles, product.outputs - output), ROWS):
        count = min(ROWS, product.outputs - output - column)
        bias = product.bias + 2 * (output + column)
        if product.bias and count < ROWS:
            _copy(spare, bias, 2 * count)
            bias = spare
        for at in range(rows):
            found, to = (
                sums + stride * at + 4 * column,
                product.out + 2 * ((row + at) * product.outputs + output + column),
            )
            if product.bias:
                _add_bfloat16(found, bias)
            if count < ROWS:
                _round_off(found, found)
                _copy(to, found, 2 * count)
            else:
                _round_off(to, found)


@inlined
def _share(address: Any, product: Any, part: Any) -> Any:
    """The first panel of a part of the work, and the one behind the last."""
    parts, panels = _field(address, 1), -(-product.outputs // PANEL)
    return panels * part // parts, panels * (part + 1) // parts


@inlined
def _add_block(rows: Any, stride: Any, weights: Any) -> None:
    """The products of a block of inputs of up to 16 rows and a whole panel."""
    _load_tile(4, rows, stride)
    _load_tile(5, weights, _ROW)
    _load_tile(6, weights + TILE, _ROW)
    _load_tile(7, weights + 2 * TILE, _ROW)
    _multiply_bfloat16(0, 4, 5)
    _multiply_bfloat16(1, 4, 6)
    _multiply_bfloat16(2, 4, 7)
    _load_tile(5, weights + 3 * TILE, _ROW)
    _multiply_bfloat16(3, 4, 5)


def _multiply_few(address: Any) -> None:
    """A product of at most 16 rows, which takes as long as its weights take to be read."""
    product = _product(address)
    sums, whole = _room(_SUMS), product.inputs // BLOCK_INPUTS
    _shape_tiles(product.rows)
    part = _next(address)
    while part < _field(address, 1):
        first, last = _share(address, product, part)
        at = product.weight + first * BLOCK * -(-product.inputs // BLOCK_INPUTS)
        for panel in range(first, last):
            _zero(0)
            _zero(1)
            _zero(2)
            _zero(3)
            for block in range(whole):
                for line in range(0, BLOCK, _ROW):
                    _prefetch(at + _AHEAD + line)
                _add_block(product.x + _ROW * block, 2 * product.inputs, at)
                at += BLOCK
            if product.rest:
                _add_block(product.rest, _ROW, at)
                at += BLOCK
            _store_tile(0, sums, _PANEL_ROW)
            _store_tile(1, sums + _ROW, _PANEL_ROW)
            _store_tile(2, sums + 2 * _ROW, _PANEL_ROW)
            _store_tile(3, sums + 3 * _ROW, _PANEL_ROW)
            _give_out(product, 0, product.rows, PANEL * panel, sums, _PANEL_ROW, 4)
        part = _next(address)
    _release()


@inlined
def _add_square(upper: Any, lower: Any, stride: Any, weights: Any) -> None:
    """The products of a block of inputs of twice 16 rows and half a panel."""
    _load_tile(6, weights, _ROW)
    _load_tile(4, upper, stride)
    _multiply_bfloat16(0, 4, 6)
    _load_tile(7, weights + TILE, _ROW)
    _multiply_bfloat16(1, 4, 7)
    _load_tile(5, lower, stride)
    _multiply_bfloat16(2, 5, 6)
    _multiply_bfloat16(3, 5, 7)


def _multiply_many(address: Any) -> None:
    """A product of more than 16 rows: 32 of them by half a panel at a time.

    The last tiles of rows may begin before the end of those before them, and write the same bits once more.
    """
    product = _product(address)
    sums, whole, stride = _room(_SUMS), product.inputs // BLOCK_INPUTS, 2 * product.inputs
    _shape_tiles(ROWS)
    part = _next(address)
    while part < _field(address, 1):
        first, last = _share(address, product, part)
        for half in range(2 * first, 2 * last):
            weights = product.weight + BLOCK * -(-product.inputs // BLOCK_INPUTS) * (half // 2) + 2 * TILE * (half % 2)
            for row in range(0, product.rows, 2 * ROWS):
                upper = max(0, min(row, product.rows - 2 * ROWS))
                lower = min(upper + ROWS, product.rows - ROWS)
                a, b, at = product.x + stride * upper, product.x + stride * lower, weights
                _zero(0)
                _zero(1)
                _zero(2)
                _zero(3)
                for _ in range(whole):
                    _add_square(a, b, stride, at)
                    a, b, at = a + _ROW, b + _ROW, at + BLOCK
                if product.rest:
                    _add_square(product.rest + _ROW * upper, product.rest + _ROW * lower, _ROW, at)
                _store_tile(0, sums, 2 * _ROW)
                _store_tile(1, sums + _ROW, 2 * _ROW)
                _store_tile(2, sums + 2 * TILE, 2 * _ROW)
                _store_tile(3, sums + 2 * TILE + _ROW, 2 * _ROW)
                _give_out(product, upper, ROWS, PANEL // 2 * half, sums, 2 * _ROW, 2)
                _give_out(product, lower, ROWS, PANEL // 2 * half, sums + 2 * TILE, 2 * _ROW, 2)
        part = _next(address)
    _release()


multiply_few, multiply_many = TeamKernel(_multiply_few), TeamKernel(_multiply_many)
"""The kernels, each for a team of threads: a product of up to 16 rows, and one of more."""
