"""Int8 codes of weights, one scale for each output, and of inputs, one scale for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

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
