"""Int4 weights: codes with a scale per 32 inputs, 4.5 bits per weight, their layout in panels, and linear layers.

Q4_0 of llama.cpp has the same grid, -8 to 7, and the same bits: a scale in 16 bits per 32 weights. It takes the scale
from the largest magnitude; here the best of a few scales is taken, refitted by least squares.

Products are exact sums of 32 inputs, scaled and added up in their order: a row does not depend on the other rows. They
run on the compiled kernel, or on torch's operators without the library, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch.nn.functional import pad

from lade.backends.cpu.packing.int8 import Int8Linear
from lade.backends.cpu.packing.panel_weight import PanelWeight, has_int4_kernel
from lade.backends.cpu.packing.weight import HugePages

GROUP = 32
"""Inputs that share a scale."""
BLOCK = 64
"""Inputs of a block of a panel."""
PANEL = 16
"""Outputs of a panel."""
ZERO = 8
"""Unsigned code of zero."""
_LEVELS = (6.8, 7.4, 8.0, 8.6)  # codes, unrounded, that the largest magnitude of a group is tried at
_LINE, _CODE_LINES = 64, 8  # bytes of a line of a panel, and lines of codes in a block; a line of scales comes first
_CHUNK = 2**18  # weights that are quantised at a time, which a core's cache holds
_MOST_SUMS = 2**24  # of the reference at a time


@dataclass(frozen=True)
class Int4Codes:
    """A weight matrix in int4: `values * scale`, each scale for `GROUP` inputs.

    Attributes:
        values: `[out, in]` int8, from -8 to 7.
        scale: `[out, ceil(in / 32)]` bfloat16, value of one quantisation step; negative where the largest magnitude of
            the group belongs to a positive weight.
    """

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Quantise a weight `[out, in]`."""
        inputs = weight.shape[1]
        rows = max(1, _CHUNK // inputs)
        parts = [_quantised(part) for part in weight.split(rows)]
        values, scale = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(values[:, :inputs].contiguous(), scale)

    @classmethod
    def unpacked(cls, pairs: torch.Tensor, scale: torch.Tensor, inputs: int) -> Self:
        """Invert `pairs`, for a weight of `inputs` inputs."""
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1).to(torch.int8) - ZERO
        return cls(values[:, :inputs].contiguous(), scale)

    def pairs(self) -> torch.Tensor:
        """Return two unsigned codes per byte, the first in the low half: `[out, ceil(in / 2)]` uint8."""
        unsigned = pad(self.values, (0, self.values.shape[1] % 2)).add(ZERO).to(torch.uint8)
        return unsigned[:, ::2] | unsigned[:, 1::2] << 4

    def in_panels(self, pages: HugePages) -> PanelWeight | None:
        """Return the weight as its kernel takes it; None without the library."""
        return PanelWeight(in_int4_panels(self, pages), *self.values.shape) if has_int4_kernel() else None

    @staticmethod
    def out_of_panels(weight: PanelWeight) -> Int4Codes:
        """Invert `in_panels`."""
        return out_of_int4_panels(weight.panels, weight.outputs, weight.inputs)

    def product(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply int8 rows by the weight with torch's operators; see `Codes.product`."""
        x = _grouped(values.reshape(-1, values.shape[-1])).transpose(0, 1)  # [groups, rows, 32]
        chunk = max(PANEL, _MOST_SUMS // max(1, x.shape[0] * x.shape[1]))
        parts = [_summed(x, *each) for each in zip(self.values.split(chunk), self.scale.split(chunk), strict=True)]
        y = torch.cat(parts, -1).view(*values.shape[:-1], len(self.values)).mul_(scales)
        return (y if bias is None else y.add_(bias)).to(dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised weight, `[out, in]`."""
        inputs = self.values.shape[1]
        scale = self.scale.float().repeat_interleave(GROUP, 1)[:, :inputs]
        return (self.values * scale).to(dtype)


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
    return best.flatten(1).to(torch.int8), best_scale.flatten(1).bfloat16()


def in_int4_panels(codes: Int4Codes, pages: HugePages) -> torch.Tensor:
    """Return a weight in panels, drawn in `lade/native/cpu_int4.h`, padded with zeros.

    Args:
        codes: codes of the weight, left unchanged.
        pages: memory pool to allocate from.

    Returns:
        `[out / 16, in / 64, 9, 64]` int8: a line of scales and eight lines of codes for each block.
    """
    outputs, inputs = codes.values.shape
    more_outputs, more_inputs = -outputs % PANEL, -inputs % BLOCK
    unsigned = pad(codes.values, (0, more_inputs, 0, more_outputs)).add_(ZERO).view(torch.uint8)
    # panel, output, block, group, half of the group, word of four inputs, input
    parts = unsigned.view(-1, PANEL, (inputs + more_inputs) // BLOCK, 2, 2, 4, 4)
    halves = parts[:, :, :, :, 0] | parts[:, :, :, :, 1] << 4
    scale = pad(codes.scale, (0, -codes.scale.shape[1] % 2, 0, more_outputs)).view(-1, PANEL, parts.shape[2], 2)
    shape = (len(parts), parts.shape[2], 1 + _CODE_LINES, _LINE)
    panels = pages.take(shape[0] * shape[1] * shape[2] * _LINE).view(shape)
    panels[:, :, 0] = scale.permute(0, 2, 3, 1).contiguous().flatten(2).view(torch.int8)
    panels[:, :, 1:] = halves.permute(0, 2, 3, 4, 1, 5).reshape(shape[0], shape[1], _CODE_LINES, _LINE).view(torch.int8)
    return panels


def out_of_int4_panels(panels: torch.Tensor, outputs: int, inputs: int) -> Int4Codes:
    """Invert `in_int4_panels`."""
    count, blocks = panels.shape[:2]
    halves = panels[:, :, 1:].reshape(count, blocks, 2, 4, PANEL, 4).view(torch.uint8)
    parts = torch.stack([halves & 15, halves >> 4], 3)  # panel, block, group, half, word, output, input
    values = parts.permute(0, 5, 1, 2, 3, 4, 6).reshape(count * PANEL, blocks * BLOCK).to(torch.int8) - ZERO
    scale = panels[:, :, 0].contiguous().view(torch.bfloat16).view(count, blocks, 2, PANEL)
    scale = scale.permute(0, 3, 1, 2).reshape(count * PANEL, 2 * blocks)
    return Int4Codes(values[:outputs, :inputs].contiguous(), scale[:outputs, : -(-inputs // GROUP)].contiguous())


class Int4Linear(Int8Linear):
    """A linear layer with int4 weights, one scale per output and 32 inputs, and inputs with one scale per token."""

    WEIGHTS: ClassVar[str] = "int4"
    CODES: ClassVar[Any] = Int4Codes


def _summed(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the scaled sums of grouped rows `[groups, rows, 32]`: `[rows, out]` float32."""
    sums = x @ _grouped(values).permute(1, 2, 0)  # [groups, rows, out], exact
    total = torch.zeros(sums.shape[1:])
    for each, factor in zip(sums, scale.float().t(), strict=True):
        total += each * factor
    return total


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """Return codes `[rows, in]` as `[rows, groups, 32]` float32, padded with zeros."""
    groups = -(-values.shape[1] // GROUP)
    return pad(values, (0, groups * GROUP - values.shape[1])).view(len(values), groups, GROUP).float()
