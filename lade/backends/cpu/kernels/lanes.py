"""16 float32 numbers at once: taken from memory and put there as numbers of a kind, and what is done with them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.instructions import (
    AT,
    BYTE,
    FLOAT,
    INT,
    LONG,
    NONE,
    call_intrinsic,
    clear,
    copy,
    pointer,
)
from lade.backends.cpu.kernels.kinds import BFLOAT16, FLOAT16
from lade.backends.cpu.kernels.vector_types import Sizes, Vector, equal, rounded, spread_out, widened
from lade.compilation import inlined, instruction

LANES, LINE = 16, 64
"""Numbers of 32 bits in a vector, and its bytes."""
NUMBERS, SIZES = Vector(LANES), Sizes(LANES)
_SINGLES, _BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(INT, LANES)
_SHORTS, _SMALLS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)


def _taken(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(pointer(builder, address, kind), align=2)


def _put(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, value.type), align=1)


@instruction(NUMBERS, AT)
def take_float32(builder: Any, address: Any) -> Any:
    """Numbers at an address."""
    return _taken(builder, address, _SINGLES)


@instruction(NUMBERS, AT)
def take_bfloat16(builder: Any, address: Any) -> Any:
    """The same of bfloat16, exactly."""
    return widened(builder, _taken(builder, address, _SHORTS))


@instruction(NUMBERS, AT)
def take_float16(builder: Any, address: Any) -> Any:
    """The same of float16."""
    return builder.fpext(_taken(builder, address, _SMALLS), _SINGLES)


@instruction(NUMBERS, AT)
def take_sums(builder: Any, address: Any) -> Any:
    """Integers, of which large ones are rounded."""
    return builder.sitofp(_taken(builder, address, _BITS), _SINGLES)


@instruction(NONE, AT, NUMBERS)
def put_float32(builder: Any, address: Any, numbers: Any) -> None:
    """Put them there."""
    _put(builder, address, numbers)


@instruction(NONE, AT, NUMBERS)
def put_bfloat16(builder: Any, address: Any, numbers: Any) -> None:
    """Rounded to the nearest, of two as near to the even one."""
    _put(builder, address, rounded(builder, numbers))


@instruction(NONE, AT, NUMBERS)
def put_float16(builder: Any, address: Any, numbers: Any) -> None:
    """Rounded likewise."""
    _put(builder, address, builder.fptrunc(numbers, _SMALLS))


@instruction(NUMBERS, FLOAT)
def in_all_lanes(builder: Any, number: Any) -> Any:
    """The number in all lanes."""
    return spread_out(builder, number, LANES)


@instruction(NUMBERS, NUMBERS, NUMBERS)
def times(builder: Any, a: Any, b: Any) -> Any:
    """Products, lane by lane."""
    return builder.fmul(a, b)


@instruction(NUMBERS, NUMBERS, NUMBERS)
def plus(builder: Any, a: Any, b: Any) -> Any:
    """Sums likewise."""
    return builder.fadd(a, b)


@instruction(SIZES)
def no_sizes(builder: Any) -> Any:
    """Zeros, to begin with."""
    return equal(0, _BITS)


@instruction(SIZES, SIZES, NUMBERS)
def larger(builder: Any, sizes: Any, numbers: Any) -> Any:
    """Of each lane the size so far, or that of a number if it is larger."""
    bits = builder.and_(builder.bitcast(numbers, _BITS), equal(0x7FFFFFFF, _BITS))
    return builder.select(builder.icmp_unsigned(">", bits, sizes), bits, sizes)


@instruction(FLOAT, SIZES)
def largest(builder: Any, sizes: Any) -> Any:
    """The largest of all lanes."""
    most = call_intrinsic(builder, "llvm.vector.reduce.umax.v16i32", INT, sizes)
    return builder.bitcast(most, ir.FloatType())


@instruction(NONE, AT, NUMBERS, NUMBERS, AT)
def put_codes(builder: Any, address: Any, numbers: Any, steps: Any, zero: Any) -> None:
    """Numbers over what a step is worth, as bytes in which a number, 0 or 128, stands for zero.

    The conversion cuts off, so that the half makes it round; where 128 is to be taken off again the first bit changes.
    """
    shifted = builder.fadd(builder.fdiv(numbers, steps), equal(128.5, _SINGLES))
    changed = spread_out(builder, builder.trunc(builder.xor(zero, ir.Constant(LONG, 128)), INT), LANES)
    codes = builder.xor(builder.fptosi(shifted, _BITS), changed)
    _put(builder, address, builder.trunc(codes, ir.VectorType(BYTE, LANES)))


@inlined
def take(address: Any, kind: Any) -> Any:
    """Numbers of a kind at an address."""
    if kind == BFLOAT16:
        return take_bfloat16(address)
    if kind == FLOAT16:
        return take_float16(address)
    return take_float32(address)


@inlined
def put_as(address: Any, numbers: Any, kind: Any) -> None:
    """Put them there as numbers of a kind, rounded to the nearest, of two as near to the even one."""
    if kind == BFLOAT16:
        put_bfloat16(address, numbers)
    elif kind == FLOAT16:
        put_float16(address, numbers)
    else:
        put_float32(address, numbers)


@inlined
def take_some(address: Any, kind: Any, count: Any, spare: Any) -> Any:
    """As many numbers as there are lanes, or less: the rest is zeros, and nothing behind them is read."""
    if count < LANES:
        clear(spare, 4 * LANES)
        copy(spare, address, (2 if kind else 4) * count)
        address = spare
    return take(address, kind)
