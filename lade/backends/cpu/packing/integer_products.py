"""Symmetric int8 codes of weights and inputs, and their exact products by oneDNN.

VNNI multiplies unsigned inputs, with zero point 128, by signed weights. With AMX, oneDNN subtracts the zero point's
share from the sums in float32, which is inexact beyond 2^24, but multiplies signed inputs just as fast. Both forms
stand for the same integers, so results have the same bits. Which of them is exact on this processor is found by a
trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch

from lade.errors import UnsupportedModelError

LARGEST = 127
"""Largest code; codes are symmetric, and -128 is unused."""
ZERO_POINT = 128
"""Unsigned code of zero."""
ROWS_PACKED_FOR = 4
"""Number of rows that oneDNN is told when it chooses a layout; some shapes have no layout without it."""
FEW_RESULTS, MANY_ROWS = 256, 33
"""Sizes below which oneDNN uses no AMX tiles: up to 256 results, of fewer than 33 rows.

Its fallback for signed inputs is a hundred times slower, so rows are padded.
"""
REMEDY = "pack it without weights='int8'"
_TINY = 1e-30
"""Least scale of an input, to avoid division by zero in rows of zeros."""
_ROWS, _OUTPUTS = (1, 4, 17, 40), 256
"""Rows and outputs of the trial: oneDNN changes kernels at 32 rows and at 256 results."""
_NEAR = 32
"""Width of the range of large codes: codes in it give sums near the largest possible, odd ones among them."""


@dataclass(frozen=True)
class Codes:
    """A weight matrix in int8: `values * scale[:, None]`.

    Attributes:
        values: `[out, in]` int8, from -127 to 127.
        scale: `[out]` float32, value of one quantisation step per output.
    """

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Quantise a weight `[out, in]`; the largest magnitude of each output becomes 127."""
        scale = scale_of(weight)
        values = (weight.float() / scale.clamp_min(_TINY)[:, None]).round_().to(torch.int8)
        return cls(values, scale)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised weight, `[out, in]`."""
        return (self.values * self.scale[:, None]).to(dtype)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row, `[out]` float32; not finite where the row is not."""
    return weight.abs().amax(-1).float() / LARGEST


def quantised(x: torch.Tensor, form: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise inputs, each row by its own largest magnitude, so that a row does not depend on the other rows.

    Every operation is exact, or rounds each element by itself.

    Args:
        x: `[..., in]`, floating point.
        form: dtype of the codes, uint8 or int8; both stand for the same integers.

    Returns:
        Codes `[..., in]`, contiguous: uint8 from 1 to 255 with zero point 128, or int8 from -127 to 127; and scales,
            `[..., 1]` float32.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min_(_TINY).div_(LARGEST)
    # The conversion truncates; adding one half rounds.
    codes = (x / scale).add_(ZERO_POINT + 0.5).to(torch.uint8)
    return in_form(codes.contiguous(), form), scale


def in_form(codes: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    """Convert unsigned codes to the dtype `form`, in place."""
    # Subtracting the zero point flips the sign bit; rounding to signed codes directly would break ties differently.
    return codes if form == torch.uint8 else codes.bitwise_xor_(ZERO_POINT).view(torch.int8)


def prepacked(values: torch.Tensor) -> torch.Tensor:
    """Return codes `[out, in]` in oneDNN's layout, as a tensor `[in, out]`."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(values.contiguous(), [ROWS_PACKED_FOR, values.shape[1]])
    return packed


def multiplied(codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return integer sums times `scale`; exact if `input_dtype` chose the dtype of the codes.

    Args:
        codes: `[..., in]` uint8 or int8, contiguous; see `quantised`.
        packed: weights from `prepacked`.
        scale: `[out]` float32, scales of the weights.
        zeros: `[out]` int32, zero points of the weights.

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
    """Return the least number of rows of signed inputs for which oneDNN is fast."""
    return min(FEW_RESULTS // outputs + 1, MANY_ROWS)


def _product(
    codes: torch.Tensor, zero_point: int, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, zero_point, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def input_dtype(inputs: int, outputs: int) -> torch.dtype:
    """Return the dtype of input codes, uint8 or int8, whose products are exact on this processor.

    Processors with neither VNNI nor AMX add pairs in 16 bits and may saturate. Signed inputs without AMX are exact but
    too slow, so they are not considered.

    Args:
        inputs: number of inputs of the layer.
        outputs: number of outputs of the layer; up to 256 of them are tried.

    Raises:
        UnsupportedModelError: no dtype is exact, or there is no int8 kernel.
    """
    forms = (torch.uint8, torch.int8) if torch.cpu._is_amx_tile_supported() else (torch.uint8,)
    with required("int8 kernel", REMEDY):
        exact = next((form for form in forms if _is_exact(inputs, min(outputs, _OUTPUTS), form)), None)
    if exact is None:
        raise UnsupportedModelError("PyTorch's int8 kernel is not exact on this processor", REMEDY)
    return exact


@contextmanager
def required(kernel: str, remedy: str) -> Iterator[None]:
    """Run a trial of a kernel in this block.

    Args:
        kernel: description of the kernel for the error, such as "int8 kernel".
        remedy: advice for users if the kernel is missing.

    Raises:
        UnsupportedModelError: this build of PyTorch, or this processor, lacks the kernel.
    """
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            raise RuntimeError("torch.backends.mkldnn is not available or not enabled")
        yield
    except (RuntimeError, AttributeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise UnsupportedModelError(f"PyTorch has no {kernel} here ({reason})", remedy) from problem


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
    """Return signed codes `[rows, inputs]` for the trial: per four rows one random, two near +127, one near -127.

    The first two rows are at the maximum, but for the first code of the second row: some of the sums are then odd,
    which float32 rounds as soon as it rounds any.
    """
    least = torch.tensor([LARGEST - _NEAR, LARGEST - _NEAR, -LARGEST, -LARGEST]).repeat(rows // 4 + 1)[:rows, None]
    most = torch.tensor([LARGEST, LARGEST, LARGEST, _NEAR - LARGEST]).repeat(rows // 4 + 1)[:rows, None]
    drawn = torch.rand(rows, inputs, generator=generator) * (most - least + 1) + least
    codes = drawn.floor_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    codes[:2] = LARGEST
    codes[1:2, :1] = LARGEST - 1
    return codes
