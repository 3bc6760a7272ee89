"""Dot products (AVX-512 with VNNI, or with BF16): their instructions, and how rows and weights lie for them.

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

from lade.decoding.compilation import CONSTANT, inlined, instruction
from lade.model.kernels.instructions import AT, INT, LONG, NONE, call_intrinsic, fetch, field, pointer
from lade.model.kernels.lanes import LANES, LINE
from lade.model.kernels.vector_types import spread_out

DOT_BLOCK = 64
"""Bytes of a row's or an output's inputs that lie together."""
DOT_PANEL = LANES
"""Outputs of a panel."""
FEW = 24
"""Rows that go through a panel together, at most."""
TOGETHER = 8
"""Rows of a group where there are more."""
PANEL_BLOCK = DOT_BLOCK * LANES
"""Bytes of a panel's block of inputs."""
FEW_SUMS, MANY_SUMS = FEW * LINE, 2 * TOGETHER * LINE
"""Bytes of all sums of few rows and one panel, and of a group of rows and two panels."""
_SIZES = (1, 2, 4, 6, 8, 12, 16, FEW)
_WORD, _AHEAD = 4, 8 * PANEL_BLOCK


@cache
def has_dots(dtype: torch.dtype) -> bool:
    """Whether this processor has dot products of a dtype, bfloat16 or int8, and numba compiles for them."""
    needed = {torch.bfloat16: "+avx512bf16", torch.int8: "+avx512vnni"}.get(dtype)
    _, _, features = cast(Any, cpu_target).target_context.codegen().magic_tuple()
    return needed in features.split(",") and not cast(Any, numba).config.DISABLE_JIT


def rows_together(rows: int) -> int:
    """How many rows lie and go through panels together, of so many; the last of them may be missing."""
    return next((size for size in _SIZES if rows <= size), TOGETHER)


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
def asked_for(address: Any) -> Any:
    """The product, from the fields behind the header that a team is given."""
    places = field(address, 2), field(address, 3), field(address, 4), field(address, 5), field(address, 6)
    more = field(address, 7), field(address, 8), field(address, 9), field(address, 10), field(address, 11)
    last = field(address, 12), field(address, 13), field(address, 14), field(address, 15), field(address, 16)
    return DotProduct(*places, *more, *last)


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not know of."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_SINGLES, _BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(INT, LANES)
_PAIRS = ir.VectorType(_Bfloat16(), 2 * LANES)
_utils = cast(Any, cgutils)


def _dot_bfloat16(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    x, weights = builder.bitcast(x, _PAIRS), builder.bitcast(weights, _PAIRS)
    return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SINGLES, sums, x, weights)


def _dot_int8(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Of unsigned inputs and signed weights; nothing is cut off."""
    return call_intrinsic(builder, "llvm.x86.avx512.vpdpbusd.512", _BITS, sums, x, weights)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(LONG, offset))


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.load(pointer(builder, _at(builder, address, offset), kind), align=_WORD)


def _sum_up(
    builder: Any, dot: Any, begin: list[Any], rows: int, x: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """Sums of so many rows by as many panels as there are in `begin`, kept in registers until they are written."""
    sums = [[_utils.alloca_once_value(builder, first) for first in begin] for _ in range(rows)]
    with _utils.for_range(builder, blocks) as loop:
        row = builder.add(x, builder.mul(loop.index, ir.Constant(LONG, DOT_BLOCK * rows)))
        first = builder.add(weight, builder.mul(loop.index, ir.Constant(LONG, PANEL_BLOCK)))
        panels = [builder.add(first, builder.mul(apart, ir.Constant(LONG, column))) for column in range(len(begin))]
        for word in range(DOT_BLOCK // _WORD):
            for panel in panels:
                fetch(builder, _at(builder, panel, _AHEAD + LINE * word), 3)
            weights = [_load(builder, panel, LINE * word, _BITS) for panel in panels]
            for number in range(rows):
                spread = spread_out(builder, _load(builder, row, DOT_BLOCK * number + _WORD * word, INT), LANES)
                for place, line in zip(sums[number], weights, strict=True):
                    builder.store(dot(builder, builder.load(place), spread, line), place)
    for number, place in enumerate(place for places in sums for place in places):
        found = builder.load(place)
        builder.store(found, pointer(builder, _at(builder, to, LINE * number), found.type), align=_WORD)


@instruction(NONE, CONSTANT, CONSTANT, AT, AT, AT, numba.int64, AT)
def sum_bfloat16(builder: Any, rows: Any, columns: Any, x: Any, weight: Any, apart: Any, blocks: Any, to: Any) -> None:
    """Sums `[rows, columns, 16]` of rows in blocks by panels that are so many bytes apart."""
    begin = [ir.Constant(_SINGLES, None)] * columns
    _sum_up(builder, _dot_bfloat16, begin, rows, x, weight, apart, blocks, to)


@instruction(NONE, CONSTANT, CONSTANT, AT, AT, AT, AT, numba.int64, AT)
def sum_codes(
    builder: Any, rows: Any, columns: Any, x: Any, start: Any, weight: Any, apart: Any, blocks: Any, to: Any
) -> None:
    """The same of codes, which begin with what is given for each panel."""
    begin = [_load(builder, start, LINE * column, _BITS) for column in range(columns)]
    _sum_up(builder, _dot_int8, begin, rows, x, weight, apart, blocks, to)
