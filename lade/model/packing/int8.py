"""A linear layer whose weight lies in int8: half the bytes of 16 bits to read, and sums that have no order.

Inputs are rounded to int8 too, token by token, and integers are multiplied: by what is compiled here on processors with
tiles (AMX) or dot products (AVX-512 with VNNI), elsewhere by oneDNN. An integer sum is exact, whatever the kernel and
however many rows there are, so a row's result does not depend on the rows beside it, bit for bit.

The scheme, a scale for each output of the weights and one for each token of the inputs, is that of Dettmers et al.,
"LLM.int8()" (2022), without its outliers, and of Xiao et al., "SmoothQuant" (2022), per-token dynamic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lade.errors import UnsupportedModelError
from lade.model.kernels.kinds import is_plain
from lade.model.packing.codes import Codes
from lade.model.packing.huge_pages import HugePages
from lade.model.packing.input_forms import PANELS, Form, input_form
from lade.model.packing.integer_product import multiplied, prepacked
from lade.model.packing.linear import PackedLinear
from lade.model.packing.panel_codes import first_sums, multiplied_in_panels
from lade.model.packing.panels import in_panels, out_of_panels
from lade.model.packing.shared_inputs import SharedInputs
from lade.model.packing.weight import ByValue, PackedWeight, like

MOST_INPUTS = 2**31 // (255 * 127)
"""Inputs of a layer whose sum of products fits into 32 bits whatever they are."""
MOVE_REMEDY = "give it an ordinary tensor on the CPU"
RELOAD_REMEDY = "load the model again, or pack it with keep_original=True to begin with"


class Int8Linear(PackedLinear):
    """A linear layer with weights in int8, by output, and inputs that are rounded to int8, by token.

    Args:
        layer: an `nn.Linear`, or a `Conv1D`, whose weight is transposed.
        keep: whether the layer's own weight stays beside the packed one.
        codes: of its weight, where they are known; else they are made of it.
        inputs: one for all layers of a model.
        pages: likewise.

    Raises:
        UnsupportedModelError: no form of its inputs is multiplied exactly here.

    Attributes:
        weight: the layer's own parameter where it is kept; else one in the packed layout, int8: `[in, out]` in
            oneDNN's, or panels.
    """

    _scale: torch.Tensor
    _zeros: torch.Tensor
    _form: Form
    _inputs: SharedInputs
    _memory: HugePages

    def __init__(
        self,
        layer: nn.Module,
        *,
        keep: bool,
        codes: Codes | None = None,
        inputs: SharedInputs | None = None,
        pages: HugePages | None = None,
    ) -> None:
        self.__dict__.update(_given=codes, _inputs=inputs or SharedInputs(), _memory=pages or HugePages())
        super().__init__(layer, keep=keep)

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Make the packed tensor, and give the dense `weight` up unless it is kept."""
        weight: Any = self._parameters["weight"]
        codes = self.__dict__.pop("_given", None) or Codes.of(self._turned(weight.detach()))
        form = input_form(self.in_features, self.out_features)
        panel = PANELS.get(form)
        packed = in_panels(codes.values, self._memory, panel) if panel else prepacked(codes.values)
        zeros = first_sums(codes.values) if panel else torch.zeros(self.out_features, dtype=torch.int)
        self.__dict__.update(_packed=packed, _scale=codes.scale, _zeros=zeros, _form=form)
        if not self.keeps_original:
            integers = PackedWeight(packed, requires_grad=False)  # gradients of integers there are none
            integers.__dict__.update(weight.__dict__)
            self._parameters["weight"] = integers
        self._note_packed(weight)

    def codes(self) -> Codes:
        """A copy of the weight's codes."""
        if self._form in PANELS:
            return Codes(out_of_panels(self._packed, self.out_features, self.in_features), self._scale)
        return Codes(self._packed.to_dense().t().contiguous(), self._scale)

    def kept_weight(self) -> torch.Tensor:
        """The weight that it was packed from, `[out, in]`, if `restorable`."""
        return self._turned(self._dense_parameter())

    def dense_weight(self) -> torch.Tensor:
        """What the codes stand for, in the layer's dtype: not what the weight was before."""
        return self._turned(self.codes().dense(self.dtype))

    @property
    def restorable(self) -> bool:
        """Whether the weight that it was packed from is still there."""
        return self.keeps_original

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and their scales."""
        return self._packed.numel() + self._scale.nbytes

    def _dense_parameter(self) -> nn.Parameter:
        if not self.keeps_original:
            raise UnsupportedModelError("a layer packed in int8 cannot become what it was", RELOAD_REMEDY)
        return super()._dense_parameter()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            what = f"a {type(x).__name__} on {x.device}"
            raise UnsupportedModelError(f"a layer packed in int8 for the CPU is fed {what}", MOVE_REMEDY)
        codes, scale = self._inputs.rounded(x, self._form, id(self))
        bias = self._parameters["bias"]
        if self._form in PANELS:
            out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
            return multiplied_in_panels(codes, scale, self._packed, self._zeros, self._scale, bias, out)
        y = multiplied(codes, self._packed, self._scale, self._zeros).mul_(scale)  # [..., out] float32
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """With the codes, as the packed layout cannot be copied."""
        state = self.__dict__.copy()
        del state["_packed"]
        state["_sent"] = ByValue(self.codes().values)
        if not self.keeps_original:
            weight: Any = self._parameters["weight"]
            state["_parameters"] = {**self._parameters, "weight": like(weight, torch.empty(0))}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        codes = Codes(state["_sent"], state["_scale"])
        super().__setstate__({**{name: each for name, each in state.items() if name != "_sent"}, "_given": codes})
