"""A packed linear layer, and the guard against moving, casting or resizing packed models."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lade.backends.cpu.kernels import is_plain
from lade.backends.cpu.packing.panel_products import panel_for, panel_product
from lade.backends.cpu.packing.weight import (
    UNPACK_REMEDY,
    ByValue,
    HugePages,
    PackedWeight,
    PanelWeight,
    check_move,
    in_panels,
    like,
    out_of_panels,
    packed_weight,
    same_bits,
    state_of,
)
from lade.errors import UnsupportedModelError
from lade.model.config import dtype_name

GUARD = "packing_guard"
LONE_ROWS, LONE_FROM = 4, 2**19
"""Rows to which a lone float32 row is repeated, and the least number of weights for which that pays.

OneDNN reads a large float32 weight faster for four rows than for one.
"""


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in oneDNN's blocked layout, or in panels.

    Args:
        layer: an `nn.Linear`, or a `Conv1D`, whose weight is transposed.
        keep: true to keep the layer's own weight along with the packed one.
        panel: outputs per panel of a bfloat16 weight, see `in_panels`; 0 for oneDNN's layout.
        pages: memory pool for panels, shared by all layers of a model.

    Attributes:
        layer: the original layer, without its weight.
        panel: that of the weight now, which `lay_out` changes.
        weight: the layer's own parameter if it is kept, in which case changes to it are packed again; otherwise a
            parameter in the packed layout, `[out, in]` in oneDNN's.
    """

    bias: nn.Parameter | None
    layer: nn.Module
    _packed: torch.Tensor
    _panel_weight: PanelWeight | None

    def __init__(self, layer: nn.Module, *, keep: bool, panel: int = 0, pages: HugePages | None = None) -> None:
        super().__init__()
        self.transposed = type(layer) is Conv1D
        self.keeps_original, self.training = keep, layer.training
        self._parameters["weight"] = weight = layer._parameters["weight"]
        self._parameters["bias"] = layer._parameters["bias"]
        assert weight is not None
        self.out_features, self.in_features = shape_of(layer)
        self.dtype, self.panel, self._own_panel, self._count = weight.dtype, panel, panel, weight.numel()
        self._pages = pages
        self._pack_weight()
        self.__dict__["layer"] = layer  # outside `_modules`: not part of the module tree or of its state

    def _pack_weight(self) -> None:
        """Pack the dense `weight`, and free it unless it is kept."""
        weight = self._parameters["weight"]
        self._take(weight, self.panel)
        self._packed_state = state_of(weight)

    @torch.no_grad()
    def _take(self, weight: Any, panel: int) -> None:
        """Pack a dense weight and hold it; if interrupted, the previous weight stays in place."""
        dense = weight.detach()
        turned = self._turned(dense)
        packed = in_panels(turned, self._pages, panel) if panel else packed_weight(turned)
        if not self.keeps_original and not same_bits(self._dense(packed, panel), dense):
            raise UnsupportedModelError("a packed weight does not unpack to the original", "keep this model unpacked")
        panel_weight = PanelWeight(packed, self.out_features, self.in_features) if panel else None
        self.__dict__.update(_packed=packed, panel=panel, _panel_weight=panel_weight)
        if not self.keeps_original:
            self._parameters["weight"] = like(weight, packed, PackedWeight)

    def _follow_weight(self) -> None:
        """Pack a kept weight again, such as a tied embedding, after it was assigned or written to."""
        weight: Any = self._parameters["weight"]
        inputs, outputs = self.in_features, self.out_features
        shape = (inputs, outputs) if self.transposed else (outputs, inputs)
        if weight.shape != shape or weight.dtype != self.dtype or not is_plain(weight) or hasattr(self, "_hf_hook"):
            what = f"{list(weight.shape)} in {dtype_name(weight.dtype)}, as offloading or resizing does"
            raise UnsupportedModelError(f"the weight of a packed layer was replaced by {what}", UNPACK_REMEDY)
        self._pack_weight()

    def lay_out(self, pages: HugePages | None) -> None:
        """Convert the weight to panels in `pages` if this processor has kernels for its dtype; with None, back."""
        panel = self._own_panel if pages is None else panel_for(self.dtype)
        if panel != self.panel:
            self._pages = pages
            self._take(self._dense_parameter(), panel)

    def dense_weight(self) -> torch.Tensor:
        """Return a copy of the weight in the layer's own layout: `[out, in]`, or `[in, out]` of a `Conv1D`."""
        return self._dense(self._packed, self.panel)

    def _dense(self, packed: torch.Tensor, panel: int) -> torch.Tensor:
        outputs, inputs = self.out_features, self.in_features
        return self._turned(out_of_panels(packed, outputs, inputs) if panel else packed.to_dense())

    def _turned(self, weight: torch.Tensor) -> torch.Tensor:
        """Convert between the layer's own layout and `[out, in]`."""
        return weight.t().contiguous() if self.transposed else weight

    def unpacked(self) -> nn.Module:
        """Return the original layer with its weight, which an integer layer has only if it was kept."""
        self.layer._parameters["weight"] = self._dense_parameter()
        self.layer._parameters["bias"] = self.bias
        return self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in]` to `[..., out]`; see `checked` for the errors raised."""
        return self._product(self.checked(x))

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs `[..., in]` in the layer's dtype, once weight and bias are those that the kernels take.

        Raises:
            UnsupportedModelError: gradients or another autocast dtype are required, or weight or bias were replaced by
                tensors that do not fit.
        """
        if torch.compiler.is_compiling():
            raise UnsupportedModelError("a packed layer cannot be compiled", UNPACK_REMEDY)
        bias = self._parameters["bias"]  # faster than attribute lookup, which every step would pay per layer
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            raise UnsupportedModelError(
                "a packed layer has no gradients", f"run it under torch.no_grad(), or {UNPACK_REMEDY}"
            )
        if torch.is_autocast_enabled("cpu"):
            self.check_autocast()
            x = x.to(self.dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
        if x.dtype != self.dtype or x.shape[-1:] != (self.in_features,):
            self._refuse_input(x, bias)
        self.follow_parameters()
        return x

    def follow_parameters(self) -> None:
        """Pack a kept weight again that was changed, and check the bias; see `checked` for the errors raised."""
        bias = self._parameters["bias"]
        if bias is not None:
            same = bias.dtype == self.dtype and bias.shape == (self.out_features,)
            if not (same and bias.is_cpu and bias.is_contiguous()):  # kernels read it by its address
                self._refuse_bias(bias)
        if self.keeps_original and state_of(self._parameters["weight"]) != self._packed_state:
            self._follow_weight()

    def _refuse_input(self, x: torch.Tensor, bias: torch.Tensor | None) -> NoReturn:
        """Raise the error that the original layer would raise; oneDNN's messages do not give the reason."""
        nn.functional.linear(x, torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="cpu"), bias)
        what = f"{dtype_name(x.dtype)} {list(x.shape)} on {x.device}"
        raise UnsupportedModelError(f"a layer packed in {dtype_name(self.dtype)} was given {what}", UNPACK_REMEDY)

    def _refuse_bias(self, bias: torch.Tensor) -> NoReturn:
        strided = "" if bias.is_contiguous() else ", strided"
        given = f"{dtype_name(bias.dtype)} {list(bias.shape)} on {bias.device}{strided}"
        wanted = f"contiguous {dtype_name(self.dtype)} [{self.out_features}] on the CPU"
        raise UnsupportedModelError(f"the bias of a packed layer is {given}, and must be {wanted}", UNPACK_REMEDY)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._panel_weight is not None:
            return panel_product(x, self._panel_weight, self._parameters["bias"])
        # 16-bit dtypes gain little, and the kernel for a lone row has the bits of the unpacked layer.
        lone = x.numel() == self.in_features and self.dtype == torch.float32 and self._count >= LONE_FROM
        rows = x.reshape(1, -1).expand(LONE_ROWS, -1) if lone else x
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return y[0].view(*x.shape[:-1], -1) if lone else y

    def extra_repr(self) -> str:
        """Describe the layer; PEFT and others print this when they reject it."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, packed: lade.unpack(model) undoes it"

    def check_autocast(self) -> None:
        """Raise `UnsupportedModelError` if autocast requires another dtype than that of this layer."""
        dtype = torch.get_autocast_dtype("cpu")
        if dtype != self.dtype:
            raise UnsupportedModelError(
                f"a layer packed in {dtype_name(self.dtype)} cannot run under autocast to {dtype_name(dtype)}",
                f"leave torch.autocast, or {UNPACK_REMEDY}",
            )

    def _dense_parameter(self) -> nn.Parameter:
        weight: Any = self._parameters["weight"]
        return weight if self.keeps_original else like(weight, self.dense_weight())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            # Transformers may tie weights again, which is harmless unless the tied weight was resized.
            current: Any = self._parameters["weight"]
            if value is not current or current.numel() not in (self._count, self._packed.numel()):
                raise UnsupportedModelError("the weight of a packed layer cannot be replaced", UNPACK_REMEDY)
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Refuse another dtype or device; other effects of `fn` concern dense parameters only."""
        check_move(fn, self.dtype)
        if self.keeps_original:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.keeps_original:
            destination[prefix + "weight"] = self.dense_weight()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        errors.append(f"{prefix}weight is packed; {UNPACK_REMEDY}")

    def __getstate__(self) -> dict[str, Any]:
        """Store the dense weight: the packed layout is specific to this processor and cannot be copied."""
        state = self.__dict__.copy()
        del state["_packed"], state["_panel_weight"]
        if not self.keeps_original:  # a kept weight may be shared with another module
            state["_parameters"] = self._without_values()
            state["_sent"] = ByValue(self.dense_weight())
        return state

    def _without_values(self) -> dict[str, Any]:
        """Return the parameters with an empty weight, which has its attributes."""
        weight: Any = self._parameters["weight"]
        return {**self._parameters, "weight": like(weight, torch.empty(0, dtype=torch.float32, device="cpu"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        panel = panel_for(self.dtype)
        self.panel, self._own_panel = self.panel and panel, self._own_panel and panel
        sent, weight = self.__dict__.pop("_sent", None), self._parameters["weight"]
        if sent is not None and weight is not None:
            self._parameters["weight"] = like(weight, sent)
        self._pack_weight()


class PackingGuard(nn.Module):
    """First child of a packed model: refuses unsupported operations before any other weight has changed.

    The model's `resize_token_embeddings` is replaced as well: it changes the embeddings before it reaches the head.
    """

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    @staticmethod
    def put_into(model: nn.Module) -> None:
        """Insert a guard before the children of `model`, replacing an older one."""
        dtypes = {module.dtype for module in model.modules() if isinstance(module, PackedLinear)}
        others = {name: child for name, child in model._modules.items() if name != GUARD}
        model.__dict__["_modules"] = {GUARD: PackingGuard(dtypes).train(model.training), **others}
        model.__dict__["resize_token_embeddings"] = _refuse_resizing

    @staticmethod
    def take_out(model: nn.Module) -> None:
        """Remove the guard of a model."""
        del model._modules[GUARD]
        model.__dict__.pop("resize_token_embeddings", None)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        for dtype in self.dtypes:
            check_move(fn, dtype)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        raise UnsupportedModelError("the weights of a packed model cannot be replaced", UNPACK_REMEDY)


def _refuse_resizing(*args: Any, **kwargs: Any) -> NoReturn:
    """Stand in for a packed model's `resize_token_embeddings`."""
    raise UnsupportedModelError("the embeddings of a packed model cannot be resized", UNPACK_REMEDY)


def refuse_autocast(model: Any) -> None:
    """Raise `UnsupportedModelError` before any work if a pass would fail under autocast to another dtype.

    Plain decoding would raise the same error, so there is nothing to fall back to.
    """
    if torch.is_autocast_enabled("cpu") and isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.check_autocast()


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs."""
    first, second = weight_of(layer).shape
    return (second, first) if isinstance(layer, Conv1D) else (first, second)


def weight_of(layer: nn.Module) -> torch.Tensor:
    """Return the weight of a layer; an empty tensor if it has none."""
    weight = layer._parameters.get("weight")
    return torch.empty(0, dtype=torch.float32, device="cpu") if weight is None else weight
