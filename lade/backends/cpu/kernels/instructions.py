"""What compiled functions do that numba has no words for: memory by its address, and counts that threads share.

What compiled functions call is decorated; the rest is for those that build instructions. Sizes are in bytes.
"""

from __future__ import annotations

from typing import Any, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from lade.compilation import CONSTANT, instruction

AT, FLOAT, NONE = numba.int64, numba.float32, numba.void
"""Types of an address, of a number, and of nothing."""
INT, LONG, BYTE = ir.IntType(32), ir.IntType(64), ir.IntType(8)
_utils = cast(Any, cgutils)


def pointer(builder: Any, address: Any, kind: Any = BYTE) -> Any:
    """An address as one of values of a kind."""
    return builder.inttoptr(address, kind.as_pointer())


def call_intrinsic(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call one of LLVM's intrinsic functions, of a type of results."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(_utils.get_or_insert_function(builder.module, kind, name), values)


def fetch(builder: Any, address: Any, near: int) -> None:
    """Begin to read 64 bytes into the nearest cache (3), or the second one (2); without memory nothing happens."""
    numbers = (ir.Constant(INT, value) for value in (0, near, 1))  # to read, where to, and it is no code
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address), *numbers)


@instruction(NONE, AT, CONSTANT)
def prefetch(builder: Any, address: Any, near: Any) -> None:
    """As `fetch`."""
    fetch(builder, address, near)


@instruction(numba.int64, CONSTANT)
def room(builder: Any, size: Any) -> Any:
    """Address of so many bytes of a function's own, until it returns."""
    place = _utils.alloca_once(builder, ir.ArrayType(BYTE, size))
    place.align = 64
    return builder.ptrtoint(place, LONG)


@instruction(NONE, AT, numba.int64)
def clear(builder: Any, to: Any, count: Any) -> None:
    """So many bytes."""
    _utils.memset(builder, pointer(builder, to), count, 0)


@instruction(NONE, AT, AT, numba.int64)
def copy(builder: Any, to: Any, address: Any, count: Any) -> None:
    """So many bytes."""
    _utils.raw_memcpy(builder, pointer(builder, to), pointer(builder, address), count, 1)


@instruction(numba.int64, AT, numba.int64)
def field(builder: Any, address: Any, number: Any) -> Any:
    """The integer of that number from an address on."""
    place = builder.add(address, builder.mul(number, ir.Constant(LONG, 8)))
    return builder.load(pointer(builder, place, LONG), align=8)


@instruction(numba.int64, AT)
def load_long(builder: Any, address: Any) -> Any:
    """The integer at an address."""
    return builder.load(pointer(builder, address, LONG), align=8)


@instruction(FLOAT, AT)
def load_one(builder: Any, address: Any) -> Any:
    """The float32 number at an address."""
    return builder.load(pointer(builder, address, ir.FloatType()), align=4)


@instruction(NONE, AT, FLOAT)
def store_one(builder: Any, address: Any, number: Any) -> None:
    """Put a float32 number there."""
    builder.store(number, pointer(builder, address, ir.FloatType()), align=4)


@instruction(numba.int64, AT)
def next_part(builder: Any, address: Any) -> Any:
    """Count an integer up, which no other thread comes between, and return what it was."""
    return builder.atomic_rmw("add", pointer(builder, address, LONG), ir.Constant(LONG, 1), "monotonic")
