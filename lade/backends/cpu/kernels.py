"""Compiled kernels of packed layers and invariant models, and the tensors they take; see `lade/native/cpu.h`."""

from __future__ import annotations

import ctypes
from functools import cache, cached_property
from typing import Any, NoReturn

import torch

from lade.errors import UnsupportedModelError
from lade.native import COMPILER_REMEDY, library

BFLOAT16, FLOAT16 = 1, 2
"""Dtype codes of two-byte dtypes; float32 is 0."""
WIDEST = 32
"""Least numbers that a norm or an activation takes at once, whatever the width of vectors."""
_KINDS = {torch.float32: 0, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CpuKernel:
    """A compiled kernel, found on its first call; several threads may enter it at once, without holding the GIL.

    Args:
        name: its name in `lade/native`.
        instructions: instructions it was compiled for, such as "avx2"; empty for the best that this processor has.
    """

    def __init__(self, name: str, instructions: str = "") -> None:
        self.name, self.instructions = name, instructions

    @cached_property
    def available(self) -> bool:
        """True if the library is there, and has this kernel for instructions of this processor."""
        return self._find() is not None

    @cached_property
    def address(self) -> int:
        """Address of the machine code, a C function.

        Raises:
            UnsupportedModelError: there is no such kernel here.
        """
        found = self._find()
        if found is None:
            raise UnsupportedModelError(f"the compiled kernel {self.name!r} is missing", COMPILER_REMEDY)
        return found

    def __call__(self, place: int) -> None:
        """Run the kernel in this thread on the fields at an address, see `worker_threads.run_on_team`."""
        self._enter(place)

    @cached_property
    def _enter(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def _find(self) -> int | None:
        find = _finder()
        found: int | None = find(self.name.encode(), self.instructions.encode()) if find is not None else None
        return found


@cache
def kernel(name: str, instructions: str = "") -> CpuKernel:
    """Return the kernel of a name, for the best instructions that this processor has or for the given ones."""
    return CpuKernel(name, instructions)


@cache
def _finder() -> Any:
    loaded = library()
    if loaded is None:
        return None
    find = loaded.lade_cpu_kernel
    find.argtypes, find.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_void_p
    return find


def dtype_code(dtype: torch.dtype) -> int:
    """Return the dtype code that kernels take.

    Raises:
        ValueError: no kernel takes this dtype.
    """
    kind = _KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"a kernel was given {dtype}; it takes {', '.join(map(str, _KINDS))}")
    return kind


def address_of(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's numbers; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a kernel can read a tensor by its address: a plain tensor or parameter on the CPU."""
    return type(tensor) in _PLAIN and tensor.is_cpu


def refuse(taker: str, takes: str, **given: torch.Tensor | None) -> NoReturn:
    """Raise for tensors that a kernel does not support. Kernels see addresses only, so callers check first.

    Raises:
        ValueError: always.
    """
    described = (f"{name} {_described(tensor)}" for name, tensor in given.items() if tensor is not None)
    raise ValueError(f"{taker} was given {', '.join(described)}; it takes {takes}")


def _described(tensor: torch.Tensor) -> str:
    kind = "" if type(tensor) in _PLAIN else f"{type(tensor).__name__} "
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{dtype} {list(tensor.shape)} on {tensor.device}{' with gradients' * tensor.requires_grad}"
