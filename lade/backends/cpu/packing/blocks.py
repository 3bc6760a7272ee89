"""Weights as integer codes in blocks: a scale per output and 32 inputs, or 16, and a minimum in some formats.

Int8 and int4 are made here, the others are those of GGUF files, whose numbers are kept as they are. Rows are rounded to
int8 with a scale for every 32 inputs.

Products are exact sums of the codes of a block, scaled and added up in the order of the inputs: a row does not depend
on the other rows. They run on the compiled kernels, or on torch's operators without the library, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch.nn.functional import pad

from lade.backends.cpu.packing.weight import ByValue, HugePages, PanelWeight, has_block_kernels

GROUP = 32  # inputs that share a scale, in most formats
BLOCK = 64  # inputs of a block of a panel
PANEL = 16  # outputs of a panel
_LINE = 64  # bytes of a line of a panel
LARGEST = 127  # largest code of a row; codes are symmetric, and -128 is unused
TINY = 1e-30  # least size of what is rounded, to avoid division by zero
_ZERO = {4: 8, 8: 128}  # unsigned code of zero by bits, in formats without a minimum
_TENSORS = ("values", "scale", "minimum", "factor", "shift")
_MOST_SUMS = 2**24  # of the reference at a time


@dataclass(frozen=True)
class BlockCodes:
    """A weight matrix in codes: `(values - zero) * scale`, or `values * scale + minimum`.

    The name is the format, as kernels are named: "int8", "int4", or a type of GGUF in lower case, such as "q4_k"; types
    that hold less are stored in one that holds more.
    """

    name: str
    bits: int  # of a code, 4 or 8
    values: torch.Tensor  # [out, in] uint8, the codes
    scale: torch.Tensor  # [out, groups], for 32 inputs each, or 16 in "q6_k": 16 bits, or 8-bit integers with a factor
    minimum: torch.Tensor | None = None  # like `scale`
    factor: torch.Tensor | None = None  # [out, in / 256] float16, by which `scale` is multiplied
    shift: torch.Tensor | None = None  # likewise of `minimum`

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = {name: ByValue(each) for name, each in self.tensors().items()}
        return partial(BlockCodes, self.name, self.bits), tuple(map(tensors.get, _TENSORS))

    @property
    def zero(self) -> int:
        """Code of zero."""
        return 0 if self.minimum is not None else _ZERO[self.bits]

    def rows(self, numbers: torch.Tensor) -> Self:
        """Return the codes of these outputs, in this order."""
        return replace(self, **{name: each[numbers] for name, each in self.tensors().items()})

    def tensors(self) -> dict[str, Any]:
        """Return the tensors by their names."""
        return {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}

    def in_panels(self, pages: HugePages) -> PanelWeight | None:
        """Return the weight in panels, padded with zeros, as its kernel takes it; None without the library.

        Panels are `[out / 16, in / 64, lines, 64]` int8: for each block a head of one or two lines, and lines of codes.
        They are drawn in `lade/native/cpu_blocks.h`.
        """
        if not has_block_kernels():
            return None
        outputs, inputs = self.values.shape
        blocks = -(-inputs // BLOCK)
        head = torch.cat([_head(each, inputs) for name, each in self.tensors().items() if name != "values"], -1)
        head = pad(head, (0, -head.shape[-1] % _LINE)).view(len(head), blocks, -1, _LINE)
        values = pad(self.values, (0, -inputs % BLOCK, 0, -outputs % PANEL))
        codes = _in_lines(values.view(-1, PANEL, blocks, BLOCK), self.bits)
        shape = (len(head), blocks, head.shape[2] + codes.shape[2], _LINE)
        panels = pages.take(shape[0] * shape[1] * shape[2] * _LINE).view(shape)
        panels[:, :, : head.shape[2]], panels[:, :, head.shape[2] :] = head, codes.view(torch.int8)
        return PanelWeight(panels, outputs, inputs, codes=self.name)

    def out_of_panels(self, weight: PanelWeight) -> Self:
        """Invert `in_panels`; the tensors' shapes and dtypes, not their values, are those of `self`."""
        (outputs, inputs), panels = self.values.shape, weight.panels
        lines = panels[:, :, -BLOCK * PANEL * self.bits // 8 // _LINE :].contiguous().view(torch.uint8)
        values = _out_of_lines(lines, self.bits).reshape(len(panels) * PANEL, -1)
        found: dict[str, Any] = {"values": values[:outputs, :inputs].contiguous()}
        head, first = panels.flatten(2), 0
        for name, each in self.tensors().items():
            if name == "values":
                continue
            per_block = _per_block(each, inputs)
            size = PANEL * each.element_size() * per_block
            piece = head[:, :, first : first + size].contiguous().view(each.dtype)  # [panels, blocks, n * 16]
            piece = piece.unflatten(2, (-1, PANEL)).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)  # [out, blocks * n]
            piece = piece[:outputs, :: 4 if per_block == 1 else 1][:, : each.shape[1]]
            found[name] = piece.clone(memory_format=torch.contiguous_format)
            first += size
        return replace(self, **found)

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

        Rows are `[..., in]`, floating point, the bias is `[out]`, and the result `[..., out]` in the given dtype.
        """
        rows, steps = quantised(x.reshape(-1, x.shape[-1]))
        chunk = max(16, _MOST_SUMS // max(1, rows.numel()))
        outputs = torch.arange(len(self.values), device="cpu", dtype=torch.int64).split(chunk)
        y = torch.cat([self.rows(each)._summed(rows, steps) for each in outputs], -1)
        return (y if bias is None else y.add_(bias)).to(dtype).view(*x.shape[:-1], len(self.values))

    def _summed(self, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the sums of rounded rows `[rows, groups, 32]`, `[rows, out]` float32."""
        group, inputs = self._group, rows.shape[1] * GROUP
        values = pad(self.values.float() - self.zero, (0, inputs - self.values.shape[1])).unflatten(1, (-1, group))
        x, scales, minima = rows.flatten(1).unflatten(-1, (-1, group)).float(), self.scales(), self.minima()
        total = torch.zeros(len(rows), len(values), dtype=torch.float32, device="cpu")
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
    """Round rows `[rows, in]` to int8, every 32 inputs by their own largest magnitude: each is seen by itself.

    Returns:
        Codes `[rows, ceil(in / 32), 32]` int8 from -127 to 127, padded with zeros, and scales
        `[rows, ceil(in / 32), 1]` float32.
    """
    grouped = pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP)).float()
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min_(TINY).div_(LARGEST)
    # The conversion truncates; adding one half rounds. Signed codes, by flipping the sign bit, come after: rounding to
    # them directly would break ties differently.
    codes = (grouped / scale).add_(128.5).to(torch.uint8).contiguous()
    return codes.bitwise_xor_(128).view(torch.int8), scale


def _per_block(part: torch.Tensor, inputs: int) -> int:
    """Return the numbers of an output and block: those of its groups, or one that four blocks repeat."""
    if 4 * part.shape[1] <= -(-inputs // BLOCK):
        return 1
    return 2 if part.shape[1] <= -(-inputs // GROUP) else 4


def _head(part: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the numbers of all groups, or of 256 inputs each, by panel and block: `[panels, blocks, bytes]` int8."""
    blocks, count = -(-inputs // BLOCK), _per_block(part, inputs)
    part = part.repeat_interleave(4, 1) if count == 1 else part
    filled = pad(part, (0, blocks * count - part.shape[1], 0, -len(part) % PANEL)).view(-1, PANEL, blocks, count)
    return filled.permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.int8)


def _in_lines(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes `[panels, 16, blocks, 64]` uint8 in lines, `[panels, blocks, lines, 64]`."""
    if bits == 4:
        parts = values.unflatten(3, (2, 2, 4, 4))  # half, half of that, word of four inputs, input
        values = parts[:, :, :, :, 0] | parts[:, :, :, :, 1] << 4
    words = values.reshape(*values.shape[:3], -1, 4)  # [panels, 16, blocks, words, 4]
    return words.permute(0, 2, 3, 1, 4).reshape(len(words), words.shape[2], -1, _LINE)


def _out_of_lines(lines: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert `_in_lines`."""
    words = lines.view(*lines.shape[:3], PANEL, 4).permute(0, 3, 1, 2, 4)  # [panels, 16, blocks, words, 4]
    if bits == 4:
        halves = words.unflatten(3, (2, 4))
        words = torch.stack([halves & 15, halves >> 4], 4)  # half, half of that, word, input
    return words.flatten(3)
