"""Int8 linear layers: dynamically quantised inputs, and exact integer products.

Weights have one scale per output, inputs one scale per token. The integer products run on the kernels compiled here on
processors with AMX tiles, AVX-512 or AVX2 dot products, and on oneDNN elsewhere. Integer sums are exact and scaling
rounds in the same steps everywhere, so all kernels give the same bits, and a row does not depend on the other rows.

The scheme is that of Dettmers et al., "LLM.int8()" (2022), without outliers, and of Xiao et al., "SmoothQuant" (2022),
with dynamic per-token scales.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lade.backends.cpu.kernels import is_plain
from lade.backends.cpu.packing.int4_codes import Int4Codes
from lade.backends.cpu.packing.integer_products import Codes, input_dtype, multiplied, prepacked, quantised
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for
from lade.backends.cpu.packing.panel_weight import PanelWeight, initial_sums
from lade.backends.cpu.packing.panels import DOT_PANEL, TILE_PANEL, in_panels, out_of_panels
from lade.backends.cpu.packing.weight import ByValue, HugePages, PackedWeight, like
from lade.errors import UnsupportedModelError

TILES: Literal["tiles"] = "tiles"
DOTS: Literal["dots"] = "dots"
"""Forms of codes for the kernels compiled here; the other forms are input dtypes that oneDNN multiplies."""
Form = torch.dtype | Literal["tiles", "dots"]
PANELS: dict[Form, int] = {TILES: TILE_PANEL, DOTS: DOT_PANEL}
"""Outputs per panel of the weights, by form."""
MOST_INPUTS = 2**31 // (255 * 127)
"""Most inputs of a layer whose integer sums always fit into 32 bits."""
MOVE_REMEDY = "give it an ordinary tensor on the CPU"
RELOAD_REMEDY = "load the model again, or pack it with keep_original=True to begin with"


class Int8Linear(PackedLinear):
    """A linear layer with int8 weights, one scale per output, and dynamically quantised inputs, one scale per token.

    Args:
        layer: an `nn.Linear`, or a `Conv1D`, whose weight is transposed.
        keep: true to keep the layer's own weight along with the packed one.
        codes: codes of its weight, if known; computed from the weight otherwise.
        pages: memory pool shared by all layers of a model.

    Raises:
        UnsupportedModelError: no exact int8 kernel is available here.

    Attributes:
        weight: the layer's own parameter if it is kept; otherwise an int8 parameter in the packed layout: oneDNN's
            `[in, out]`, or panels.
        WEIGHTS: name of the weights' format, as `lade.pack` takes it.
    """

    WEIGHTS: ClassVar[str] = "int8"
    _scale: torch.Tensor
    _zeros: torch.Tensor
    _form: Form
    _memory: HugePages

    def __init__(
        self,
        layer: nn.Module,
        *,
        keep: bool,
        codes: Codes | Int4Codes | None = None,
        pages: HugePages | None = None,
    ) -> None:
        self.__dict__.update(_given=codes, _memory=pages or HugePages())
        super().__init__(layer, keep=keep)

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Create the packed tensor, and free the dense `weight` unless it is kept."""
        weight: Any = self._parameters["weight"]
        codes = self.__dict__.pop("_given", None) or Codes.of(self._turned(weight.detach()))
        form, panel_weight = input_form(self.in_features, self.out_features), None
        if form in PANELS:
            packed, zeros = in_panels(codes.values, self._memory, PANELS[form]), initial_sums(codes.values)
            sizes = self.out_features, self.in_features
            panel_weight = PanelWeight(packed, *sizes, steps=codes.scale, start=zeros)
        else:
            packed, zeros = prepacked(codes.values), torch.zeros(self.out_features, dtype=torch.int)
        self.__dict__.update(_packed=packed, _panel_weight=panel_weight, _scale=codes.scale, _zeros=zeros, _form=form)
        self._hold_integers(weight, packed)

    def _hold_integers(self, weight: Any, packed: torch.Tensor) -> None:
        """Replace the dense weight by the packed one unless it is kept."""
        if not self.keeps_original:
            integers = PackedWeight(packed, requires_grad=False)  # integers have no gradients
            integers.__dict__.update(weight.__dict__)
            self._parameters["weight"] = integers
        self._note_packed(weight)

    def codes(self) -> Codes | Int4Codes:
        """Return a copy of the weight's codes."""
        if self._panel_weight is not None:
            return Codes(out_of_panels(self._packed, self.out_features, self.in_features), self._scale)
        return Codes(self._packed.to_dense().t().contiguous(), self._scale)

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
        return self._packed.numel() + self._scale.nbytes

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
        return self._multiply(x, bias) if self._panel_weight is None else self._panel_weight.product(x, bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the product without panels."""
        assert isinstance(self._form, torch.dtype)
        codes, scale = quantised(x, self._form)
        y = multiplied(codes, self._packed, self._scale, self._zeros).mul_(scale)  # [..., out] float32
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Store the codes, since the packed layout cannot be copied."""
        state = self.__dict__.copy()
        del state["_packed"], state["_panel_weight"]
        state["_sent"] = ByValue(self.codes().values)
        if not self.keeps_original:
            weight: Any = self._parameters["weight"]
            state["_parameters"] = {**self._parameters, "weight": like(weight, torch.empty(0))}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = self._received(state["_sent"], state["_scale"])
        super().__setstate__({**{name: each for name, each in state.items() if name != "_sent"}, "_given": codes})

    @staticmethod
    def _received(values: torch.Tensor, scale: torch.Tensor) -> Codes | Int4Codes:
        """Return the codes of a pickled layer."""
        return Codes(values, scale)


def input_form(inputs: int, outputs: int) -> Form:
    """Return the form of input codes for a layer of this size; every form gives the same bits.

    Args:
        inputs: number of inputs of the layer.
        outputs: number of outputs of the layer.

    Raises:
        UnsupportedModelError: only oneDNN is available, and it is not exact; see `input_dtype`.
    """
    panel = panel_for(torch.int8)
    own = next((form for form, outputs_each in PANELS.items() if outputs_each == panel), None)
    return own or input_dtype(inputs, outputs)
