"""GEMM by AMX tiles: bfloat16 sums in the order of the inputs, int8 sums exact in any order.

Addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.codes import CODES
from lade.backends.cpu.kernels.instructions import (
    AT,
    INT,
    NONE,
    copy,
    field,
    next_part,
    pointer,
    prefetch,
    stack_memory,
)
from lade.backends.cpu.kernels.panel_products import load_product, write_results
from lade.backends.cpu.kernels.tiles import (
    AHEAD,
    BLOCK,
    BLOCK_INPUTS,
    PANEL,
    ROW_BYTES,
    ROWS,
    SUMS_BYTES,
    TILE,
    load_tile,
    multiply_bfloat16,
    multiply_int8,
    release_tiles,
    shape_tiles,
    store_panel,
    store_square,
    store_tile,
    zero_sums,
)
from lade.backends.cpu.kernels.vectors import equal, widened
from lade.compilation import TeamKernel, inlined, instruction


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


_PANEL_ROW = 4 * PANEL  # bytes
_COLUMNS, _LINES = PANEL // 2, 2 * TILE // ROW_BYTES  # of half a panel: outputs, and cache lines per block
_FLOATS, _HALVES, _INTS = (ir.VectorType(kind, _COLUMNS) for kind in (ir.FloatType(), ir.IntType(16), INT))


class TileProduct(NamedTuple):
    """Arguments of a bfloat16 GEMM by tiles, all integers; addresses are 0 where an operand is absent.

    Attributes:
        x: address of the rows, `[rows, inputs]`, contiguous.
        rest: address of the inputs after the last whole block, `[rows, 32]`, padded with zeros.
        weight: address of the panels.
        bias: address of the bias, `[outputs]`.
        out: address of the result, `[rows, outputs]`, contiguous.
        partial: address of scratch memory for partial sums, see `partial_sums`; unused if there is one chunk.
        rows, inputs, outputs: sizes of the product.
        chunk: blocks of inputs that pass through all panels together.
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
    """Return the float32 numbers of scratch memory that a product of more than one chunk needs."""
    return -(-rows // (2 * ROWS)) * -(-outputs // _COLUMNS) * TILE


@inlined
def _product(address: Any) -> Any:
    """Load the arguments from the fields after the team header."""
    places = field(address, 2), field(address, 3), field(address, 4), field(address, 5), field(address, 6)
    more = field(address, 7), field(address, 8), field(address, 9), field(address, 10), field(address, 11)
    return TileProduct(*places, *more)


def _read(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(pointer(builder, address, kind), align=2)


def _write_rounded(builder: Any, to: Any, numbers: Any) -> None:
    """Emit a store as bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = builder.bitcast(numbers, _INTS)
    odd = builder.and_(builder.lshr(bits, equal(16, _INTS)), equal(1, _INTS))
    rounded = builder.add(builder.add(bits, equal(0x7FFF, _INTS)), odd)
    rounded = builder.select(builder.fcmp_ordered("ord", numbers, numbers), rounded, equal(0x7FC00000, _INTS))
    halves = builder.bitcast(rounded, ir.VectorType(ir.IntType(16), 2 * _COLUMNS))
    upper = ir.Constant(_INTS, [2 * column + 1 for column in range(_COLUMNS)])
    builder.store(builder.shuffle_vector(halves, halves, upper), pointer(builder, to, _HALVES), align=2)


@instruction(NONE, AT, AT)
def _round_off(builder: Any, to: Any, address: Any) -> None:
    """Round half a panel of float32 outputs to bfloat16 and store them."""
    _write_rounded(builder, to, _read(builder, address, _FLOATS))


@instruction(NONE, AT, AT, AT)
def _round_off_sums(builder: Any, to: Any, address: Any, bias: Any) -> None:
    """Add a bfloat16 bias to half a panel of outputs, round and store them."""
    numbers = builder.fadd(_read(builder, address, _FLOATS), widened(builder, _read(builder, bias, _HALVES)))
    _write_rounded(builder, to, numbers)


@inlined
def _write_results(product: Any, row: Any, rows: Any, output: Any, sums: Any, stride: Any) -> None:
    """Epilogue: add the bias to the sums of some rows and half a panel, round and store them.

    Fewer outputs than half a panel go through `spare`, so that nothing past them is read or written.
    """
    spare, count = stack_memory(ROW_BYTES), min(_COLUMNS, product.outputs - output)
    bias, out, step = product.bias + 2 * output, product.out + 2 * output, 2 * product.outputs
    if product.bias and count < _COLUMNS:
        copy(spare, bias, 2 * count)
        bias = spare
    for at in range(rows):
        to = out + step * (row + at)
        place = to if count == _COLUMNS else sums + stride * at
        if product.bias:
            _round_off_sums(place, sums + stride * at, bias)
        else:
            _round_off(place, sums + stride * at)
        if count < _COLUMNS:
            copy(to, place, 2 * count)


@inlined
def _share(address: Any, product: Any, part: Any) -> Any:
    """Return the first panel of a part of the work, and one past its last."""
    parts, panels = field(address, 1), -(-product.outputs // PANEL)
    return panels * part // parts, panels * (part + 1) // parts


@inlined
def _add_block(rows: Any, stride: Any, weights: Any) -> None:
    """Accumulate one block of inputs of up to 16 rows by a whole panel."""
    load_tile(4, rows, stride)
    load_tile(5, weights, ROW_BYTES)
    load_tile(6, weights + TILE, ROW_BYTES)
    load_tile(7, weights + 2 * TILE, ROW_BYTES)
    multiply_bfloat16(0, 4, 5)
    multiply_bfloat16(1, 4, 6)
    multiply_bfloat16(2, 4, 7)
    load_tile(5, weights + 3 * TILE, ROW_BYTES)
    multiply_bfloat16(3, 4, 5)


def _multiply_few(address: Any) -> None:
    """Multiply up to 16 rows; bound by the time it takes to read the weights once."""
    product = _product(address)
    sums, whole = stack_memory(SUMS_BYTES), product.inputs // BLOCK_INPUTS
    shape_tiles(product.rows)
    part = next_part(address)
    while part < field(address, 1):
        first, last = _share(address, product, part)
        at = product.weight + first * BLOCK * -(-product.inputs // BLOCK_INPUTS)
        for panel in range(first, last):
            zero_sums()
            for block in range(whole):
                for line in range(0, BLOCK, ROW_BYTES):
                    prefetch(at + AHEAD + line, 3)
                _add_block(product.x + ROW_BYTES * block, 2 * product.inputs, at)
                at += BLOCK
            if product.rest:
                _add_block(product.rest, ROW_BYTES, at)
                at += BLOCK
            store_panel(sums)
            _write_results(product, 0, product.rows, PANEL * panel, sums, _PANEL_ROW)
            if PANEL * panel + _COLUMNS < product.outputs:
                _write_results(product, 0, product.rows, PANEL * panel + _COLUMNS, sums + 2 * ROW_BYTES, _PANEL_ROW)
        part = next_part(address)
    release_tiles()


@inlined
def _add_square(upper: Any, lower: Any, stride: Any, weights: Any) -> None:
    """Accumulate one block of inputs of 2 x 16 rows by half a panel."""
    load_tile(6, weights, ROW_BYTES)
    load_tile(4, upper, stride)
    multiply_bfloat16(0, 4, 6)
    load_tile(7, weights + TILE, ROW_BYTES)
    multiply_bfloat16(1, 4, 7)
    load_tile(5, lower, stride)
    multiply_bfloat16(2, 5, 6)
    multiply_bfloat16(3, 5, 7)


@inlined
def _half(product: Any, half: Any) -> Any:
    """Return the address of half a panel."""
    blocks = -(-product.inputs // BLOCK_INPUTS)
    return product.weight + BLOCK * blocks * (half // 2) + 2 * TILE * (half % 2)


@inlined
def _fetch_share(weights: Any, share: Any, shares: Any) -> None:
    """Prefetch a part of half a panel's block."""
    for line in range(_LINES * share // shares, _LINES * (share + 1) // shares):
        prefetch(weights + ROW_BYTES * line, 2)


@inlined
def _begin_square(begin: Any, sums: Any) -> Any:
    """Initialise four tiles: zeros, or the partial sums of the inputs before block `begin`."""
    if begin == 0:
        zero_sums()
    else:
        load_tile(0, sums, ROW_BYTES)
        load_tile(1, sums + TILE, ROW_BYTES)
        load_tile(2, sums + 2 * TILE, ROW_BYTES)
        load_tile(3, sums + 3 * TILE, ROW_BYTES)


@inlined
def _multiply_square(product: Any, half: Any, square: Any, begin: Any, end: Any, following: Any) -> None:
    """Multiply two tiles of rows by half a panel, over the input blocks from `begin` to `end`."""
    whole, stride = product.inputs // BLOCK_INPUTS, 2 * product.inputs
    squares = -(-product.rows // (2 * ROWS))
    upper = max(0, min(2 * ROWS * square, product.rows - 2 * ROWS))
    lower = min(upper + ROWS, product.rows - ROWS)
    a, b = (product.x + stride * upper + ROW_BYTES * begin, product.x + stride * lower + ROW_BYTES * begin)
    at, sums = _half(product, half) + BLOCK * begin, product.partial + SUMS_BYTES * (squares * half + square)
    _begin_square(begin, sums)
    for block in range(end - begin):
        _fetch_share(following + BLOCK * block if squares > 1 else at + AHEAD, square, squares)
        _add_square(a, b, stride, at)
        a, b, at = a + ROW_BYTES, b + ROW_BYTES, at + BLOCK
    if end == whole and product.rest:
        _add_square(product.rest + ROW_BYTES * upper, product.rest + ROW_BYTES * lower, ROW_BYTES, at)
    if end < whole:
        store_tile(0, sums, ROW_BYTES)
        store_tile(1, sums + TILE, ROW_BYTES)
        store_tile(2, sums + 2 * TILE, ROW_BYTES)
        store_tile(3, sums + 3 * TILE, ROW_BYTES)
    else:
        sums = stack_memory(SUMS_BYTES)
        store_square(sums)
        _write_results(product, upper, ROWS, _COLUMNS * half, sums, 2 * ROW_BYTES)
        _write_results(product, lower, ROWS, _COLUMNS * half, sums + 2 * TILE, 2 * ROW_BYTES)


def _multiply_many(address: Any) -> None:
    """Multiply more than 16 rows: 32 of them by half a panel at a time.

    The last tiles of rows may overlap those before them and then write the same bits again. While rows are multiplied
    by half a panel, the next half is prefetched. With many inputs, one chunk of them passes through all halves before
    the next chunk, so that the rows' part of it stays in the cache; partial sums are kept exactly in between.
    """
    product = _product(address)
    whole, halves = product.inputs // BLOCK_INPUTS, -(-product.outputs // _COLUMNS)
    shape_tiles(ROWS)
    part = next_part(address)
    while part < field(address, 1):
        first, last = _share(address, product, part)
        for begin in range(0, max(1, whole), product.chunk):
            end = min(whole, begin + product.chunk)
            for half in range(2 * first, min(2 * last, halves)):
                following = _half(product, half + 1) + BLOCK * begin
                if half + 1 == 2 * last:
                    following = _half(product, 2 * first) + BLOCK * end
                for square in range(-(-product.rows // (2 * ROWS))):
                    _multiply_square(product, half, square, begin, end, following)
        part = next_part(address)
    release_tiles()


multiply_few, multiply_many = TeamKernel(_multiply_few), TeamKernel(_multiply_many)
"""Team kernels for up to 16 rows, and for more."""
