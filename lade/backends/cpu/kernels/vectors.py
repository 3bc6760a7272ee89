"""Vectors as wide as the processor's registers: types, loads, stores, conversions and arithmetic.

A lane depends on no other lane. Vectors are written out by hand since a compiler that vectorises loops well must be
free to reorder sums; here it has no such freedom, and fused multiply-adds are requested explicitly. Addresses are in
bytes.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import models, register_model

from lade.backends.cpu.kernels.instructions import AT, BFLOAT16, FLOAT, FLOAT16, INT, NONE, call_intrinsic, pointer
from lade.compilation import inlined, instruction


class Vector(numba.types.Type):
    """Numba type of a vector of float32 lanes."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


class Magnitudes(numba.types.Type):
    """Numba type of a vector of magnitudes: float32 bits without the sign, which compare like numbers; NaN is the
    largest.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"sizes{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(ir.FloatType(), vector.lanes))  # type: ignore[no-untyped-call]


@register_model(Magnitudes)
class _MagnitudesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, sizes: Magnitudes) -> None:
        super().__init__(manager, sizes, ir.VectorType(INT, sizes.lanes))  # type: ignore[no-untyped-call]


def equal(value: float, kind: Any) -> Any:
    """Return a constant vector with `value` in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """Emit the broadcast of a scalar to `lanes` lanes."""
    kind = ir.VectorType(number.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, equal(0, ir.VectorType(INT, lanes)))


def widened(builder: Any, halves: Any) -> Any:
    """Emit the conversion of bfloat16 bits, as integers, to float32."""
    kind, floats = (ir.VectorType(each, halves.type.count) for each in (INT, ir.FloatType()))
    return builder.bitcast(builder.shl(builder.zext(halves, kind), equal(16, kind)), floats)


def rounded(builder: Any, numbers: Any) -> Any:
    """Emit the conversion of float32 to bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    kind, halves = (ir.VectorType(ir.IntType(size), numbers.type.count) for size in (32, 16))
    bits = builder.bitcast(numbers, kind)
    odd = builder.and_(builder.lshr(bits, equal(16, kind)), equal(1, kind))
    found = builder.lshr(builder.add(bits, builder.add(odd, equal(0x7FFF, kind))), equal(16, kind))
    found = builder.select(builder.fcmp_ordered("==", numbers, numbers), found, equal(0x7FC0, kind))
    return builder.trunc(found, halves)


QUAD = 4
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Lanes of a vector, or of two where registers hold four; no result depends on it."""
WIDE = 2 * LANES
"""Columns of the micro-kernel; rows of a chunk are padded to a multiple."""
WIDEST = 32
"""Most columns that any processor's micro-kernel takes, for sizes that must not depend on it."""
WORD = 4
"""Bytes of a float32."""
FLOATS, FLOATS_OF_QUAD = Vector(LANES), Vector(QUAD)
FLOAT_LANES = ir.VectorType(ir.FloatType(), LANES)
INT_LANES, SHORT_LANES, BYTE_LANES = (ir.VectorType(ir.IntType(bits), LANES) for bits in (32, 16, 8))
"""LLVM's vector types."""


def read(builder: Any, address: Any, kind: Any) -> Any:
    """Emit an unaligned load of a value of type `kind`."""
    element = getattr(kind, "element", kind)
    align = element.width // 8 if isinstance(element, ir.IntType) else WORD
    return builder.load(pointer(builder, address, kind), align=align)


def write(builder: Any, address: Any, value: Any) -> None:
    """Emit an unaligned store of a value."""
    align = 2 if value.type == SHORT_LANES else WORD
    builder.store(value, pointer(builder, address, value.type), align=align)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c with one rounding."""
    return call_intrinsic(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


@instruction(FLOATS, AT)
def load(builder: Any, address: Any) -> Any:
    """Load a vector of float32."""
    return read(builder, address, FLOAT_LANES)


@instruction(FLOATS_OF_QUAD, AT)
def load_quad(builder: Any, address: Any) -> Any:
    """Load four float32."""
    return read(builder, address, ir.VectorType(ir.FloatType(), QUAD))


@instruction(NONE, AT, FLOATS)
def store(builder: Any, address: Any, vector: Any) -> None:
    """Store a vector of float32."""
    write(builder, address, vector)


@instruction(NONE, AT, FLOATS_OF_QUAD)
def store_quad(builder: Any, address: Any, vector: Any) -> None:
    """Store four float32."""
    write(builder, address, vector)


@instruction(FLOATS, FLOAT)
def broadcast(builder: Any, number: Any) -> Any:
    """Broadcast a number to all lanes."""
    return splat(builder, number, LANES)


@instruction(FLOATS, FLOATS, FLOATS, FLOATS)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return fused(builder, a, b, c)


@instruction(FLOATS_OF_QUAD, FLOATS_OF_QUAD, FLOATS_OF_QUAD)
def add_quads(builder: Any, a: Any, b: Any) -> Any:
    """Add four numbers lane by lane."""
    return builder.fadd(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def minus(builder: Any, a: Any, b: Any) -> Any:
    """Subtract lane by lane."""
    return builder.fsub(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def product(builder: Any, a: Any, b: Any) -> Any:
    """Multiply lane by lane."""
    return builder.fmul(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def quotient(builder: Any, a: Any, b: Any) -> Any:
    """Divide lane by lane."""
    return builder.fdiv(a, b)


@instruction(FLOATS, FLOATS, FLOATS)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger number of each lane; b where a is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@instruction(FLOATS, AT)
def load_bfloat16(builder: Any, address: Any) -> Any:
    """Load bfloat16 numbers as float32."""
    return widened(builder, read(builder, address, SHORT_LANES))


@instruction(NONE, AT, FLOATS)
def store_bfloat16(builder: Any, address: Any, vector: Any) -> None:
    """Store as bfloat16, rounded to nearest even."""
    write(builder, address, rounded(builder, vector))


@instruction(FLOATS, AT)
def load_float16(builder: Any, address: Any) -> Any:
    """Load float16 numbers as float32: rebias the exponent by 112, keep infinities."""
    bits = builder.zext(read(builder, address, SHORT_LANES), INT_LANES)
    sign = builder.shl(builder.and_(bits, equal(0x8000, INT_LANES)), equal(16, INT_LANES))
    rest = builder.shl(builder.and_(bits, equal(0x7FFF, INT_LANES)), equal(13, INT_LANES))
    number = builder.bitcast(builder.fmul(builder.bitcast(rest, FLOAT_LANES), equal(2.0**112, FLOAT_LANES)), INT_LANES)
    endless = builder.icmp_unsigned(">=", rest, equal(0x7C00 << 13, INT_LANES))
    number = builder.select(endless, builder.or_(rest, equal(0x7F800000, INT_LANES)), number)
    return builder.bitcast(builder.or_(number, sign), FLOAT_LANES)


@inlined
def load_as_float32(address: Any, kind: Any) -> Any:
    """Load numbers of a dtype code as float32."""
    if kind == BFLOAT16:
        return load_bfloat16(address)
    if kind == FLOAT16:
        return load_float16(address)
    return load(address)


@inlined
def store_as(address: Any, numbers: Any, kind: Any) -> None:
    """Store numbers as float32 or bfloat16, by dtype code."""
    if kind == BFLOAT16:
        store_bfloat16(address, numbers)
    else:
        store(address, numbers)
