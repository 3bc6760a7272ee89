"""Int8 codes and their exact products by oneDNN, tried on this processor.

Unsigned inputs with their zero at 128 are what VNNI multiplies with signed weights. Beside AMX oneDNN takes the zero's
part off the sums in float32, which is not exact beyond 2^24, but there it multiplies signed inputs as fast. Both stand
for the same integers, so results have the same bits on either sort of processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch

from lade.errors import UnsupportedModelError


@contextmanager
def required(kernel: str, remedy: str) -> Iterator[None]:
    """Try a kernel in this block.

    Args:
        kernel: that is tried, such as "int8 kernel".
        remedy: where there is none.

    Raises:
        UnsupportedModelError: this build of PyTorch, or this processor, has none.
    """
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            raise RuntimeError("torch.backends.mkldnn is not available or not enabled")
        yield
    except (RuntimeError, AttributeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise UnsupportedModelError(f"PyTorch has no {kernel} here ({reason})", remedy) from problem


LARGEST = 127
"""Of a code, so that codes are symmetric; -128 is not used."""
ZERO_POINT = 128
"""The unsigned code of an input of 0."""
_TINY = 1e-30
"""Least scale of an input, so that a row of zeros is not divided by zero."""


@dataclass(frozen=True)
class Codes:
    """A weight matrix in int8: `values * scale[:, None]`.

    Attributes:
        values: `[out, in]` int8, from -127 to 127.
        scale: `[out]` float32, what a step is worth in each row.
    """

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Round a weight `[out, in]`; the largest weight of each output becomes 127 or -127."""
        scale = scale_of(weight)
        values = (weight.float() / scale.clamp_min(_TINY)[:, None]).round_().to(torch.int8)
        return cls(values, scale)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the codes stand for, `[out, in]`."""
        return (self.values * self.scale[:, None]).to(dtype)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """What a step of each row's codes is worth, `[out]` float32; not finite where the row is not."""
    return weight.abs().amax(-1).float() / LARGEST


def quantised(x: torch.Tensor, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs, each row by its own largest element: the codes of a row do not depend on the rows beside it.

    Every operation is exact, or rounds each element by itself.

    Args:
        x: `[..., in]`, floating point.
        form: dtype of the codes, which stand for the same integers in either.

    Returns:
        Codes `[..., in]`, contiguous: uint8, 1 to 255 with 128 for zero, or int8, -127 to 127; and what a step is
        worth, `[..., 1]` float32.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min_(_TINY).div_(LARGEST)
    # The conversion cuts off, so that the half makes it round.
    codes = (x / scale).add_(ZERO_POINT + 0.5).to(torch.uint8)
    return in_form(codes.contiguous(), form), scale


def in_form(codes: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    """Unsigned codes, which are used up, in either form."""
    # Without its zero point a code has the other first bit; rounding to signed codes at once would round otherwise.
    return codes if form == torch.uint8 else codes.bitwise_xor_(ZERO_POINT).view(torch.int8)


ROWS_PACKED_FOR = 4
"""The rows that oneDNN is told of when it chooses a layout; without any it has none for some shapes."""
FEW_RESULTS, MANY_ROWS = 256, 33
"""Up to so many results, of fewer rows, oneDNN keeps from its tiles (AMX) and, of signed inputs, multiplies one by one,
a hundred times as slowly."""


def prepacked(values: torch.Tensor) -> torch.Tensor:
    """Codes `[out, in]` in oneDNN's layout, as a tensor `[in, out]`."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(values.contiguous(), [ROWS_PACKED_FOR, values.shape[1]])
    return packed


def multiplied(codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Integer sums times `scale`; exact where `input_dtype` has tried it.

    Args:
        codes: `[..., in]` uint8 or int8, contiguous; see `quantised`.
        packed: of `prepacked`.
        scale: `[out]` float32, of the weights.
        zeros: `[out]` int32, where the weights have their zero.

    Returns:
        `[..., out]` float32.
    """
    if codes.dtype == torch.uint8:
        return _product(codes, ZERO_POINT, packed, scale, zeros)
    inputs, outputs = packed.shape
    rows = codes.numel() // inputs
    more = fewest_rows(outputs) - rows
    if more <= 0:
        return _product(codes, 0, packed, scale, zeros)
    padded = torch.nn.functional.pad(codes.view(rows, inputs), (0, 0, 0, more))
    return _product(padded, 0, packed, scale, zeros)[:rows].view(*codes.shape[:-1], outputs)


def fewest_rows(outputs: int) -> int:
    """How many rows of signed inputs to multiply at least, for the sake of speed."""
    return min(FEW_RESULTS // outputs + 1, MANY_ROWS)


def _product(
    codes: torch.Tensor, zero_point: int, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, zero_point, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


REMEDY = "pack it without weights='int8'"
_ROWS, _OUTPUTS = (1, 4, 17, 40), 256
"""Rows and outputs that are tried: oneDNN takes other kernels for up to 32 rows and 256 results."""
_NEAR = 32
"""Codes this near to the largest make sums near to the largest, odd ones among them."""


def input_dtype(inputs: int, outputs: int) -> torch.dtype:
    """The dtype of a layer's input codes, uint8 or int8: one in which its products are exact here.

    Processors with neither VNNI nor AMX add pairs in 16 bits and may cut them off. Nor are signed inputs taken without
    AMX: there they are exact, but multiplied one by one.

    Args:
        inputs: of the layer.
        outputs: of the layer; some are tried.

    Raises:
        UnsupportedModelError: there is none, or no kernel.
    """
    forms = (torch.uint8, torch.int8) if torch.cpu._is_amx_tile_supported() else (torch.uint8,)
    with required("int8 kernel", REMEDY):
        exact = next((form for form in forms if _is_exact(inputs, min(outputs, _OUTPUTS), form)), None)
    if exact is None:
        raise UnsupportedModelError("PyTorch's int8 kernel is not exact on this processor", REMEDY)
    return exact


@cache
@torch.no_grad()
def _is_exact(inputs: int, outputs: int, form: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    values, x = _large_codes(outputs, inputs, generator), _large_codes(max(_ROWS), inputs, generator)
    scale, zeros = torch.rand(outputs, generator=generator), torch.zeros(outputs, dtype=torch.int)
    packed, codes = prepacked(values), in_form((x.short() + ZERO_POINT).to(torch.uint8), form)
    found = [multiplied(codes[:rows], packed, scale, zeros) for rows in _ROWS]
    sums = (x.double() @ values.double().t()).float()  # [rows, out]; float32 rounds large sums
    kept = torch.equal(packed.to_dense().t(), values)
    return kept and all(torch.equal(part, sums[: len(part)] * scale) for part in found)


def _large_codes(rows: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Signed codes `[rows, inputs]`: of four rows one is random, two are near the largest, one near the least.

    The first two rows are the largest there are, in the second one the first code excepted: of the sums of such rows
    some are odd, which float32 rounds as soon as it rounds any.
    """
    least = torch.tensor([LARGEST - _NEAR, LARGEST - _NEAR, -LARGEST, -LARGEST]).repeat(rows // 4 + 1)[:rows, None]
    most = torch.tensor([LARGEST, LARGEST, LARGEST, _NEAR - LARGEST]).repeat(rows // 4 + 1)[:rows, None]
    drawn = torch.rand(rows, inputs, generator=generator) * (most - least + 1) + least
    codes = drawn.floor_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    codes[:2] = LARGEST
    codes[1:2, :1] = LARGEST - 1
    return codes
