"""Weights as integer codes in blocks: a scale per output and 32 inputs, or 16, and a minimum in some formats.

Int8 and int4 are made here, the others are those of GGUF files, whose numbers are kept as they are. Rows are rounded to
int8 with a scale for every 32 inputs.

Products are exact sums of the codes of a block, scaled and added up in the order of the inputs: a row does not depend on
the other rows. They run on the compiled kernels, or on torch's operators without the library, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn.functional import pad

from lade.backends.cpu.packing.block_panels import GROUP, in_block_panels, out_of_block_panels
from lade.backends.cpu.packing.panel_weight import PanelWeight, has_block_kernels
from lade.backends.cpu.packing.weight import HugePages

LARGEST = 127
"""Largest code of a row; codes are symmetric, and -128 is unused."""
TINY = 1e-30
"""Least size of what is rounded, to avoid division by zero."""
_ZERO = {4: 8, 8: 128}  # unsigned code of zero by bits, in formats without a minimum
_MOST_SUMS = 2**24  # of the reference at a time


@dataclass(frozen=True)
class BlockCodes:
    """A weight matrix in codes: `(values - zero) * scale`, or `values * scale + minimum`.

    Attributes:
        name: format, as kernels are named: "int8", "int4", or a type of GGUF in lower case, such as "q4_k".
        bits: bits of a code, 4 or 8.
        values: `[out, in]` uint8, the codes.
        scale: `[out, groups]`, for 32 inputs each, or 16 in "q6_k": bfloat16 or float16; 8-bit integers with a `factor`.
        minimum: like `scale`; None without.
        factor: `[out, in / 256]` float16, by which `scale` is multiplied; None without.
        shift: likewise of `minimum`.
    """

    name: str
    bits: int
    values: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def zero(self) -> int:
        """Code of zero."""
        return 0 if self.minimum is not None else _ZERO[self.bits]

    def rows(self, order: torch.Tensor) -> Self:
        """Return the codes with the outputs in another order."""
        parts = {name: each[order] for name, each in self.tensors().items()}
        return replace(self, **parts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names."""
        names = ("values", "scale", "minimum", "factor", "shift")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def in_panels(self, pages: HugePages) -> PanelWeight | None:
        """Return the weight as its kernel takes it; None without the library."""
        if not has_block_kernels():
            return None
        panels = in_block_panels(self.tensors(), self.bits, pages)
        return PanelWeight(panels, *self.values.shape, codes=self.name)

    def out_of_panels(self, weight: PanelWeight) -> Self:
        """Invert `in_panels`; the tensors' shapes and dtypes, not their values, are those of `self`."""
        return replace(self, **out_of_block_panels(weight.panels, self.tensors(), self.bits))

    def without_values(self) -> Self:
        """Return codes of the same shapes on the meta device."""
        return replace(self, **{name: each.to("meta") for name, each in self.tensors().items()})

    def scales(self) -> torch.Tensor:
        """Return the scale of each group, `[out, groups]` float32."""
        return _times(self.scale, self.factor)

    def minima(self) -> torch.Tensor | None:
        """Return the minimum of each group, `[out, groups]` float32; None without."""
        return None if self.minimum is None else _times(self.minimum, self.shift)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised weight, `[out, in]`."""
        inputs, scales, minima = self.values.shape[1], self.scales(), self.minima()
        group = self._group
        weight = (self.values.float() - self.zero) * scales.repeat_interleave(group, 1)[:, :inputs]
        return (weight if minima is None else weight + minima.repeat_interleave(group, 1)[:, :inputs]).to(dtype)

    @property
    def _group(self) -> int:
        """Inputs per scale."""
        return GROUP // 2 if self.scale.shape[1] > -(-self.values.shape[1] // GROUP) else GROUP

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Multiply rows by the weight with torch's operators: the definition, and what runs without the library.

        Args:
            x: `[..., in]`, floating point.
            bias: `[out]`; None for none.
            dtype: dtype of the result.

        Returns:
            `[..., out]`.
        """
        rows, steps = quantised(x.reshape(-1, x.shape[-1]))
        chunk = max(16, _MOST_SUMS // max(1, rows.numel()))
        outputs = torch.arange(len(self.values)).split(chunk)
        y = torch.cat([self.rows(each)._summed(rows, steps) for each in outputs], -1)
        return (y if bias is None else y.add_(bias)).to(dtype).view(*x.shape[:-1], len(self.values))

    def _summed(self, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the sums of rounded rows `[rows, groups, 32]`, `[rows, out]` float32."""
        group, inputs = self._group, rows.shape[1] * GROUP
        values = pad(self.values.float() - self.zero, (0, inputs - self.values.shape[1])).view(len(self.values), -1, group)
        x, scales, minima = rows.flatten(1).unflatten(-1, (-1, group)).float(), self.scales(), self.minima()
        total = torch.zeros(len(rows), len(values), dtype=torch.float32)
        for number in range(scales.shape[1]):
            step = steps[:, number * group // GROUP]  # [rows, 1]
            sums = x[:, number] @ values[:, number].t()  # exact
            total = _fused(sums, scales[:, number] * step, total)
            if minima is not None:
                total = _fused(minima[:, number], step * x[:, number].sum(-1, keepdim=True), total)
        return total


def _times(number: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Return integers times the factors of their 256 inputs, or 16-bit numbers, exact in float32."""
    if factor is None:
        return number.float()
    return number.float() * factor.float().repeat_interleave(number.shape[1] // factor.shape[1], 1)


def _fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return `a * b + c` in float32, rounded once.

    The sum is taken in float64 and rounded to odd, so that rounding it again to float32 gives the nearest number.
    """
    product, c = a.double() * b.double(), c.double()  # exact
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # exact, of "two-sum"
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)  # to the next number of larger or of smaller magnitude
    odd = torch.where((error != 0) & (bits % 2 == 0) & total.isfinite(), bits + away, bits)
    return odd.view(torch.float64).float()


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to int8, every 32 inputs by their own largest magnitude: each is seen by itself.

    Args:
        x: `[rows, in]`, floating point.

    Returns:
        Codes `[rows, ceil(in / 32), 32]` int8 from -127 to 127, padded with zeros, and scales `[rows, ceil(in / 32), 1]`
        float32.
    """
    grouped = pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP)).float()
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min_(TINY).div_(LARGEST)
    # The conversion truncates; adding one half rounds. Signed codes, by flipping the sign bit, come after: rounding to
    # them directly would break ties differently.
    codes = (grouped / scale).add_(128.5).to(torch.uint8).contiguous()
    return codes.bitwise_xor_(128).view(torch.int8), scale
