"""Dtypes as compiled kernels are told of them, and the error for tensors that no kernel was compiled for."""

from __future__ import annotations

from typing import NoReturn

import torch

BFLOAT16, FLOAT16 = 1, 2
"""Kinds of two bytes; float32 is 0."""
_KINDS = {torch.float32: 0, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def kind_of(dtype: torch.dtype) -> int:
    """The number by which kernels know a dtype.

    Raises:
        ValueError: no kernel was compiled for it.
    """
    kind = _KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"a kernel was given {dtype}, and is compiled for {', '.join(map(str, _KINDS))}")
    return kind


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel can read a tensor by its address: on the CPU, and of no class that computes in its own way."""
    return type(tensor) in _PLAIN and tensor.is_cpu


def refuse(kernel: str, takes: str, **given: torch.Tensor | None) -> NoReturn:
    """Raise for tensors that a kernel was not compiled for. A kernel is told addresses only, so callers check first.

    Args:
        kernel: its name.
        takes: what it is compiled for.
        given: its arguments, by name.

    Raises:
        ValueError: always.
    """
    described = (f"{name} {_described(tensor)}" for name, tensor in given.items() if tensor is not None)
    raise ValueError(f"{kernel} was given {', '.join(described)}; it takes {takes}")


def _described(tensor: torch.Tensor) -> str:
    kind = "" if type(tensor) in _PLAIN else f"{type(tensor).__name__} "
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{dtype} {list(tensor.shape)} on {tensor.device}{' with gradients' * tensor.requires_grad}"
