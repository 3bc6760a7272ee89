"""Matrix products for processors with dot products (AVX-512 with VNNI, or with BF16), compiled: as `tile_kernels`.

One instruction adds to each of 16 sums of float32 the products of two inputs in bfloat16 (to sums of int32 those of
four in int8). A sum goes through its inputs in their order and knows nothing of other rows, so what an output is
depends on its row and its weights alone, however many rows there are and however the work is cut.

Weights lie in panels of 16 outputs, `[N / 16][K / 32][16][16][2]` in bfloat16: the panel, the block of inputs, and in
it pairs of inputs by outputs (`[N / 16][K / 64][16][16][4]` in int8, fours of inputs). Up to `FEW` rows go through a
panel together, which is read once, from its first byte to its last and ahead of its use: few as they are, that takes
hardly longer than for one. More rows go by eights, through two panels at a time.

Rows lie in blocks of inputs, too, `[blocks, rows, 64 bytes]`, for the sake of the nearest cache: rows that are a power
of two apart would drive one another out of it.
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
from lade.model.tile_kernels import (
    _AT,
    _BITS,
    _NONE,
    _SINGLES,
    LANES,
    _clear,
    _copy,
    _field,
    _give_sums_out,
    _next,
    _plus,
    _pointer,
    _put_bfloat16,
    _room,
    _take_bfloat16,
    _take_float32,
)

BLOCK = 64
"""Bytes of a row's or an output's inputs that lie together."""
DOT_PANEL = LANES
"""Outputs of a panel."""
FEW = 24
"""Rows that go through a panel together, at most."""
TOGETHER = 8
"""Rows of a group where there are more."""
_SIZES = (1, 2, 4, 6, 8, 12, 16, FEW)
_WORD, _LINE, _PANEL_BLOCK = 4, 4 * LANES, BLOCK * LANES  # bytes
_AHEAD = 8 * _PANEL_BLOCK
_LONG, _BYTE = ir.IntType(64), ir.IntType(8)


@cache
def has_dots(dtype: torch.dtype) -> bool:
    """Whether this processor has dot products of a dtype, bfloat16 or int8, and numba compiles for them."""
    needed = {torch.bfloat16: "+avx512bf16", torch.int8: "+avx512vnni"}.get(dtype)
    _, _, features = cast(Any, cpu_target).target_context.codegen().magic_tuple()
    return needed in features.split(",") and not cast(Any, numba).config.DISABLE_JIT


def rows_together(rows: int) -> int:
    """How many rows lie and go through panels together, of so many; the last of them may be missing."""
    return next((size for size in _SIZES if rows <= size), TOGETHER)


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


class DotProduct(NamedTuple):
    """Rows by the weights of a layer.

    Attributes:
        x: where the rows lie, in blocks: bfloat16, or unsigned codes.
        together: see `rows_together`.
        weight: the panels.
        start: of codes, what the sums begin with, `[panels, 16]` int32: minus 128 times the sum of an output's weights,
            since 128 stands for an input of zero.
        scales: of codes, `[rows]` float32, what a step of each row is worth.
        steps: likewise `[outputs]`, of each output's codes.
        bias: `[outputs]`; 0 if there is none.
        bias_kind: of its dtype, see `kind_of`.
        out: `[rows, outputs]`, contiguous, what becomes of it.
        kind: of its dtype.
        rows, blocks, outputs: how many.
        row_group, panel_group: so many rows, a multiple of 8, and so many panels, an even number, make one part of the
            work; of few rows one part has all.
    """

    x: int
    together: int
    weight: int
    start: int
    scales: int
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


@inlined
def _dot_product(address: Any) -> Any:
    """From the fields behind the header that a team is given."""
    places = _field(address, 2), _field(address, 3), _field(address, 4), _field(address, 5), _field(address, 6)
    more = _field(address, 7), _field(address, 8), _field(address, 9), _field(address, 10), _field(address, 11)
    last = _field(address, 12), _field(address, 13), _field(address, 14), _field(address, 15), _field(address, 16)
    return DotProduct(*places, *more, *last)


# -------------------------------------------------------------------------------------------------------- instructions


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not know of."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_PAIRS = ir.VectorType(_Bfloat16(), 2 * LANES)
_utils = cast(Any, cgutils)


def _dot_bfloat16(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    kind = ir.FunctionType(_SINGLES, [_SINGLES, _PAIRS, _PAIRS])
    dot = _utils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(dot, [sums, builder.bitcast(x, _PAIRS), builder.bitcast(weights, _PAIRS)])


def _dot_int8(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Of unsigned inputs and signed weights; nothing is cut off."""
    kind = ir.FunctionType(_BITS, [_BITS, _BITS, _BITS])
    dot = _utils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return builder.call(dot, [sums, x, weights])


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(_LONG, offset))


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.load(_pointer(builder, _at(builder, address, offset), kind), align=_WORD)


def _spread(builder: Any, address: Any, offset: int) -> Any:
    """Four bytes of a row, as often as there are lanes."""
    word = _load(builder, address, offset, _BITS.element)
    first = builder.insert_element(ir.Constant(_BITS, ir.Undefined), word, ir.Constant(_BITS.element, 0))
    return builder.shuffle_vector(first, first, ir.Constant(_BITS, [0] * LANES))


def _fetch(builder: Any, address: Any, offset: int) -> None:
    """Begin to read 64 bytes into the nearest cache; without memory nothing happens."""
    integer = _BITS.element
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), integer, integer, integer])
    fetch = _utils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    place = _pointer(builder, _at(builder, address, offset))
    builder.call(fetch, [place, *(ir.Constant(integer, value) for value in (0, 3, 1))])


def _sum_up(
    builder: Any, dot: Any, begin: list[Any], rows: int, x: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """Sums of so many rows by as many panels as there are in `begin`, kept in registers until they are written."""
    columns = len(begin)
    sums = [[_utils.alloca_once_value(builder, begin[column]) for column in range(columns)] for _ in range(rows)]
    with _utils.for_range(builder, blocks) as loop:
        row = builder.add(x, builder.mul(loop.index, ir.Constant(_LONG, BLOCK * rows)))
        first = builder.add(weight, builder.mul(loop.index, ir.Constant(_LONG, _PANEL_BLOCK)))
        panels = [builder.add(first, builder.mul(apart, ir.Constant(_LONG, column))) for column in range(columns)]
        for word in range(BLOCK // _WORD):
            for panel in panels:
                _fetch(builder, panel, _AHEAD + _LINE * word)
            weights = [_load(builder, panel, _LINE * word, _BITS) for panel in panels]
            for number in range(rows):
                spread = _spread(builder, row, BLOCK * number + _WORD * word)
                for place, line in zip(sums[number], weights, strict=True):
                    builder.store(dot(builder, builder.load(place), spread, line), place)
    for number, places in enumerate(sums):
        for column, place in enumerate(places):
            found = builder.load(place)
            target = _pointer(builder, _at(builder, to, _LINE * (number * columns + column)), found.type)
            builder.store(found, target, align=_WORD)


@instruction(_NONE, CONSTANT, CONSTANT, _AT, _AT, _AT, numba.int64, _AT)
def _sum_bfloat16(builder: Any, rows: Any, columns: Any, x: Any, weight: Any, apart: Any, blocks: Any, to: Any) -> None:
    """Sums `[rows, columns, 16]` of rows in blocks by panels that are so many bytes apart."""
    begin = [ir.Constant(_SINGLES, None)] * columns
    _sum_up(builder, _dot_bfloat16, begin, rows, x, weight, apart, blocks, to)


@instruction(_NONE, CONSTANT, CONSTANT, _AT, _AT, _AT, _AT, numba.int64, _AT)
def _sum_codes(
    builder: Any, rows: Any, columns: Any, x: Any, start: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """The same of codes, which begin with what is given for each panel."""
    begin = [_load(builder, start, _LINE * column, _BITS) for column in range(columns)]
    _sum_up(builder, _dot_int8, begin, rows, x, weight, apart, blocks, to)


# ---------------------------------------------------------------------------------------------------------------- rows


def _lay_rows(address: Any) -> None:
    """Lay rows out, see `Layout`: each part has as many of them."""
    x, to, together = _field(address, 2), _field(address, 3), _field(address, 6)
    rows, inputs = _field(address, 4), _field(address, 5)
    blocks, length, parts = -(-2 * inputs // BLOCK), 2 * inputs, _field(address, 1)
    whole = length // BLOCK
    part = _next(address)
    while part < parts:
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            place, line = to + BLOCK * (row // together * together * blocks + row % together), x + length * row
            for block in range(whole):
                _copy(place + BLOCK * together * block, line + BLOCK * block, BLOCK)
            if whole < blocks:
                last = place + BLOCK * together * whole
                _clear(last, BLOCK)
                _copy(last, line + BLOCK * whole, length - BLOCK * whole)
        part = _next(address)


# ------------------------------------------------------------------------------------------------------------ bfloat16


@inlined
def _few_in_bfloat16(together: Any, x: Any, weight: Any, blocks: Any, to: Any) -> None:
    """Sums `[together, 16]` of few rows by one panel."""
    if together == 1:
        _sum_bfloat16(1, 1, x, weight, 0, blocks, to)
    elif together == 2:
        _sum_bfloat16(2, 1, x, weight, 0, blocks, to)
    elif together == 4:
        _sum_bfloat16(4, 1, x, weight, 0, blocks, to)
    elif together == 6:
        _sum_bfloat16(6, 1, x, weight, 0, blocks, to)
    elif together == 8:
        _sum_bfloat16(8, 1, x, weight, 0, blocks, to)
    elif together == 12:
        _sum_bfloat16(12, 1, x, weight, 0, blocks, to)
    elif together == 16:
        _sum_bfloat16(16, 1, x, weight, 0, blocks, to)
    else:
        _sum_bfloat16(24, 1, x, weight, 0, blocks, to)


@inlined
def _give_out(product: Any, row: Any, rows: Any, panel: Any, sums: Any, stride: Any) -> None:
    """Round the sums of rows and a panel off, with the bias added, into their place.

    Where fewer outputs are left they go by way of `spare`, so that nothing behind them is read or written.
    """
    spare, count = _room(_LINE), min(DOT_PANEL, product.outputs - DOT_PANEL * panel)
    added = _take_float32(sums)  # where there is no bias it is not used
    if product.bias:
        bias = product.bias + 2 * DOT_PANEL * panel
        if count < DOT_PANEL:
            _copy(spare, bias, 2 * count)
            bias = spare
        added = _take_bfloat16(bias)
    for at in range(rows):
        found = _take_float32(sums + stride * at)
        if product.bias:
            found = _plus(found, added)
        to = product.out + 2 * ((row + at) * product.outputs + DOT_PANEL * panel)
        if count < DOT_PANEL:
            _put_bfloat16(spare, found)
            _copy(to, spare, 2 * count)
        else:
            _put_bfloat16(to, found)


def _multiply_few(address: Any) -> None:
    """A product of few rows, which takes little longer than its weights take to be read."""
    product, sums = _dot_product(address), _room(1536)
    panels, size = -(-product.outputs // DOT_PANEL), _PANEL_BLOCK * product.blocks
    part = _next(address)
    while part < _field(address, 1):
        first = product.panel_group * part
        for panel in range(first, min(first + product.panel_group, panels)):
            _few_in_bfloat16(product.together, product.x, product.weight + size * panel, product.blocks, sums)
            _give_out(product, 0, product.rows, panel, sums, _LINE)
        part = _next(address)


def _multiply_many(address: Any) -> None:
    """A product of more rows: a group of panels stays in a core's cache while a group of rows goes by."""
    product, sums = _dot_product(address), _room(1024)
    panels, size = -(-product.outputs // DOT_PANEL), _PANEL_BLOCK * product.blocks
    groups, blocks = -(-panels // product.panel_group), product.blocks
    part = _next(address)
    while part < _field(address, 1):
        top, first = product.row_group * (part // groups), product.panel_group * (part % groups)
        for panel in range(first, min(first + product.panel_group, panels), 2):
            weight = product.weight + size * panel
            for row in range(top, min(top + product.row_group, product.rows), TOGETHER):
                x, rows = product.x + BLOCK * blocks * row, min(TOGETHER, product.rows - row)
                if panel + 1 < panels:
                    _sum_bfloat16(8, 2, x, weight, size, blocks, sums)
                    _give_out(product, row, rows, panel, sums, 2 * _LINE)
                    _give_out(product, row, rows, panel + 1, sums + _LINE, 2 * _LINE)
                else:
                    _sum_bfloat16(8, 1, x, weight, 0, blocks, sums)
                    _give_out(product, row, rows, panel, sums, _LINE)
        part = _next(address)


# --------------------------------------------------------------------------------------------------------------- codes


@inlined
def _few_codes(together: Any, x: Any, start: Any, weight: Any, blocks: Any, to: Any) -> None:
    """Sums `[together, 16]` of few rows of codes by one panel."""
    if together == 1:
        _sum_codes(1, 1, x, start, weight, 0, blocks, to)
    elif together == 2:
        _sum_codes(2, 1, x, start, weight, 0, blocks, to)
    elif together == 4:
        _sum_codes(4, 1, x, start, weight, 0, blocks, to)
    elif together == 6:
        _sum_codes(6, 1, x, start, weight, 0, blocks, to)
    elif together == 8:
        _sum_codes(8, 1, x, start, weight, 0, blocks, to)
    elif together == 12:
        _sum_codes(12, 1, x, start, weight, 0, blocks, to)
    elif together == 16:
        _sum_codes(16, 1, x, start, weight, 0, blocks, to)
    else:
        _sum_codes(24, 1, x, start, weight, 0, blocks, to)


def _multiply_few_codes(address: Any) -> None:
    """As `_multiply_few`, of codes."""
    product, sums = _dot_product(address), _room(1536)
    panels, size = -(-product.outputs // DOT_PANEL), _PANEL_BLOCK * product.blocks
    part = _next(address)
    while part < _field(address, 1):
        first = product.panel_group * part
        for panel in range(first, min(first + product.panel_group, panels)):
            start, weight = product.start + _LINE * panel, product.weight + size * panel
            _few_codes(product.together, product.x, start, weight, product.blocks, sums)
            _give_sums_out(product, 0, product.rows, DOT_PANEL * panel, sums, DOT_PANEL)
        part = _next(address)


def _multiply_many_codes(address: Any) -> None:
    """As `_multiply_many`, of codes."""
    product, sums = _dot_product(address), _room(1024)
    panels, size = -(-product.outputs // DOT_PANEL), _PANEL_BLOCK * product.blocks
    groups, blocks = -(-panels // product.panel_group), product.blocks
    part = _next(address)
    while part < _field(address, 1):
        top, first = product.row_group * (part // groups), product.panel_group * (part % groups)
        for panel in range(first, min(first + product.panel_group, panels), 2):
            start, weight = product.start + _LINE * panel, product.weight + size * panel
            for row in range(top, min(top + product.row_group, product.rows), TOGETHER):
                x, rows = product.x + BLOCK * blocks * row, min(TOGETHER, product.rows - row)
                if panel + 1 < panels:
                    _sum_codes(8, 2, x, start, weight, size, blocks, sums)
                    _give_sums_out(product, row, rows, DOT_PANEL * panel, sums, 2 * DOT_PANEL)
                else:
                    _sum_codes(8, 1, x, start, weight, 0, blocks, sums)
                    _give_sums_out(product, row, rows, DOT_PANEL * panel, sums, DOT_PANEL)
        part = _next(address)


lay_rows = TeamKernel(_lay_rows)
"""The kernel that lays rows out in blocks: as many parts as one likes."""
multiply_few, multiply_many = TeamKernel(_multiply_few), TeamKernel(_multiply_many)
"""Those that multiply rows in bfloat16, few and more: a part for each group of rows and each group of panels."""
multiply_few_codes, multiply_many_codes = TeamKernel(_multiply_few_codes), TeamKernel(_multiply_many_codes)
"""The same of codes."""
