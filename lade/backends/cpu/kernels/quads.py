"""GEMM micro-kernel: four rows by a block of columns, each product a chain of fused multiply-adds over the depth.

Left operands lie in *quads*, four interleaved rows, `[R / 4, depth, 4]`; results in tiles of four rows by `LANES`
columns, `[R / 4, columns / LANES, 4, LANES]`. Addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.instructions import AT, INT, NONE, clear, copy, load_one
from lade.backends.cpu.kernels.vectors import (
    FLOAT_LANES,
    INT_LANES,
    LANES,
    QUAD,
    WIDE,
    WORD,
    broadcast,
    fma,
    load,
    load_as_float32,
    read,
    store,
    write,
)
from lade.compilation import inlined, instruction

_TILE = 4 * QUAD * LANES  # bytes


@instruction(NONE, AT, numba.int64, AT, numba.int64)
def transpose(builder: Any, address: Any, step: Any, to: Any, to_step: Any) -> None:
    """Transpose a `[LANES, LANES]` block: swap off-diagonal blocks, halves first, single numbers last."""
    rows = [
        read(builder, builder.add(address, builder.mul(step, ir.Constant(step.type, row))), FLOAT_LANES)
        for row in range(LANES)
    ]
    distance = LANES // 2
    while distance:
        upper = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
        lower = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & distance:
                pair = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(INT_LANES, upper))
                rows[row + distance] = builder.shuffle_vector(*pair, ir.Constant(INT_LANES, lower))
        distance //= 2
    for row in range(LANES):
        write(builder, builder.add(to, builder.mul(to_step, ir.Constant(step.type, row))), rows[row])


@instruction(NONE, AT)
def make_quads(builder: Any, tile: Any) -> None:
    """Transpose a tile `[4, LANES]` to `[LANES, 4]` in place."""
    places = [ir.Constant(tile.type, WORD * LANES * row) for row in range(QUAD)]
    a, b, c, d = (read(builder, builder.add(tile, place), FLOAT_LANES) for place in places)
    both = ir.VectorType(INT, 2 * LANES)
    whole = ir.Constant(both, list(range(2 * LANES)))
    ab, cd = builder.shuffle_vector(a, b, whole), builder.shuffle_vector(c, d, whole)
    for number, place in enumerate(places):
        lanes = [row * LANES + number * LANES // QUAD + lane for lane in range(LANES // QUAD) for row in range(QUAD)]
        write(builder, builder.add(tile, place), builder.shuffle_vector(ab, cd, ir.Constant(INT_LANES, lanes)))


@inlined
def multiply(left: Any, right: Any, width: Any, columns: Any, depth: Any, tiles: Any) -> None:
    """Accumulate a quad `[depth, 4]` times `columns` columns of `[depth, width]` into tiles."""
    for column in range(0, columns, WIDE):
        tile = tiles + WORD * QUAD * column
        a, b = load(tile), load(tile + WORD * LANES)
        c, d = load(tile + 2 * WORD * LANES), load(tile + 3 * WORD * LANES)
        e, f = load(tile + _TILE), load(tile + _TILE + WORD * LANES)
        g, h = load(tile + _TILE + 2 * WORD * LANES), load(tile + _TILE + 3 * WORD * LANES)
        for at in range(depth):
            row, quad = right + WORD * (at * width + column), left + WORD * QUAD * at
            x, y = load(row), load(row + WORD * LANES)
            p, q = broadcast(load_one(quad)), broadcast(load_one(quad + WORD))
            r, s = broadcast(load_one(quad + 2 * WORD)), broadcast(load_one(quad + 3 * WORD))
            a, b, c, d = fma(p, x, a), fma(q, x, b), fma(r, x, c), fma(s, x, d)
            e, f, g, h = fma(p, y, e), fma(q, y, f), fma(r, y, g), fma(s, y, h)
        store(tile, a)
        store(tile + WORD * LANES, b)
        store(tile + 2 * WORD * LANES, c)
        store(tile + 3 * WORD * LANES, d)
        store(tile + _TILE, e)
        store(tile + _TILE + WORD * LANES, f)
        store(tile + _TILE + 2 * WORD * LANES, g)
        store(tile + _TILE + 3 * WORD * LANES, h)


@inlined
def convert(address: Any, step: Any, kind: Any, count: Any, size: Any, floats: Any, spare: Any) -> Any:
    """Convert `count` rows of a cache to float32 `[count, padded size]`; return the padded width.

    The remainder of a row goes through `spare`, `LANES` numbers, so that nothing past it is read.
    """
    item = 2 if kind else 4
    width, whole = -(-size // WIDE) * WIDE, size // LANES * LANES
    for key in range(count):
        row, to = address + key * step, floats + WORD * width * key
        for at in range(0, whole, LANES):
            store(to + WORD * at, load_as_float32(row + item * at, kind))
        if whole < size:
            clear(spare, WORD * LANES)
            copy(spare, row + item * whole, item * (size - whole))
            store(to + WORD * whole, load_as_float32(spare, kind))
    return width
