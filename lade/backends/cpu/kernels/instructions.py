"""Primitives of compiled kernels: raw memory access, atomic counters, CPU features, and dtype codes.

Functions decorated with `instruction` are called by compiled code; the others emit LLVM instructions. Magnitudes are in
bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn, cast

import numba
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.core.registry import cpu_target

from lade.compilation import CONSTANT, instruction

AT, FLOAT, NONE = numba.int64, numba.float32, numba.void
"""Numba types of an address, a float32 number and no result."""
INT, LONG, BYTE = ir.IntType(32), ir.IntType(64), ir.IntType(8)
BFLOAT16, FLOAT16 = 1, 2
"""Dtype codes of two-byte dtypes; float32 is 0."""
_KINDS = {torch.float32: 0, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_utils = cast(Any, cgutils)


@cache
def has_features(*names: str) -> bool:
    """Return True if numba compiles for all of these CPU features, such as "avx2"; False if its JIT is disabled."""
    _, _, found = cast(Any, cpu_target).target_context.codegen().magic_tuple()
    return {f"+{name}" for name in names} <= set(found.split(",")) and not cast(Any, numba).config.DISABLE_JIT


def dtype_code(dtype: torch.dtype) -> int:
    """Return the dtype code that kernels take.

    Raises:
        ValueError: no kernel is compiled for this dtype.
    """
    kind = _KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"a kernel was given {dtype}; it takes {', '.join(map(str, _KINDS))}")
    return kind


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a kernel can read a tensor by its address: a plain tensor or parameter on the CPU."""
    return type(tensor) in _PLAIN and tensor.is_cpu


def refuse(kernel: str, takes: str, **given: torch.Tensor | None) -> NoReturn:
    """Raise for tensors that a kernel does not support. Kernels see addresses only, so callers check first.

    Args:
        kernel: name of the kernel, for the message.
        takes: description of what the kernel supports.
        given: the arguments, by name.

    Raises:
        ValueError: always.
    """
    described = (f"{name} {_described(tensor)}" for name, tensor in given.items() if tensor is not None)
    raise ValueError(f"{kernel} was given {', '.join(described)}; it takes {takes}")


def _described(tensor: torch.Tensor) -> str:
    kind = "" if type(tensor) in _PLAIN else f"{type(tensor).__name__} "
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{dtype} {list(tensor.shape)} on {tensor.device}{' with gradients' * tensor.requires_grad}"


def pointer(builder: Any, address: Any, kind: Any = BYTE) -> Any:
    """Emit the cast of an integer address to a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def call_intrinsic(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Emit a call of an LLVM intrinsic with result type `result`."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(_utils.get_or_insert_function(builder.module, kind, name), values)


def fetch(builder: Any, address: Any, near: int) -> None:
    """Emit a prefetch of 64 bytes into the L1 (3) or L2 cache (2); harmless if the address is unmapped."""
    numbers = (ir.Constant(INT, value) for value in (0, near, 1))  # read access, cache level, data cache
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address), *numbers)


@instruction(NONE, AT, CONSTANT)
def prefetch(builder: Any, address: Any, near: Any) -> None:
    """Prefetch 64 bytes, see `fetch`."""
    fetch(builder, address, near)


@instruction(numba.int64, CONSTANT)
def stack_memory(builder: Any, size: Any) -> Any:
    """Return the address of `size` bytes on the stack, aligned to 64 and valid until the function returns."""
    place = _utils.alloca_once(builder, ir.ArrayType(BYTE, size))
    place.align = 64
    return builder.ptrtoint(place, LONG)


@instruction(NONE, AT, numba.int64)
def clear(builder: Any, to: Any, count: Any) -> None:
    """Set `count` bytes to zero."""
    _utils.memset(builder, pointer(builder, to), count, 0)


@instruction(NONE, AT, AT, numba.int64)
def copy(builder: Any, to: Any, address: Any, count: Any) -> None:
    """Copy `count` bytes."""
    _utils.raw_memcpy(builder, pointer(builder, to), pointer(builder, address), count, 1)


@instruction(numba.int64, AT, numba.int64)
def field(builder: Any, address: Any, number: Any) -> Any:
    """Return the int64 at index `number` from an address."""
    place = builder.add(address, builder.mul(number, ir.Constant(LONG, 8)))
    return builder.load(pointer(builder, place, LONG), align=8)


@instruction(numba.int64, AT)
def load_long(builder: Any, address: Any) -> Any:
    """Return the int64 at an address."""
    return builder.load(pointer(builder, address, LONG), align=8)


@instruction(FLOAT, AT)
def load_one(builder: Any, address: Any) -> Any:
    """Return the float32 at an address."""
    return builder.load(pointer(builder, address, ir.FloatType()), align=4)


@instruction(NONE, AT, FLOAT)
def store_one(builder: Any, address: Any, number: Any) -> None:
    """Store a float32 at an address."""
    builder.store(number, pointer(builder, address, ir.FloatType()), align=4)


@instruction(numba.int64, AT)
def next_part(builder: Any, address: Any) -> Any:
    """Atomically increment the int64 at an address and return its previous value."""
    return builder.atomic_rmw("add", pointer(builder, address, LONG), ir.Constant(LONG, 1), "monotonic")
