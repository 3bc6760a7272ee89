"""Int8 linear layers: dynamically quantised inputs, and exact integer products.

Weights have one scale per output, inputs one scale per token. Products run on the compiled kernels, or on torch's
operators without the library. Integer sums are exact and scaling rounds in the same steps everywhere, so the bits are
the same, and a row does not depend on the other rows.

The scheme is that of Dettmers et al., "LLM.int8()" (2022), without outliers, and of Xiao et al., "SmoothQuant" (2022),
with dynamic per-token scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lade.backends.cpu.kernels import is_plain
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for
from lade.backends.cpu.packing.panel_weight import PanelWeight, initial_sums
from lade.backends.cpu.packing.panels import ZERO_POINT, in_panels, out_of_panels
from lade.backends.cpu.packing.weight import ByValue, HugePages, PackedWeight, like
from lade.errors import UnsupportedModelError

LARGEST = 127
"""Largest code; codes are symmetric, and -128 is unused."""
_TINY = 1e-30
"""Least scale of an input, to avoid division by zero in rows of zeros."""
_EXACT = 2**24 // LARGEST**2
"""Inputs whose products have an exact sum in float32."""
MOST_INPUTS = 2**31 // (255 * 127)
"""Most inputs of a layer whose integer sums always fit into 32 bits."""
MOVE_REMEDY = "give it an ordinary tensor on the CPU"
RELOAD_REMEDY = "load the model again, or pack it with keep_original=True to begin with"


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

    def in_panels(self, pages: HugePages) -> PanelWeight | None:
        """Return the weight as kernels take it; None without the library."""
        panel = panel_for(torch.int8)
        if not panel:
            return None
        start = initial_sums(self.values)
        return PanelWeight(in_panels(self.values, pages, panel), *self.values.shape, steps=self.scale, start=start)

    @staticmethod
    def out_of_panels(weight: PanelWeight) -> Codes:
        """Invert `in_panels`."""
        assert weight.steps is not None
        return Codes(out_of_panels(weight.panels, weight.outputs, weight.inputs), weight.steps)

    def product(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply int8 rows by the weight with torch's operators: the definition, and what runs without the library.

        Args:
            values: `[..., in]` int8, codes of the rows.
            scales: `[..., 1]` float32, scales of the rows.
            bias: `[out]`; None for none.
            dtype: dtype of the result.

        Returns:
            `[..., out]`.
        """
        pieces = zip(values.split(_EXACT, -1), self.values.split(_EXACT, -1), strict=True)
        sums = sum((x.float() @ weight.float().t()).to(torch.int32) for x, weight in pieces)
        assert isinstance(sums, torch.Tensor)
        y = sums.float().mul_(self.scale).mul_(scales)
        return (y if bias is None else y.add_(bias)).to(dtype)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised weight, `[out, in]`."""
        return (self.values * self.scale[:, None]).to(dtype)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each row, `[out]` float32; not finite where the row is not."""
    return weight.abs().amax(-1).float() / LARGEST


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise inputs, each row by its own largest magnitude, so that a row does not depend on the other rows.

    Every operation is exact, or rounds each element by itself.

    Args:
        x: `[..., in]`, floating point.

    Returns:
        Codes `[..., in]` int8 from -127 to 127, contiguous, and scales `[..., 1]` float32.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min_(_TINY).div_(LARGEST)
    # The conversion truncates; adding one half rounds. Signed codes, by flipping the sign bit, come after: rounding to
    # them directly would break ties differently.
    codes = (x / scale).add_(ZERO_POINT + 0.5).to(torch.uint8).contiguous()
    return codes.bitwise_xor_(ZERO_POINT).view(torch.int8), scale


class Int8Linear(PackedLinear):
    """A linear layer with int8 weights, one scale per output, and dynamically quantised inputs, one scale per token.

    Args:
        layer: an `nn.Linear`, or a `Conv1D`, whose weight is transposed.
        keep: true to keep the layer's own weight along with the packed one.
        codes: codes of its weight, if known; computed from the weight otherwise.
        pages: memory pool shared by all layers of a model.

    Attributes:
        weight: the layer's own parameter if it is kept; otherwise an int8 parameter, in panels or, without the library,
            the codes.
        WEIGHTS: name of the weights' format, as `lade.pack` takes it.
        CODES: class of the codes.
    """

    WEIGHTS: ClassVar[str] = "int8"
    CODES: ClassVar[Any] = Codes
    _codes: Any  # None for a weight in panels
    _memory: HugePages

    def __init__(
        self,
        layer: nn.Module,
        *,
        keep: bool,
        codes: Any = None,
        pages: HugePages | None = None,
    ) -> None:
        self.__dict__.update(_given=codes, _memory=pages or HugePages())
        super().__init__(layer, keep=keep)

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Create the packed tensor, and free the dense `weight` unless it is kept."""
        weight: Any = self._parameters["weight"]
        codes = self.__dict__.pop("_given", None) or self.CODES.of(self._turned(weight.detach()))
        panel_weight = codes.in_panels(self._memory)
        packed = codes.values if panel_weight is None else panel_weight.panels
        self.__dict__.update(_packed=packed, _panel_weight=panel_weight, _codes=codes if panel_weight is None else None)
        if not self.keeps_original:
            integers = PackedWeight(packed, requires_grad=False)  # integers have no gradients
            integers.__dict__.update(weight.__dict__)
            self._parameters["weight"] = integers
        self._note_packed(weight)

    def codes(self) -> Any:
        """Return a copy of the weight's codes."""
        return self._codes or self.CODES.out_of_panels(self._panel_weight)

    def kept_weight(self) -> torch.Tensor:
        """Return the original weight, `[out, in]`; requires `restorable`."""
        return self._turned(self._dense_parameter())

    def dense_weight(self) -> torch.Tensor:
        """Return the dequantised weight in the layer's dtype, which differs from the original weight."""
        return self._turned(self.codes().dense(self.dtype))

    @property
    def restorable(self) -> bool:
        """True if the original weight was kept."""
        return self.keeps_original

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and their scales."""
        scale = self._codes.scale if self._panel_weight is None else self._panel_weight.steps
        return self._packed.nbytes + (0 if scale is None else scale.nbytes)  # int4 panels hold their scales

    def _dense_parameter(self) -> nn.Parameter:
        if not self.keeps_original:
            raise UnsupportedModelError(
                f"the original weight of a layer packed in {self.WEIGHTS} was not kept", RELOAD_REMEDY
            )
        return super()._dense_parameter()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            what = f"a {type(x).__name__} on {x.device}"
            raise UnsupportedModelError(f"a layer packed in {self.WEIGHTS} for the CPU was given {what}", MOVE_REMEDY)
        bias = self._parameters["bias"]
        if self._panel_weight is not None:
            return self._panel_weight.product(x, bias)
        product: torch.Tensor = self._codes.product(*quantised(x), bias, x.dtype)
        return product

    def __getstate__(self) -> dict[str, Any]:
        """Store the codes: the packed layout cannot be copied, and another process may have no library."""
        state, codes = self.__dict__.copy(), self.codes()
        del state["_packed"], state["_panel_weight"], state["_codes"]
        state["_sent"] = ByValue(codes.values), codes.scale
        if not self.keeps_original:
            weight: Any = self._parameters["weight"]
            state["_parameters"] = {**self._parameters, "weight": like(weight, torch.empty(0))}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = self.CODES(*state["_sent"])
        super().__setstate__({**{name: each for name, each in state.items() if name != "_sent"}, "_given": codes})
