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
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import models, register_model

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


@instruction(_NONE, _AT, CONSTANT)
def _prefetch(builder: Any, address: Any, near: Any) -> None:
    """Begin to read 64 bytes into the nearest cache (3), or the second one (2); without memory nothing happens."""
    read, near, data = (ir.Constant(_INT, value) for value in (0, near, 1))
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
def _zero_sums() -> None:
    """Begin the sums, tiles 0 to 3, with nothing."""
    _zero(0)
    _zero(1)
    _zero(2)
    _zero(3)


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
_COLUMNS, _LINES = PANEL // 2, 2 * TILE // _ROW  # of half a panel: outputs, and 64 bytes of a block
_FLOATS, _HALVES, _INTS = (ir.VectorType(kind, _COLUMNS) for kind in (ir.FloatType(), ir.IntType(16), _INT))


class Product(NamedTuple):
    """Rows by the weights of a layer in bfloat16.

    Attributes:
        x: where the rows lie, `[rows, inputs]`, contiguous.
        rest: the inputs behind the last whole block, `[rows, 32]`, filled up with zeros; 0 if there are none.
        weight: the panels.
        bias: `[outputs]`; 0 if there is none.
        out: `[rows, outputs]`, contiguous, what becomes of it.
        partial: room for sums over some of the inputs, see `partial_sums`; unused if there is one chunk.
        rows, inputs, outputs: how many.
        chunk: how many blocks of inputs go through the panels together.
    """

    x: int
    rest: int
    weight: int
    bias: int
    out: int
    partial: int
    rows: int
    inputs: int
    outputs: int
    chunk: int


def partial_sums(rows: int, outputs: int) -> int:
    """How many float32 numbers a product of more than one chunk needs room for."""
    return -(-rows // (2 * ROWS)) * -(-outputs // _COLUMNS) * TILE


@inlined
def _product(address: Any) -> Any:
    """From the fields behind the header that a team is given."""
    places = _field(address, 2), _field(address, 3), _field(address, 4), _field(address, 5), _field(address, 6)
    more = _field(address, 7), _field(address, 8), _field(address, 9), _field(address, 10), _field(address, 11)
    return Product(*places, *more)


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * _COLUMNS)


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2)


def _write_rounded(builder: Any, to: Any, numbers: Any) -> None:
    """As bfloat16: the nearest, of two as near the even one; what is no number stays none."""
    bits = builder.bitcast(numbers, _INTS)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    rounded = builder.add(builder.add(bits, _all(0x7FFF)), odd)
    rounded = builder.select(builder.fcmp_ordered("ord", numbers, numbers), rounded, _all(0x7FC00000))
    halves = builder.bitcast(rounded, ir.VectorType(ir.IntType(16), 2 * _COLUMNS))
    upper = ir.Constant(_INTS, [2 * column + 1 for column in range(_COLUMNS)])
    builder.store(builder.shuffle_vector(halves, halves, upper), _pointer(builder, to, _HALVES), align=2)


@instruction(_NONE, _AT, _AT)
def _round_off(builder: Any, to: Any, address: Any) -> None:
    """Write as many numbers in float32 as half a panel has outputs in bfloat16."""
    _write_rounded(builder, to, _read(builder, address, _FLOATS))


@instruction(_NONE, _AT, _AT, _AT)
def _round_off_sums(builder: Any, to: Any, address: Any, bias: Any) -> None:
    """The same of their sums with numbers in bfloat16."""
    bits = builder.shl(builder.zext(_read(builder, bias, _HALVES), _INTS), _all(16))
    numbers = builder.fadd(_read(builder, address, _FLOATS), builder.bitcast(bits, _FLOATS))
    _write_rounded(builder, to, numbers)


@inlined
def _give_out(product: Any, row: Any, rows: Any, output: Any, sums: Any, stride: Any) -> None:
    """Round the sums of so many rows and half a panel off, with the bias added, into their place.

    Where fewer outputs are left they go by way of `spare`, so that nothing behind them is read or written.
    """
    spare, count = _room(_ROW), min(_COLUMNS, product.outputs - output)
    bias, out, step = product.bias + 2 * output, product.out + 2 * output, 2 * product.outputs
    if product.bias and count < _COLUMNS:
        _copy(spare, bias, 2 * count)
        bias = spare
    for at in range(rows):
        to = out + step * (row + at)
        place = to if count == _COLUMNS else sums + stride * at
        if product.bias:
            _round_off_sums(place, sums + stride * at, bias)
        else:
            _round_off(place, sums + stride * at)
        if count < _COLUMNS:
            _copy(to, place, 2 * count)


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
            _zero_sums()
            for block in range(whole):
                for line in range(0, BLOCK, _ROW):
                    _prefetch(at + _AHEAD + line, 3)
                _add_block(product.x + _ROW * block, 2 * product.inputs, at)
                at += BLOCK
            if product.rest:
                _add_block(product.rest, _ROW, at)
                at += BLOCK
            _store_tile(0, sums, _PANEL_ROW)
            _store_tile(1, sums + _ROW, _PANEL_ROW)
            _store_tile(2, sums + 2 * _ROW, _PANEL_ROW)
            _store_tile(3, sums + 3 * _ROW, _PANEL_ROW)
            _give_out(product, 0, product.rows, PANEL * panel, sums, _PANEL_ROW)
            if PANEL * panel + _COLUMNS < product.outputs:
                _give_out(product, 0, product.rows, PANEL * panel + _COLUMNS, sums + 2 * _ROW, _PANEL_ROW)
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


@inlined
def _half(product: Any, half: Any) -> Any:
    """Where half a panel begins."""
    blocks = -(-product.inputs // BLOCK_INPUTS)
    return product.weight + BLOCK * blocks * (half // 2) + 2 * TILE * (half % 2)


@inlined
def _fetch_share(weights: Any, share: Any, shares: Any) -> None:
    """Begin to read a part of half a panel's block."""
    for line in range(_LINES * share // shares, _LINES * (share + 1) // shares):
        _prefetch(weights + _ROW * line, 2)


@inlined
def _begin_square(begin: Any, sums: Any) -> Any:
    """Four tiles of zeros, or of what came of the inputs before block number `begin`."""
    if begin == 0:
        _zero_sums()
    else:
        _load_tile(0, sums, _ROW)
        _load_tile(1, sums + TILE, _ROW)
        _load_tile(2, sums + 2 * TILE, _ROW)
        _load_tile(3, sums + 3 * TILE, _ROW)


@inlined
def _multiply_square(product: Any, half: Any, square: Any, begin: Any, end: Any, following: Any) -> None:
    """Two tiles of rows by half a panel, from block number `begin` to `end` of the inputs."""
    whole, stride = product.inputs // BLOCK_INPUTS, 2 * product.inputs
    squares = -(-product.rows // (2 * ROWS))
    upper = max(0, min(2 * ROWS * square, product.rows - 2 * ROWS))
    lower = min(upper + ROWS, product.rows - ROWS)
    a, b = (product.x + stride * upper + _ROW * begin, product.x + stride * lower + _ROW * begin)
    at, sums = _half(product, half) + BLOCK * begin, product.partial + _SUMS * (squares * half + square)
    _begin_square(begin, sums)
    for block in range(end - begin):
        _fetch_share(following + BLOCK * block if squares > 1 else at + _AHEAD, square, squares)
        _add_square(a, b, stride, at)
        a, b, at = a + _ROW, b + _ROW, at + BLOCK
    if end == whole and product.rest:
        _add_square(product.rest + _ROW * upper, product.rest + _ROW * lower, _ROW, at)
    if end < whole:
        _store_tile(0, sums, _ROW)
        _store_tile(1, sums + TILE, _ROW)
        _store_tile(2, sums + 2 * TILE, _ROW)
        _store_tile(3, sums + 3 * TILE, _ROW)
    else:
        sums = _room(_SUMS)
        _store_tile(0, sums, 2 * _ROW)
        _store_tile(1, sums + _ROW, 2 * _ROW)
        _store_tile(2, sums + 2 * TILE, 2 * _ROW)
        _store_tile(3, sums + 2 * TILE + _ROW, 2 * _ROW)
        _give_out(product, upper, ROWS, _COLUMNS * half, sums, 2 * _ROW)
        _give_out(product, lower, ROWS, _COLUMNS * half, sums + 2 * TILE, 2 * _ROW)


def _multiply_many(address: Any) -> None:
    """A product of more than 16 rows: 32 of them by half a panel at a time.

    The last tiles of rows may begin before the end of those before them, and write the same bits once more. While
    rows are multiplied by half a panel, the next half is read. Where there are many inputs a chunk of them goes through
    all halves before the next one, so that the rows' part of it is still near; sums stay what they are meanwhile.
    """
    product = _product(address)
    whole, halves = product.inputs // BLOCK_INPUTS, -(-product.outputs // _COLUMNS)
    _shape_tiles(ROWS)
    part = _next(address)
    while part < _field(address, 1):
        first, last = _share(address, product, part)
        for begin in range(0, max(1, whole), product.chunk):
            end = min(whole, begin + product.chunk)
            for half in range(2 * first, min(2 * last, halves)):
                following = _half(product, half + 1) + BLOCK * begin
                if half + 1 == 2 * last:
                    following = _half(product, 2 * first) + BLOCK * end
                for square in range(-(-product.rows // (2 * ROWS))):
                    _multiply_square(product, half, square, begin, end, following)
        part = _next(address)
    _release()


multiply_few, multiply_many = TeamKernel(_multiply_few), TeamKernel(_multiply_many)
"""The kernels, each for a team of threads: a product of up to 16 rows, and one of more."""


# --------------------------------------------------------------------------------------------------------------- codes

LANES = 16
"""Numbers of 32 bits in a vector of 64 bytes."""
CODES = 64
"""Codes, of one row or one output, that lie together: a block of inputs."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BFLOAT16, _FLOAT16 = 1, 2
_SINGLES, _BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_SHORTS, _SMALLS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)


class _Lanes(numba.types.Type):
    """16 numbers of 32 bits."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


class _Numbers(_Lanes):
    """Float32 ones."""


class _Sizes(_Lanes):
    """The bits of absolute values, which have their order; what is not a number is larger than all."""


@register_model(_Numbers)
class _NumbersModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _Numbers) -> None:
        super().__init__(manager, vector, _SINGLES)  # type: ignore[no-untyped-call]


@register_model(_Sizes)
class _SizesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _Sizes) -> None:
        super().__init__(manager, vector, _BITS)  # type: ignore[no-untyped-call]


_V, _S, _F = _Numbers("numbers16"), _Sizes("sizes16"), numba.float32


class Coding(NamedTuple):
    """Rows to round to int8 codes, each by its own largest element.

    Attributes:
        x: where they lie, `[rows, inputs]`, contiguous.
        kind: of their dtype.
        codes: what becomes of them, `[rows / together, blocks, together, 64]`, in which the last block is filled up
            with zeros; rows that are missing are left as they are.
        scales: `[rows]` float32, what a step is worth.
        rows, inputs: how many.
        together: how many rows lie together.
        zero: 0 of signed codes, 128 of unsigned ones.
    """

    x: int
    kind: int
    codes: int
    scales: int
    rows: int
    inputs: int
    together: int
    zero: int


class CodeProduct(NamedTuple):
    """Rows of codes by the weights of a layer in int8.

    Attributes:
        codes, scales: where the rows lie, see `Coding`; more than 16 of them in room for a multiple of 32.
        weight: the panels.
        steps: `[outputs]` float32, what a step of each output's codes is worth.
        bias: `[outputs]`; 0 if there is none.
        bias_kind: of its dtype.
        out: `[rows, outputs]`, contiguous, what becomes of it: sums, times `steps`, times `scales`, plus the bias.
        kind: of its dtype.
        rows, blocks, outputs: how many; 64 inputs make a block.
        row_group, panel_group: so many rows, a multiple of 32, and so many panels make one part of the work.
    """

    codes: int
    scales: int
    weight: int
    steps: int
    bias: int
    bias_kind: int
    out: int
    kind: int
    rows: int
    blocks: int
    outputs: int
    row_group: int
    panel_group: int


def kind_of(dtype: torch.dtype) -> int:
    """The number of a dtype of rows and biases."""
    return _KINDS[dtype]


def _equal(value: float, kind: Any = _SINGLES) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _taken(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2)


def _put(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=1)


@instruction(_V, _AT)
def _take_float32(builder: Any, address: Any) -> Any:
    return _taken(builder, address, _SINGLES)


@instruction(_V, _AT)
def _take_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(_taken(builder, address, _SHORTS), _BITS)
    return builder.bitcast(builder.shl(bits, _equal(16, _BITS)), _SINGLES)


@instruction(_V, _AT)
def _take_float16(builder: Any, address: Any) -> Any:
    return builder.fpext(_taken(builder, address, _SMALLS), _SINGLES)


@instruction(_V, _AT)
def _take_sums(builder: Any, address: Any) -> Any:
    """Integers, of which large ones are rounded."""
    return builder.sitofp(_taken(builder, address, _BITS), _SINGLES)


@instruction(_F, _AT)
def _take_one(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, ir.FloatType()), align=4)


@instruction(_NONE, _AT, _F)
def _put_one(builder: Any, address: Any, number: Any) -> None:
    _put(builder, address, number)


@instruction(_NONE, _AT, _V)
def _put_float32(builder: Any, address: Any, numbers: Any) -> None:
    _put(builder, address, numbers)


@instruction(_NONE, _AT, _V)
def _put_bfloat16(builder: Any, address: Any, numbers: Any) -> None:
    """Rounded to the nearest, of two as near to the even one."""
    bits = builder.bitcast(numbers, _BITS)
    odd = builder.and_(builder.lshr(bits, _equal(16, _BITS)), _equal(1, _BITS))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _equal(0x7FFF, _BITS))), _equal(16, _BITS))
    rounded = builder.select(builder.fcmp_ordered("==", numbers, numbers), rounded, _equal(0x7FC0, _BITS))
    _put(builder, address, builder.trunc(rounded, _SHORTS))


@instruction(_NONE, _AT, _V)
def _put_float16(builder: Any, address: Any, numbers: Any) -> None:
    """Rounded likewise."""
    _put(builder, address, builder.fptrunc(numbers, _SMALLS))


@instruction(_V, _F)
def _in_all_lanes(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_SINGLES, ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, first, _equal(0, _BITS))


@instruction(_V, _V, _V)
def _times(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@instruction(_V, _V, _V)
def _plus(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@instruction(_S)
def _no_sizes(builder: Any) -> Any:
    return _equal(0, _BITS)


@instruction(_S, _S, _V)
def _larger(builder: Any, sizes: Any, numbers: Any) -> Any:
    bits = builder.and_(builder.bitcast(numbers, _BITS), _equal(0x7FFFFFFF, _BITS))
    return builder.select(builder.icmp_unsigned(">", bits, sizes), bits, sizes)


@instruction(_F, _S)
def _largest(builder: Any, sizes: Any) -> Any:
    kind = ir.FunctionType(_INT, [_BITS])
    most = _utils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.umax.v16i32")
    return builder.bitcast(builder.call(most, [sizes]), ir.FloatType())


@instruction(_NONE, _AT, _V, _V, numba.int64)
def _put_codes(builder: Any, address: Any, numbers: Any, steps: Any, zero: Any) -> None:
    """Numbers over what a step is worth, as codes.

    The conversion cuts off, so that the half makes it round; of signed codes 128 is taken off again by changing the
    first bit.
    """
    shifted = builder.fadd(builder.fdiv(numbers, steps), _equal(128.5))
    codes = builder.fptosi(shifted, _BITS)
    signed = builder.trunc(builder.xor(zero, ir.Constant(_LONG, 128)), _INT)
    first = builder.insert_element(ir.Constant(_BITS, ir.Undefined), signed, ir.Constant(_INT, 0))
    changed = builder.xor(codes, builder.shuffle_vector(first, first, _equal(0, _BITS)))
    _put(builder, address, builder.trunc(changed, ir.VectorType(_BYTE, LANES)))


@inlined
def _take(address: Any, kind: Any) -> Any:
    if kind == _BFLOAT16:
        return _take_bfloat16(address)
    if kind == _FLOAT16:
        return _take_float16(address)
    return _take_float32(address)


@inlined
def _put_as(address: Any, numbers: Any, kind: Any) -> None:
    if kind == _BFLOAT16:
        _put_bfloat16(address, numbers)
    elif kind == _FLOAT16:
        _put_float16(address, numbers)
    else:
        _put_float32(address, numbers)


@inlined
def _take_some(address: Any, kind: Any, count: Any, spare: Any) -> Any:
    """As many numbers as there are lanes, or less: the rest is zeros, and nothing behind them is read."""
    if count < LANES:
        _clear(spare, 4 * LANES)
        _copy(spare, address, (2 if kind else 4) * count)
        address = spare
    return _take(address, kind)


@inlined
def _code_row(x: Any, kind: Any, inputs: Any, to: Any, stride: Any, zero: Any) -> Any:
    """Round a row; blocks of codes are so many bytes apart. Returns what a step is worth."""
    item, spare, whole = 2 if kind else 4, _room(_ROW), inputs // LANES * LANES
    sizes = _no_sizes()
    for at in range(0, inputs, LANES):
        sizes = _larger(sizes, _take_some(x + item * at, kind, inputs - at, spare))
    size = _largest(sizes)
    step = (np.float32(1e-30) if size < np.float32(1e-30) else size) / np.float32(127)  # a row of zeros has one, too
    steps = _in_all_lanes(step)
    for at in range(0, whole, LANES):
        _put_codes(to + at // CODES * stride + at % CODES, _take(x + item * at, kind), steps, zero)
    for at in range(whole, -(-inputs // CODES) * CODES, LANES):
        last = _take_some(x + item * at, kind, max(0, inputs - at), spare)
        _put_codes(to + at // CODES * stride + at % CODES, last, steps, zero)
    return step


def _code_rows(address: Any) -> None:
    """Round rows, see `Coding`: each part has as many of them."""
    x, kind, codes, scales = _field(address, 2), _field(address, 3), _field(address, 4), _field(address, 5)
    rows, inputs, together, zero = _field(address, 6), _field(address, 7), _field(address, 8), _field(address, 9)
    stride, blocks, length, parts = (
        CODES * together,
        -(-inputs // CODES),
        (2 if kind else 4) * inputs,
        _field(address, 1),
    )
    part = _next(address)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            to = codes + CODES * (row // together * together * blocks + row % together)
            _put_one(scales + 4 * row, _code_row(x + length * row, kind, inputs, to, stride, zero))
        part = _next(address)


@inlined
def _code_product(address: Any) -> Any:
    """From the fields behind the header that a team is given."""
    codes, scales, weight, steps = _field(address, 2), _field(address, 3), _field(address, 4), _field(address, 5)
    bias, bias_kind, out, kind = _field(address, 6), _field(address, 7), _field(address, 8), _field(address, 9)
    sizes = _field(address, 10), _field(address, 11), _field(address, 12), _field(address, 13), _field(address, 14)
    return CodeProduct(codes, scales, weight, steps, bias, bias_kind, out, kind, *sizes)


@inlined
def _give_sums_out(product: Any, row: Any, rows: Any, output: Any, sums: Any, columns: Any) -> None:
    """Scale sums `[rows, columns]`, add the bias, and round them into their place.

    What is left over of the outputs goes by way of `spare`, so that nothing behind them is read or written.
    """
    spare, item, bias_item = _room(_ROW), 2 if product.kind else 4, 2 if product.bias_kind else 4
    for column in range(0, min(columns, product.outputs - output), LANES):
        place = output + column
        count = min(LANES, product.outputs - place)
        steps = _take_some(product.steps + 4 * place, 0, count, spare)
        added = steps
        if product.bias:
            added = _take_some(product.bias + bias_item * place, product.bias_kind, count, spare)
        for at in range(row, row + rows):
            scale = _in_all_lanes(_take_one(product.scales + 4 * at))
            found = _times(_times(_take_sums(sums + 4 * ((at - row) * columns + column)), steps), scale)
            if product.bias:
                found = _plus(found, added)
            to = product.out + item * (at * product.outputs + place)
            if count < LANES:
                _put_as(spare, found, product.kind)
                _copy(to, spare, item * count)
            else:
                _put_as(to, found, product.kind)


@inlined
def _read_ahead(weight: Any) -> None:
    for line in range(0, TILE, _ROW):
        _prefetch(weight + _AHEAD + line, 3)


@inlined
def _sum_up_few(codes: Any, rows: Any, blocks: Any, weight: Any, sums: Any) -> None:
    """Sums `[rows, 64]` of up to 16 rows by a panel, which is read ahead."""
    _zero_sums()
    for _ in range(blocks):
        _load_tile(4, codes, _ROW)
        _read_ahead(weight)
        _load_tile(5, weight, _ROW)
        _read_ahead(weight + TILE)
        _multiply_int8(0, 4, 5)
        _load_tile(6, weight + TILE, _ROW)
        _read_ahead(weight + 2 * TILE)
        _multiply_int8(1, 4, 6)
        _load_tile(7, weight + 2 * TILE, _ROW)
        _read_ahead(weight + 3 * TILE)
        _multiply_int8(2, 4, 7)
        _load_tile(5, weight + 3 * TILE, _ROW)
        _multiply_int8(3, 4, 5)
        codes, weight = codes + CODES * rows, weight + BLOCK
    _store_tile(0, sums, 4 * PANEL)
    _store_tile(1, sums + _ROW, 4 * PANEL)
    _store_tile(2, sums + 2 * _ROW, 4 * PANEL)
    _store_tile(3, sums + 3 * _ROW, 4 * PANEL)


@inlined
def _sum_up_many(codes: Any, blocks: Any, weight: Any, sums: Any) -> None:
    """Sums `[32, 32]` of 32 rows by half a panel."""
    below = codes + TILE * blocks
    _zero_sums()
    for _ in range(blocks):
        _load_tile(6, weight, _ROW)
        _load_tile(4, codes, _ROW)
        _multiply_int8(0, 4, 6)
        _load_tile(7, weight + TILE, _ROW)
        _multiply_int8(1, 4, 7)
        _load_tile(5, below, _ROW)
        _multiply_int8(2, 5, 6)
        _multiply_int8(3, 5, 7)
        codes, below, weight = codes + TILE, below + TILE, weight + BLOCK
    _store_tile(0, sums, 2 * _ROW)
    _store_tile(1, sums + _ROW, 2 * _ROW)
    _store_tile(2, sums + 2 * TILE, 2 * _ROW)
    _store_tile(3, sums + 2 * TILE + _ROW, 2 * _ROW)


def _multiply_few_codes(address: Any) -> None:
    """A product of at most 16 rows, see `CodeProduct`: it takes as long as its weights take to be read."""
    product, sums = _code_product(address), _room(_SUMS)
    panels = -(-product.outputs // PANEL)
    _shape_tiles(product.rows)
    part = _next(address)
    while part < _field(address, 1):
        first = product.panel_group * part
        for panel in range(first, min(first + product.panel_group, panels)):
            weight = product.weight + BLOCK * product.blocks * panel
            _sum_up_few(product.codes, product.rows, product.blocks, weight, sums)
            _give_sums_out(product, 0, product.rows, PANEL * panel, sums, PANEL)
        part = _next(address)
    _release()


def _multiply_many_codes(address: Any) -> None:
    """A product of more rows: a group of panels stays in a core's cache while a group of rows goes by."""
    product, sums = _code_product(address), _room(_SUMS)
    panels = -(-product.outputs // PANEL)
    groups = -(-panels // product.panel_group)
    _shape_tiles(ROWS)
    part = _next(address)
    while part < _field(address, 1):
        top, first = product.row_group * (part // groups), product.panel_group * (part % groups)
        for row in range(top, min(top + product.row_group, product.rows), 2 * ROWS):
            codes, rows = product.codes + CODES * product.blocks * row, min(2 * ROWS, product.rows - row)
            for half in range(2 * first, 2 * min(first + product.panel_group, panels)):
                weight = product.weight + BLOCK * product.blocks * (half // 2) + 2 * TILE * (half % 2)
                _sum_up_many(codes, product.blocks, weight, sums)
                _give_sums_out(product, row, rows, PANEL // 2 * half, sums, PANEL // 2)
        part = _next(address)
    _release()


code_rows = TeamKernel(_code_rows)
"""The kernel that rounds rows to codes, by a team of threads: as many parts as one likes."""
multiply_few_codes, multiply_many_codes = TeamKernel(_multiply_few_codes), TeamKernel(_multiply_many_codes)
"""Those that multiply up to 16 rows of codes, and more: a part for each group of rows and each group of panels."""
