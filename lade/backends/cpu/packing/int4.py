"""Int4 weights: codes with a bfloat16 scale per 32 inputs, 4.5 bits per weight, and linear layers of these.

Q4_0 of llama.cpp has the same grid, -8 to 7, and the same bits: a scale in 16 bits per 32 weights. It takes the scale
from the largest magnitude; here the best of a few scales is taken, refitted by least squares.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import pad

from lade.backends.cpu.packing.block_panels import GROUP
from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.int8 import Int8Linear, in_chunks

ZERO = 8
"""Unsigned code of zero."""
_LEVELS = (6.8, 7.4, 8.0, 8.6)  # codes, unrounded, that the largest magnitude of a group is tried at


def int4_codes(weight: torch.Tensor) -> BlockCodes:
    """Round a weight `[out, in]` to int4."""
    return BlockCodes("int4", 4, *in_chunks(_quantised, weight))


def pairs_of(codes: BlockCodes) -> torch.Tensor:
    """Return two 4-bit codes per byte, the first in the low half: `[out, ceil(in / 2)]` uint8."""
    values = pad(codes.values, (0, codes.values.shape[1] % 2))
    return values[:, ::2] | values[:, 1::2] << 4


def out_of_pairs(pairs: torch.Tensor, scale: torch.Tensor, inputs: int) -> BlockCodes:
    """Invert `pairs_of`, for a weight of `inputs` inputs."""
    values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
    return BlockCodes("int4", 4, values[:, :inputs].contiguous(), scale)


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes `[out, in padded]` and scales `[out, groups]` of a weight `[out, in]`."""
    grouped = pad(weight.float(), (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)  # [out, groups, 32]
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))  # signed
    best_error = torch.full_like(largest, torch.inf)
    best = torch.zeros_like(grouped)
    best_scale = torch.zeros_like(largest)
    for level in _LEVELS:
        inverse = torch.where(largest == 0, 0, -level / largest)
        codes = (grouped * inverse).round_().clamp_(-ZERO, ZERO - 1)
        squares = codes.square().sum(-1, keepdim=True).clamp_min_(1)
        scale = (grouped * codes).sum(-1, keepdim=True).div_(squares).bfloat16().float()
        error = (codes * scale).sub_(grouped).square_().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best, best_scale = torch.where(better, codes, best), torch.where(better, scale, best_scale)
    return best.flatten(1).add_(ZERO).to(torch.uint8), best_scale.flatten(1).bfloat16()


class Int4Linear(Int8Linear):
    """A linear layer with int4 weights, one scale per output and 32 inputs, and inputs with one scale per 32."""

    WEIGHTS: ClassVar[str] = "int4"

    @staticmethod
    def codes_of(weight: torch.Tensor) -> BlockCodes:
        """Round a weight `[out, in]`."""
        return int4_codes(weight)
