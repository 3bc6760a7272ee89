"""Int4 linear layers: weights in 4.5 bits, inputs quantised to int8 as for int8 layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from lade.backends.cpu.packing.int4_codes import GROUP, PANEL, Int4Codes, in_int4_panels, out_of_int4_panels
from lade.backends.cpu.packing.int8 import Int8Linear, quantised
from lade.backends.cpu.packing.panel_weight import PanelWeight, has_int4_kernel
from lade.backends.cpu.packing.weight import ByValue

_MOST_SUMS = 2**24  # of the reference at a time


class Int4Linear(Int8Linear):
    """A linear layer with int4 weights, one scale per output and 32 inputs, and inputs with one scale per token.

    Products are exact sums of 32 inputs, scaled and added up in their order: a row does not depend on the other rows.
    They run on the compiled kernel, or on torch's operators without the library, with the same bits.

    Attributes:
        weight: the layer's own parameter if it is kept; otherwise an int8 parameter, the panels of `in_int4_panels` or,
            without the library, the codes.
    """

    WEIGHTS: ClassVar[str] = "int4"

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Create the packed tensor, and free the dense `weight` unless it is kept."""
        weight: Any = self._parameters["weight"]
        codes = self.__dict__.pop("_given", None) or Int4Codes.of(self._turned(weight.detach()))
        panel_weight = None
        if has_int4_kernel():
            packed, scale = in_int4_panels(codes, self._memory), torch.empty(0)  # panels hold their scales
            panel_weight = PanelWeight(packed, self.out_features, self.in_features)
        else:
            packed, scale = codes.values, codes.scale
        self.__dict__.update(_packed=packed, _panel_weight=panel_weight, _scale=scale)
        self._hold_integers(weight, packed)

    def codes(self) -> Int4Codes:
        """Return a copy of the weight's codes."""
        if self._panel_weight is not None:
            return out_of_int4_panels(self._packed, self.out_features, self.in_features)
        return Int4Codes(self._packed, self._scale)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed codes and their scales."""
        return self._packed.nbytes + self._scale.nbytes

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return reference_int4_product(*quantised(x), self.codes(), bias, x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Store the codes: another process may have no library."""
        codes, state = self.codes(), super().__getstate__()
        state["_sent"] = ByValue(codes.values)
        return {**state, "_scale": codes.scale}

    @staticmethod
    def _received(values: torch.Tensor, scale: torch.Tensor) -> Int4Codes:
        return Int4Codes(values, scale)


def reference_int4_product(
    values: torch.Tensor, scales: torch.Tensor, codes: Int4Codes, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply int8 rows by int4 weights with torch's operators: the definition, and what runs without the library.

    Args:
        values: `[..., in]` int8, codes of the rows.
        scales: `[..., 1]` float32, scales of the rows.
        codes: the weight.
        bias: `[out]`; None for none.
        dtype: dtype of the result.

    Returns:
        `[..., out]`.
    """
    x = _grouped(values.reshape(-1, values.shape[-1])).transpose(0, 1)  # [groups, rows, 32]
    chunk = max(PANEL, _MOST_SUMS // max(1, x.shape[0] * x.shape[1]))
    parts = [_summed(x, *each) for each in zip(codes.values.split(chunk), codes.scale.split(chunk), strict=True)]
    y = torch.cat(parts, -1).view(*values.shape[:-1], len(codes.values)).mul_(scales)
    return (y if bias is None else y.add_(bias)).to(dtype)


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
