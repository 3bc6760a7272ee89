"""Dot products: their instructions, and how rows and weights lie for them.

One instruction of AVX-512 adds to each of 16 sums of float32 the products of two inputs in bfloat16 (to sums of int32
those of four in int8, where there is VNNI). Processors with AVX2 alone have eight sums in a register, and products of
pairs of 16 bits in place of fours of int8. A sum goes through its inputs in their order and knows nothing of other
rows, so what an output is depends on its row and its weights alone, however many rows there are and however the work is
cut.

Weights lie in panels of 16 outputs, `[N / 16][K / 32][16][16][2]` in bfloat16: the panel, the block of inputs, and in
it pairs of inputs by outputs (`[N / 16][K / 64][16][16][4]` in int8, fours of inputs). Up to `FEW` rows go through a
panel together, which is read once, from its first byte to its last and ahead of its use: few as they are, that takes
hardly longer than for one. More rows go in groups, through `COLUMNS` panels at a time.

Rows lie in blocks of inputs, too, `[blocks, rows, 64 bytes]`, for the sake of the nearest cache: rows that are a power
of two apart would drive one another out of it.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import llvm_version_info  # type: ignore[import-untyped]
from numba.core import cgutils

from lade.backends.cpu.kernels.instructions import AT, INT, LONG, NONE, call_intrinsic, fetch, pointer
from lade.backends.cpu.kernels.lanes import LANES, LINE
from lade.backends.cpu.kernels.processor import has_features
from lade.backends.cpu.kernels.vector_types import equal, spread_out
from lade.compilation import CONSTANT, instruction

DOT_BLOCK = 64
"""Bytes of a row's or an output's inputs that lie together."""
DOT_PANEL = LANES
"""Outputs of a panel."""
WIDE = has_features("avx512f", "avx512bw")
"""Whether registers have 64 bytes, and there are 32 of them; else they have half as many, and are half as many."""
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24) if WIDE else (1, 2, 4)
FEW = _SIZES[-1]
"""Rows that go through a panel together, at most."""
TOGETHER, COLUMNS = (8, 2) if WIDE else (4, 1)
"""Rows of a group where there are more, and panels that they go through together."""
PANEL_BLOCK = DOT_BLOCK * LANES
"""Bytes of a panel's block of inputs."""
_TOGETHER = tuple(min(size for size in _SIZES if rows <= size) for rows in range(FEW + 1))
FEW_SUMS, MANY_SUMS = FEW * LINE, COLUMNS * TOGETHER * LINE
"""Bytes of all sums of few rows and one panel, and of a group of rows and its panels."""
_WORD, _AHEAD = 4, 8 * PANEL_BLOCK


def has_dots(dtype: torch.dtype) -> bool:
    """Whether there are dot products of a dtype here: of bfloat16 with AVX512-BF16, of int8 with AVX2 and upwards."""
    return has_features("avx512bf16") if dtype == torch.bfloat16 else dtype == torch.int8 and has_features("avx2")


def rows_together(rows: int) -> int:
    """How many rows lie and go through panels together, of so many; the last of them may be missing."""
    return _TOGETHER[rows] if rows <= FEW else TOGETHER


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not know of."""

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
"""Pairs of bfloat16, as LLVM's function has them; it took them for integers until version 16."""
_utils = cast(Any, cgutils)


class _Bfloat16Dots:
    """Dot products of bfloat16."""

    def weights(self, builder: Any, weights: Any) -> Any:
        return builder.bitcast(weights, _PAIRS)

    inputs = weights

    def add(self, builder: Any, sums: Any, x: Any, weights: Any) -> Any:
        return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SINGLES, sums, x, weights)


class _CodeDots:
    """Dot products of unsigned inputs and signed weights in int8, of which nothing is cut off."""

    def weights(self, builder: Any, weights: Any) -> Any:
        return weights

    inputs = weights

    def add(self, builder: Any, sums: Any, x: Any, weights: Any) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.512" if WIDE else "llvm.x86.avx512.vpdpbusd.256"
        return call_intrinsic(builder, name, _BITS, sums, x, weights)


class _PairDots:
    """The same without VNNI: bytes become 16 bits each, the first and third of four, and the second and fourth."""

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
    """Sums of so many rows by some panels, which begin with some vectors; in registers until they are written."""
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
                inputs = dots.inputs(builder, spread_out(builder, inputs, _WIDTH))
                for place, factors in zip(sums[number], weights, strict=True):
                    builder.store(dots.add(builder, builder.load(place), inputs, factors), place)
    for number, place in enumerate(place for places in sums for place in places):
        found = builder.load(place)
        builder.store(found, pointer(builder, _at(builder, to, size * number), found.type), align=_WORD)


def _begin(builder: Any, codes: int, start: Any, columns: int) -> list[Any]:
    """What a row's sums begin with: nothing, or of codes what is given."""
    if not codes:
        return [ir.Constant(_SINGLES, None)] * (columns * LANES // _WIDTH)
    return [_load(builder, start, offset, _BITS) for offset in range(0, LINE * columns, 4 * _WIDTH)]


@instruction(NONE, CONSTANT, numba.int64, AT, AT, AT, numba.int64, AT)
def sum_few(builder: Any, codes: Any, together: Any, x: Any, start: Any, weight: Any, blocks: Any, to: Any) -> None:
    """Sums `[together, 16]` of few rows, of codes (1) or bfloat16 (0), by a panel; there is code for each number."""
    begin, dots, apart = _begin(builder, codes, start, 1), _dots(codes), ir.Constant(LONG, 0)
    for rows in _SIZES:
        with builder.if_then(builder.icmp_signed("==", together, ir.Constant(LONG, rows))):
            _sum_up(builder, dots, begin, rows, x, weight, apart, blocks, to)


@instruction(NONE, CONSTANT, CONSTANT, AT, AT, AT, AT, numba.int64, AT)
def sum_group(
    builder: Any, codes: Any, columns: Any, x: Any, start: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """Sums `[TOGETHER, columns, 16]` of a group of rows likewise, by panels that are so many bytes apart."""
    begin = _begin(builder, codes, start, columns)
    _sum_up(builder, _dots(codes), begin, TOGETHER, x, weight, apart, blocks, to)
