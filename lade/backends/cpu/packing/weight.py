"""Packed weights: oneDNN layout, huge pages, and detection of changes."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lade.errors import UnsupportedModelError
from lade.model.config import dtype_name

MOST_INPUTS = 4096
"""Up to so many inputs a weight lies in blocks of 64 outputs on processors with tiles."""


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight, `[out, in]`, in oneDNN's layout.

    On processors with tiles (AMX) oneDNN lays a bfloat16 weight out in blocks of 32 outputs, unless it is told that a
    single row will come: then in blocks of 64, with which up to 16 rows take an eighth less time, and up to
    `MOST_INPUTS` inputs many more numbers of rows round alike. Beyond, fewer do, so there the layout is oneDNN's own.
    """
    in_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    rows = (1,) if in_tiles and weight.shape[1] <= MOST_INPUTS else ()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, *rows)
    return packed


CHUNK = 2**26
"""Bytes that are asked for at a time. What is not written into takes no memory."""


class HugePages:
    """Memory that is taken piece by piece, one behind the other; a chunk is freed when all its pieces are.

    Copies begin with none.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.int8)

    def __reduce__(self) -> tuple[type[HugePages], tuple[()]]:
        return HugePages, ()

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, a multiple of 64, all 0 and beginning at one: `[size]` int8."""
        if size > len(self._left):
            self._left = _chunk(max(size, CHUNK))
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def _chunk(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.int8)
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system that has none
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(chunk, dtype=torch.int8)


UNPACK_REMEDY = "call lade.unpack(model) first"


class PackedWeight(nn.Parameter):
    """The `weight` of a packed layer that gave its own up: to be looked at, but neither replaced nor moved.

    Raises:
        UnsupportedModelError: `weight.data` is assigned, or `weight.to` asks for another dtype or device.
    """

    @property
    def data(self) -> torch.Tensor:
        """Its numbers, in the packed layout."""
        return super().data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        raise UnsupportedModelError("the weight of a packed layer cannot be replaced", UNPACK_REMEDY)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of any tensor, if that is no other one; accelerate moves a weight so when it offloads a layer."""
        check_move(lambda tensor: tensor.to(*args, **kwargs), self.dtype)
        return super().to(*args, **kwargs)


def check_move(fn: Any, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` if `fn` gives a tensor another dtype or device."""
    after = fn(torch.empty(0, dtype=dtype))
    if after.dtype != dtype or after.device.type != "cpu":
        raise UnsupportedModelError(
            f"layers packed in {dtype_name(dtype)} for the CPU "
            f"cannot become {dtype_name(after.dtype)} on {after.device}",
            f"{UNPACK_REMEDY}, and pack it again afterwards",
        )


def like(weight: nn.Parameter, data: torch.Tensor, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    """A parameter with other data, with whatever transformers and others have noted on the first one."""
    parameter = kind(data, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    return parameter


class ByValue:
    """A tensor on its way to another process, or into a copy; what is unpickled is an ordinary tensor.

    Torch hands the numbers of a tensor to a process that is being started in shared memory, which has to live until
    then. What is made for the purpose is gone before: its numbers are sent themselves.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._tensor.contiguous().view(torch.uint8).numpy(), self._tensor.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._tensor


def _arrived(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype)


def state_of(weight: Any) -> tuple[int, int]:
    """Where a dense weight lies, and how often it was written to: another state says that it may have changed."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality in which a NaN equals itself, and zeros have signs."""
    as_integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(as_integers), other.contiguous().view(as_integers))
