"""Dot-product instructions, and the memory layout of rows and weights that they need.

An AVX-512 instruction adds to each of 16 float32 accumulators the products of two bfloat16 inputs (with VNNI, to int32
accumulators those of four int8 inputs). Processors with AVX2 alone have eight accumulators per register, and multiply
pairs of 16-bit integers instead of four int8 ones. An accumulator takes its inputs in order and sees no other row, so
an output depends on its row and its weights alone, regardless of the number of rows and of how the work is split.

Weights lie in panels of 16 outputs, `[N / 16][K / 32][16][16][2]` in bfloat16: panel, block of inputs, and within it
pairs of inputs by outputs (`[N / 16][K / 64][16][16][4]` in int8, with four inputs instead of a pair). Up to `FEW` rows
pass through a panel together. The panel is then read once, front to back and prefetched, so few rows take hardly longer
than one. More rows pass in groups, through `COLUMNS` panels at a time.

Rows are blocked as well, `[blocks, rows, 64 bytes]`: rows that are a power of two apart would evict each other from the
L1 cache.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import llvm_version_info  # type: ignore[import-untyped]
from numba.core import cgutils

from lade.backends.cpu.kernels.instructions import AT, INT, LONG, NONE, call_intrinsic, fetch, has_features, pointer
from lade.backends.cpu.kernels.lanes import LANES, LINE
from lade.backends.cpu.kernels.vectors import equal, splat
from lade.compilation import CONSTANT, instruction

DOT_BLOCK = 64
"""Bytes of consecutive inputs, of one row or one output, in a block."""
DOT_PANEL = LANES
"""Outputs per panel."""
WIDE = has_features("avx512f", "avx512bw")
"""True if there are 32 registers of 64 bytes; otherwise there are 16 of 32 bytes."""
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24) if WIDE else (1, 2, 4)
FEW = _SIZES[-1]
"""Most rows that pass through a panel together."""
TOGETHER, COLUMNS = (8, 2) if WIDE else (4, 1)
"""Rows per group when there are more than `FEW`, and panels that a group passes through at a time."""
PANEL_BLOCK = DOT_BLOCK * LANES
"""Bytes of one block of inputs of a panel."""
_TOGETHER = tuple(min(size for size in _SIZES if rows <= size) for rows in range(FEW + 1))
FEW_SUMS, MANY_SUMS = FEW * LINE, COLUMNS * TOGETHER * LINE
"""Bytes of the accumulators of few rows and one panel, and of a group of rows and its panels."""
_WORD, _AHEAD = 4, 8 * PANEL_BLOCK


def has_dots(dtype: torch.dtype) -> bool:
    """Return True if this processor has dot products of a dtype: bfloat16 needs AVX512-BF16, int8 needs AVX2."""
    return has_features("avx512bf16") if dtype == torch.bfloat16 else dtype == torch.int8 and has_features("avx2")


def rows_together(rows: int) -> int:
    """Return the number of rows interleaved in a group, for a GEMM of `rows` rows; the last group may be padded."""
    return _TOGETHER[rows] if rows <= FEW else TOGETHER


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_WIDTH = LANES if WIDE else LANES // 2
_SINGLES, _BITS = (ir.VectorType(kind, _WIDTH) for kind in (ir.FloatType(), INT))
_SHORTS = ir.VectorType(ir.IntType(16), 2 * _WIDTH)
_PAIRS = ir.VectorType(_Bfloat16(), 2 * _WIDTH) if llvm_version_info >= (16,) else _BITS
"""Operand type of LLVM's bfloat16 dot product; before LLVM 16 it took integers."""
_utils = cast(Any, cgutils)


class _Bfloat16Dots:
    """Dot products of bfloat16 pairs."""

    def weights(self, builder: Any, weights: Any) -> Any:
        return builder.bitcast(weights, _PAIRS)

    inputs = weights

    def add(self, builder: Any, sums: Any, x: Any, weights: Any) -> Any:
        return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SINGLES, sums, x, weights)


class _CodeDots:
    """Dot products of unsigned inputs and signed int8 weights, without saturation."""

    def weights(self, builder: Any, weights: Any) -> Any:
        return weights

    inputs = weights

    def add(self, builder: Any, sums: Any, x: Any, weights: Any) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.512" if WIDE else "llvm.x86.avx512.vpdpbusd.256"
        return call_intrinsic(builder, name, _BITS, sums, x, weights)


class _PairDots:
    """Int8 dot products without VNNI: bytes are widened to 16 bits, even and odd ones apart."""

    def weights(self, builder: Any, weights: Any) -> Any:
        shorts, eight = builder.bitcast(weights, _SHORTS), equal(8, _SHORTS)
        return builder.ashr(builder.shl(shorts, eight), eight), builder.ashr(shorts, eight)

    def inputs(self, builder: Any, x: Any) -> Any:
        shorts = builder.bitcast(x, _SHORTS)
        return builder.and_(shorts, equal(255, _SHORTS)), builder.lshr(shorts, equal(8, _SHORTS))

    def add(self, builder: Any, sums: Any, x: Any, weights: Any) -> Any:
        name = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
        for pair, factors in zip(x, weights, strict=True):
            sums = builder.add(sums, call_intrinsic(builder, name, _BITS, pair, factors))
        return sums


def _dots(codes: int) -> Any:
    if not codes:
        return _Bfloat16Dots()
    return _CodeDots() if has_features("avx512vnni" if WIDE else "avxvnni") else _PairDots()


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(LONG, offset))


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.load(pointer(builder, _at(builder, address, offset), kind), align=_WORD)


def _sum_up(
    builder: Any, dots: Any, begin: list[Any], rows: int, x: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """Emit the accumulation of `rows` rows over some panels, from initial vectors; accumulators stay in registers."""
    sums = [[_utils.alloca_once_value(builder, first) for first in begin] for _ in range(rows)]
    columns, size = len(begin) * _WIDTH // LANES, 4 * _WIDTH
    with _utils.for_range(builder, blocks) as loop:
        row = builder.add(x, builder.mul(loop.index, ir.Constant(LONG, DOT_BLOCK * rows)))
        first = builder.add(weight, builder.mul(loop.index, ir.Constant(LONG, PANEL_BLOCK)))
        panels = [builder.add(first, builder.mul(apart, ir.Constant(LONG, column))) for column in range(columns)]
        for word in range(DOT_BLOCK // _WORD):
            for panel in panels:
                fetch(builder, _at(builder, panel, _AHEAD + LINE * word), 3)
            places = [(panel, LINE * word + part) for panel in panels for part in range(0, LINE, size)]
            weights = [dots.weights(builder, _load(builder, *place, _BITS)) for place in places]
            for number in range(rows):
                inputs = _load(builder, row, DOT_BLOCK * number + _WORD * word, INT)
                inputs = dots.inputs(builder, splat(builder, inputs, _WIDTH))
                for place, factors in zip(sums[number], weights, strict=True):
                    builder.store(dots.add(builder, builder.load(place), inputs, factors), place)
    for number, place in enumerate(place for places in sums for place in places):
        found = builder.load(place)
        builder.store(found, pointer(builder, _at(builder, to, size * number), found.type), align=_WORD)


def _begin(builder: Any, codes: int, start: Any, columns: int) -> list[Any]:
    """Return the initial accumulators of a row: zeros for bfloat16, loaded from `start` for codes."""
    if not codes:
        return [ir.Constant(_SINGLES, None)] * (columns * LANES // _WIDTH)
    return [_load(builder, start, offset, _BITS) for offset in range(0, LINE * columns, 4 * _WIDTH)]


@instruction(NONE, CONSTANT, numba.int64, AT, AT, AT, numba.int64, AT)
def sum_few(builder: Any, codes: Any, together: Any, x: Any, start: Any, weight: Any, blocks: Any, to: Any) -> None:
    """Compute sums `[together, 16]` of few rows by a panel, unrolled for each row count; codes are 1, bfloat16 is 0."""
    begin, dots, apart = _begin(builder, codes, start, 1), _dots(codes), ir.Constant(LONG, 0)
    for rows in _SIZES:
        with builder.if_then(builder.icmp_signed("==", together, ir.Constant(LONG, rows))):
            _sum_up(builder, dots, begin, rows, x, weight, apart, blocks, to)


@instruction(NONE, CONSTANT, CONSTANT, AT, AT, AT, AT, numba.int64, AT)
def sum_group(
    builder: Any, codes: Any, columns: Any, x: Any, start: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """Compute sums `[TOGETHER, columns, 16]` of a group of rows by panels that are `apart` bytes apart."""
    begin = _begin(builder, codes, start, columns)
    _sum_up(builder, _dots(codes), begin, TOGETHER, x, weight, apart, blocks, to)
