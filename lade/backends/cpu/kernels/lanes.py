"""Vectors of 16 float32 lanes, whatever the processor: loads, stores, conversions and arithmetic."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.instructions import (
    AT,
    BFLOAT16,
    BYTE,
    FLOAT,
    FLOAT16,
    INT,
    LONG,
    NONE,
    call_intrinsic,
    clear,
    copy,
    pointer,
)
from lade.backends.cpu.kernels.vectors import Magnitudes, Vector, equal, rounded, splat, widened
from lade.compilation import inlined, instruction

LANES, LINE = 16, 64
"""Lanes of a vector, and its bytes."""
NUMBERS, MAGNITUDES = Vector(LANES), Magnitudes(LANES)
_SINGLES, _BITS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(INT, LANES)
_SHORTS, _SMALLS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)


def _taken(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(pointer(builder, address, kind), align=2)


def _put(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, value.type), align=1)


@instruction(NUMBERS, AT)
def load_float32(builder: Any, address: Any) -> Any:
    """Load float32 numbers."""
    return _taken(builder, address, _SINGLES)


@instruction(NUMBERS, AT)
def load_bfloat16(builder: Any, address: Any) -> Any:
    """Load bfloat16 numbers as float32; exact."""
    return widened(builder, _taken(builder, address, _SHORTS))


@instruction(NUMBERS, AT)
def load_float16(builder: Any, address: Any) -> Any:
    """Load float16 numbers as float32; exact."""
    return builder.fpext(_taken(builder, address, _SMALLS), _SINGLES)


@instruction(NUMBERS, AT)
def load_int32(builder: Any, address: Any) -> Any:
    """Load int32 numbers as float32; those above 2 ** 24 are rounded."""
    return builder.sitofp(_taken(builder, address, _BITS), _SINGLES)


@instruction(NONE, AT, NUMBERS)
def store_float32(builder: Any, address: Any, numbers: Any) -> None:
    """Store float32 numbers."""
    _put(builder, address, numbers)


@instruction(NONE, AT, NUMBERS)
def store_bfloat16(builder: Any, address: Any, numbers: Any) -> None:
    """Store as bfloat16, rounded to nearest even."""
    _put(builder, address, rounded(builder, numbers))


@instruction(NONE, AT, NUMBERS)
def store_float16(builder: Any, address: Any, numbers: Any) -> None:
    """Store as float16, rounded to nearest even."""
    _put(builder, address, builder.fptrunc(numbers, _SMALLS))


@instruction(NUMBERS, FLOAT)
def broadcast(builder: Any, number: Any) -> Any:
    """Broadcast a number to all lanes."""
    return splat(builder, number, LANES)


@instruction(NUMBERS, NUMBERS, NUMBERS)
def times(builder: Any, a: Any, b: Any) -> Any:
    """Multiply lane by lane."""
    return builder.fmul(a, b)


@instruction(NUMBERS, NUMBERS, NUMBERS)
def plus(builder: Any, a: Any, b: Any) -> Any:
    """Add lane by lane."""
    return builder.fadd(a, b)


@instruction(MAGNITUDES)
def zero_magnitudes(builder: Any) -> Any:
    """Return the initial value of a running maximum of magnitudes: zeros."""
    return equal(0, _BITS)


@instruction(MAGNITUDES, MAGNITUDES, NUMBERS)
def max_magnitudes(builder: Any, sizes: Any, numbers: Any) -> Any:
    """Return the maximum of running magnitudes and |numbers|, lane by lane."""
    bits = builder.and_(builder.bitcast(numbers, _BITS), equal(0x7FFFFFFF, _BITS))
    return builder.select(builder.icmp_unsigned(">", bits, sizes), bits, sizes)


@instruction(FLOAT, MAGNITUDES)
def largest_magnitude(builder: Any, sizes: Any) -> Any:
    """Return the maximum over all lanes."""
    most = call_intrinsic(builder, "llvm.vector.reduce.umax.v16i32", INT, sizes)
    return builder.bitcast(most, ir.FloatType())


@instruction(NONE, AT, NUMBERS, NUMBERS, AT)
def store_codes(builder: Any, address: Any, numbers: Any, steps: Any, zero: Any) -> None:
    """Store numbers / steps as int8 codes in which `zero`, 0 or 128, stands for zero.

    The conversion truncates, so adding one half rounds; for signed codes the offset of 128 is removed by flipping the
    sign bit.
    """
    shifted = builder.fadd(builder.fdiv(numbers, steps), equal(128.5, _SINGLES))
    changed = splat(builder, builder.trunc(builder.xor(zero, ir.Constant(LONG, 128)), INT), LANES)
    codes = builder.xor(builder.fptosi(shifted, _BITS), changed)
    _put(builder, address, builder.trunc(codes, ir.VectorType(BYTE, LANES)))


@inlined
def load_as(address: Any, kind: Any) -> Any:
    """Load numbers of a dtype code as float32."""
    if kind == BFLOAT16:
        return load_bfloat16(address)
    if kind == FLOAT16:
        return load_float16(address)
    return load_float32(address)


@inlined
def store_rounded(address: Any, numbers: Any, kind: Any) -> None:
    """Store numbers as a dtype code, rounded to nearest even."""
    if kind == BFLOAT16:
        store_bfloat16(address, numbers)
    elif kind == FLOAT16:
        store_float16(address, numbers)
    else:
        store_float32(address, numbers)


@inlined
def load_padded(address: Any, kind: Any, count: Any, spare: Any) -> Any:
    """Load up to `LANES` numbers and pad them with zeros; nothing past them is read."""
    if count < LANES:
        clear(spare, 4 * LANES)
        copy(spare, address, (2 if kind else 4) * count)
        address = spare
    return load_as(address, kind)
