"""Packed weights: oneDNN's layout, memory on huge pages, pickling, and detection of changes."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lade.errors import UnsupportedModelError
from lade.model.config import dtype_name

MOST_INPUTS = 4096
"""On processors with AMX, weights of up to this many inputs are laid out in blocks of 64 outputs."""
CHUNK = 2**26
"""Bytes requested from the system at a time; pages that are never written take no memory."""
UNPACK_REMEDY = "call lade.unpack(model) first"


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, `[out, in]`, in oneDNN's layout.

    On processors with AMX, oneDNN lays a bfloat16 weight out in blocks of 32 outputs, unless it is told to expect a
    single row. It then uses blocks of 64, which are an eighth faster for up to 16 rows and, up to `MOST_INPUTS` inputs,
    round alike for many more row counts. Beyond that, fewer counts round alike, so oneDNN's own choice is kept.
    """
    in_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    rows = (1,) if in_tiles and weight.shape[1] <= MOST_INPUTS else ()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, *rows)
    return packed


class HugePages:
    """Memory pool on huge pages, handed out in consecutive pieces; a chunk is freed with the last of its pieces.

    Copies start empty.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.int8, device="cpu")

    def __reduce__(self) -> tuple[type[HugePages], tuple[()]]:
        return HugePages, ()

    def take(self, size: int) -> torch.Tensor:
        """Return `size` zero bytes, a multiple of 64 and aligned to 64: `[size]` int8."""
        if size > len(self._left):
            self._left = _chunk(max(size, CHUNK))
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def _chunk(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.int8, device="cpu")
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # systems without huge pages
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(chunk, dtype=torch.int8)


class PackedWeight(nn.Parameter):
    """The `weight` of a packed layer whose original was freed; it can be read, but neither replaced nor moved.

    Raises:
        UnsupportedModelError: `weight.data` is assigned, or `weight.to` asks for another dtype or device.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values, in the packed layout."""
        return super().data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        raise UnsupportedModelError("the weight of a packed layer cannot be replaced", UNPACK_REMEDY)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert like any tensor if dtype and device stay the same; accelerate calls this when it offloads a layer."""
        check_move(lambda tensor: tensor.to(*args, **kwargs), self.dtype)
        return super().to(*args, **kwargs)


def check_move(fn: Any, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` if `fn` changes the dtype or device of a tensor."""
    after = fn(torch.empty(0, dtype=dtype, device="cpu"))
    if after.dtype != dtype or after.device.type != "cpu":
        raise UnsupportedModelError(
            f"layers packed in {dtype_name(dtype)} for the CPU "
            f"cannot become {dtype_name(after.dtype)} on {after.device}",
            f"{UNPACK_REMEDY}, and pack it again afterwards",
        )


def like(weight: nn.Parameter, data: torch.Tensor, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    """Return a parameter with other data and the attributes that transformers and others set on the original."""
    parameter = kind(data, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    return parameter


class ByValue:
    """Pickles a tensor by its bytes, and unpickles as an ordinary tensor.

    Torch passes tensors to a starting process in shared memory, which must live until then. A temporary tensor would be
    gone by that time, so its bytes are sent instead.
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
    """Return address and version of a dense weight; if either differs later, the weight may have changed."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if tensors are equal bit for bit: NaN equals itself, and zeros are signed."""
    as_integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(as_integers), other.contiguous().view(as_integers))
