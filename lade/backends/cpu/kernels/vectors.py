"""Vectors of as many float32 numbers as the processor has: taken from memory and put there, and what is done with them.

What a lane holds depends on no other lane. It is written in vectors since a compiler that makes vectors of loops must
be free to change the order of sums to do it well; here it has no such freedom, and fused products are asked for by
name.
Addresses are in bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.instructions import AT, FLOAT, NONE, call_intrinsic, pointer
from lade.backends.cpu.kernels.kinds import BFLOAT16, FLOAT16
from lade.backends.cpu.kernels.vector_types import Vector, equal, rounded, spread_out, widened
from lade.compilation import inlined, instruction

QUAD = 4
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Float32 numbers of a vector, or of two where vectors have four: no result depends on it."""
WIDE = 2 * LANES
"""Columns that are multiplied together; rows of a chunk are filled up to a multiple."""
WIDEST = 32
WORD = 4
"""Bytes of a number."""
FLOATS, FLOATS_OF_QUAD = Vector(LANES), Vector(QUAD)
FLOAT_LANES = ir.VectorType(ir.FloatType(), LANES)
INT_LANES, SHORT_LANES, BYTE_LANES = (ir.VectorType(ir.IntType(bits), LANES) for bits in (32, 16, 8))
"""The types of vectors in LLVM."""


def read(builder: Any, address: Any, kind: Any) -> Any:
    """A value of a kind at an address, at which it need not begin a whole vector."""
    element = getattr(kind, "element", kind)
    align = element.width // 8 if isinstance(element, ir.IntType) else WORD
    return builder.load(pointer(builder, address, kind), align=align)


def write(builder: Any, address: Any, value: Any) -> None:
    """Put a value there likewise."""
    align = 2 if value.type == SHORT_LANES else WORD
    builder.store(value, pointer(builder, address, value.type), align=align)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The product of the first two, and the third, rounded once."""
    return call_intrinsic(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


@instruction(FLOATS, AT)
def load(builder: Any, address: Any) -> Any:
    """Numbers at an address."""
    return read(builder, address, FLOAT_LANES)


@instruction(FLOATS_OF_QUAD, AT)
def load_quad(builder: Any, address: Any) -> Any:
    """Four of them."""
    return read(builder, address, ir.VectorType(ir.FloatType(), QUAD))


@instruction(NONE, AT, FLOATS)
def store(builder: Any, address: Any, vector: Any) -> None:
    """Put them there."""
    write(builder, address, vector)


@instruction(NONE, AT, FLOATS_OF_QUAD)
def store_quad(builder: Any, address: Any, vector: Any) -> None:
    """Put four of them there."""
    write(builder, address, vector)


@instruction(FLOATS, FLOAT)
def spread(builder: Any, number: Any) -> Any:
    """The number in all lanes."""
    return spread_out(builder, number, LANES)


@instruction(FLOATS, FLOATS, FLOATS, FLOATS)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The products of the first two, and the third, rounded once."""
    return fused(builder, a, b, c)


@instruction(FLOATS_OF_QUAD, FLOATS_OF_QUAD, FLOATS_OF_QUAD)
def add_quads(builder: Any, a: Any, b: Any) -> Any:
    """Sums of four."""
    return builder.fadd(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def minus(builder: Any, a: Any, b: Any) -> Any:
    """Differences, lane by lane."""
    return builder.fsub(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def product(builder: Any, a: Any, b: Any) -> Any:
    """Products likewise."""
    return builder.fmul(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def quotient(builder: Any, a: Any, b: Any) -> Any:
    """Quotients likewise."""
    return builder.fdiv(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def highest(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two numbers; the second, if the first is none."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@instruction(FLOATS, AT)
def of_bfloat16(builder: Any, address: Any) -> Any:
    """The upper halves of float32 numbers."""
    return widened(builder, read(builder, address, SHORT_LANES))


@instruction(NONE, AT, FLOATS)
def store_bfloat16(builder: Any, address: Any, vector: Any) -> None:
    """Rounded to the nearest, of two as near to the even one."""
    write(builder, address, rounded(builder, vector))


@instruction(FLOATS, AT)
def of_float16(builder: Any, address: Any) -> Any:
    """Its exponents are less by 112; infinity has its largest one."""
    bits = builder.zext(read(builder, address, SHORT_LANES), INT_LANES)
    sign = builder.shl(builder.and_(bits, equal(0x8000, INT_LANES)), equal(16, INT_LANES))
    rest = builder.shl(builder.and_(bits, equal(0x7FFF, INT_LANES)), equal(13, INT_LANES))
    number = builder.bitcast(builder.fmul(builder.bitcast(rest, FLOAT_LANES), equal(2.0**112, FLOAT_LANES)), INT_LANES)
    endless = builder.icmp_unsigned(">=", rest, equal(0x7C00 << 13, INT_LANES))
    number = builder.select(endless, builder.or_(rest, equal(0x7F800000, INT_LANES)), number)
    return builder.bitcast(builder.or_(number, sign), FLOAT_LANES)


@inlined
def as_floats(address: Any, kind: Any) -> Any:
    """Numbers of a kind, converted."""
    if kind == BFLOAT16:
        return of_bfloat16(address)
    if kind == FLOAT16:
        return of_float16(address)
    return load(address)


@inlined
def store_as(address: Any, numbers: Any, kind: Any) -> None:
    """As numbers of a kind, float32 or bfloat16."""
    if kind == BFLOAT16:
        store_bfloat16(address, numbers)
    else:
        store(address, numbers)
