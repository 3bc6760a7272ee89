"""Linear layers prepacked for the CPU: a pass over a few tokens costs about as much as one over a single token.

A matrix product on the CPU brings its weights into blocks that suit the vector units. For a handful of tokens that
costs as much as the product itself, and `nn.Linear` does it anew in every pass. A packed layer has done it once:

>>> lade.pack(model)        # in place, layer by layer; the original weights are freed
>>> lade.unpack(model)      # every weight is back, bit for bit

The kernels are oneDNN's, which PyTorch ships and `torch.compile` uses on the CPU; their operators are private ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Self, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lade.errors import UnsupportedModelError

MIN_WEIGHTS = 2**17
"""Layers with fewer weights are left alone: calling the packed kernel takes longer there than it saves."""

UNDERSTOOD: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""What can be packed: these classes themselves, since a subclass may compute something else."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_REMEDY = "leave it unpacked, or load it on the CPU with dtype=torch.float32 or torch.bfloat16 and no device_map"
UNPACK_REMEDY = "call lade.unpack(model) first"

_GUARD = "packing_guard"
_Model = TypeVar("_Model", bound=nn.Module)


def pack(model: _Model, keep_original: bool = False, *, min_weights: int = MIN_WEIGHTS) -> _Model:
    """Replace the linear layers of a model by prepacked ones, in place. For inference on the CPU.

    Packed are `nn.Linear` and GPT-2's `Conv1D` in float32, bfloat16 or, where the processor has it, float16. Everything
    else (embeddings, norms, experts that are no linear layers) stays as it is, and so do small layers. A model without
    any layer large enough is returned as it is, and layers that are packed already stay packed.

    A weight that another module holds too, such as a head tied to the embedding, stays where it is: its packed form is
    a second copy. The packed weights must not be changed; `load_state_dict`, a move to another device or dtype, and a
    pass that needs gradients are refused.

    Args:
        model: in evaluation mode, on the CPU.
        keep_original: keep the dense weights as the layers' `weight`, at the price of a second copy. By default they
            are freed, one layer after the other, and `weight` is a parameter in oneDNN's layout with the shape
            `[out, in]`, which has a dtype and a size, and whose values `weight.to_dense()` gives. `state_dict` and
            `save_pretrained` write dense weights either way.
        min_weights: number of weights from which on a layer is packed.

    Returns:
        The model itself.

    Raises:
        UnsupportedModelError: a layer, its device, its dtype or the model is of a kind that cannot be packed exactly,
            or this PyTorch has no kernel for it. The model is then as it was.
    """
    layers = packable(model, min_weights=min_weights)
    places, shared, done = _places(model), _shared_weights(model), []
    try:
        for layer in layers:
            packed = PackedLinear(layer, keep=keep_original or id(layer.weight) in shared)
            done.append(packed)
            _put(packed, places[layer])
            layer._parameters["weight"] = None  # `packed` has it, or can unpack it
    except BaseException:  # out of memory or Ctrl-C amid the work: no half-packed model is left behind
        for packed in done:
            _put(packed.unpacked(), places[packed.layer])
        raise
    if layers and isinstance(model, PreTrainedModel):  # a container, such as nn.Sequential, would call a guard
        _Guard.put_into(model)
    return model


def unpack(model: _Model) -> _Model:
    """Undo `pack`, in place: the layers are the ones they were, their weights equal bit for bit, ties included.

    Args:
        model: packed or not.

    Returns:
        The model itself.
    """
    places_of = _places(model)
    while places_of:  # taken out one by one, so that what is unpacked is freed before the next one
        module, places = places_of.popitem()
        if isinstance(module, PackedLinear):
            _put(module.unpacked(), places)
        elif isinstance(module, _Guard):
            for parent, name in places:
                del parent._modules[name]
    return model


def packed_layers(model: nn.Module) -> int:
    """How many layers of a model are packed."""
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def packable(model: nn.Module, *, min_weights: int = MIN_WEIGHTS) -> list[nn.Module]:
    """The layers that `pack` would pack; it computes nothing but a small trial of the kernel.

    Args:
        model: is left as it is.
        min_weights: as for `pack`.

    Raises:
        UnsupportedModelError: as `pack` does.
    """
    _check_model(model)
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, UNDERSTOOD) and _weight(module).numel() >= min_weights:
            _check_layer(name, module)
            layers.append(module)
    for dtype in {_weight(layer).dtype for layer in layers}:
        _try_kernel(dtype)
    return layers


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout.

    Args:
        layer: an `nn.Linear`, or a `Conv1D`, whose weight is transposed.
        keep: whether the layer's own weight stays beside the packed one.

    Attributes:
        in_features, out_features: as those of the layer.
        bias: the layer's own parameter, `[out]`, or None.
        layer: the layer that this one stands for, without its weight.
        weight: the layer's own parameter where it is kept; else a parameter in the packed layout, `[out, in]`.
    """

    bias: nn.Parameter | None
    layer: nn.Module
    _packed: torch.Tensor

    def __init__(self, layer: nn.Module, *, keep: bool) -> None:
        super().__init__()
        self.transposed = type(layer) is Conv1D
        self.keeps_original = keep
        self._parameters["weight"] = weight = layer._parameters["weight"]
        self._parameters["bias"] = layer._parameters["bias"]
        assert weight is not None
        self.in_features, self.out_features = weight.shape if self.transposed else reversed(weight.shape)
        self._pack_weight()
        self.__dict__["layer"] = layer  # outside `_modules`: it is a part of neither the model's tree nor its state

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Make the packed tensor of the dense `weight`, and give that up unless it is kept."""
        weight: Any = self._parameters["weight"]
        dense = weight.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(dense.t().contiguous() if self.transposed else dense)
        self.__dict__["_packed"] = packed
        if self.keeps_original:
            return
        if not _same_bits(self.dense_weight(), dense):
            raise UnsupportedModelError("a packed weight does not unpack to what it was", "keep this model unpacked")
        self._parameters["weight"] = _like(weight, packed)

    def dense_weight(self) -> torch.Tensor:
        """A copy of the weight as the layer had it: `[out, in]`, or `[in, out]` of a `Conv1D`."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense.t().contiguous() if self.transposed else dense

    def unpacked(self) -> nn.Module:
        """The layer as it was."""
        self.layer._parameters["weight"] = self._dense_parameter()
        self.layer._parameters["bias"] = self.bias
        return self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`.

        Raises:
            UnsupportedModelError: gradients or another dtype of autocast are asked for.
        """
        if torch.compiler.is_compiling():
            raise UnsupportedModelError("a packed layer cannot be compiled", UNPACK_REMEDY)
        bias, packed = self.bias, self._packed
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            raise UnsupportedModelError(
                "a packed layer has no gradients", f"run it under torch.no_grad(), or {UNPACK_REMEDY}"
            )
        if torch.is_autocast_enabled("cpu"):
            x = self._autocast(x)
        if x.dtype != packed.dtype or x.shape[-1:] != packed.shape[1:]:
            # Raises, in the words of the layer that this one stands for; oneDNN's own say nothing of the reason.
            return nn.functional.linear(x, packed.to_dense(), bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return y

    def extra_repr(self) -> str:
        """As of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _autocast(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        if dtype != self._packed.dtype:
            raise UnsupportedModelError(
                f"a layer packed in {_short(self._packed.dtype)} cannot run under autocast to {_short(dtype)}",
                f"leave torch.autocast, or {UNPACK_REMEDY}",
            )
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    def _dense_parameter(self) -> nn.Parameter:
        weight: Any = self._parameters["weight"]
        return weight if self.keeps_original else _like(weight, self.dense_weight())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            # Transformers ties anew what is tied, which changes nothing unless the tied weight has been resized.
            current: Any = self._parameters["weight"]
            if value is not current or current.numel() != self._packed.numel():
                raise UnsupportedModelError("the weight of a packed layer cannot be replaced", UNPACK_REMEDY)
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Refuses another dtype or device; what else `fn` does to parameters concerns dense ones only."""
        _check_move(fn, self._packed.dtype)
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
        """Dense, for `copy.deepcopy` and pickle: the packed layout is of this processor, and cannot be copied."""
        state = self.__dict__.copy()
        del state["_packed"]
        state["_parameters"] = {**self._parameters, "weight": self._dense_parameter()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack_weight()


class _Guard(nn.Module):
    """The first child of a packed model: it refuses what a packed layer refuses before any other weight has changed."""

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    @staticmethod
    def put_into(model: nn.Module) -> None:
        """Put one in front of the children of `model`, in place of an older one."""
        dtypes = {module._packed.dtype for module in model.modules() if isinstance(module, PackedLinear)}
        others = {name: child for name, child in model._modules.items() if name != _GUARD}
        model.__dict__["_modules"] = {_GUARD: _Guard(dtypes), **others}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        for dtype in self.dtypes:
            _check_move(fn, dtype)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        raise UnsupportedModelError("the weights of a packed model cannot be replaced", UNPACK_REMEDY)


def _check_move(fn: Any, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` if `fn` gives a tensor another dtype or device."""
    after = fn(torch.empty(0, dtype=dtype))
    if after.dtype != dtype or after.device.type != "cpu":
        raise UnsupportedModelError(
            f"layers packed in {_short(dtype)} for the CPU cannot become {_short(after.dtype)} on {after.device}",
            f"{UNPACK_REMEDY}, and pack it again afterwards",
        )


def _check_model(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a model that is not to be touched at all."""
    name = type(model).__name__
    if isinstance(model, (*UNDERSTOOD, PackedLinear)):
        raise UnsupportedModelError(f"{name} is a layer", "give the model it belongs to")
    if hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} is compiled",
            "leave it unpacked: inductor can pack by itself, with torch._inductor.config.freezing = True",
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedModelError(f"{name} is quantised", "leave it unpacked, or load it without quantisation")
    adapted = next((name for name, module in model.named_modules() if "base_layer" in module._modules), None)
    if adapted is not None:
        raise UnsupportedModelError(f"layer {adapted!r} has an adapter", "merge it first, with merge_and_unload()")
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode, and packed layers only infer", "call model.eval()")
    known = (*UNDERSTOOD, PackedLinear)
    if not any(isinstance(module, known) for module in model.modules()):
        raise UnsupportedModelError(f"{name} has no linear layers", "leave it unpacked")


def _check_layer(name: str, layer: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a layer that packing would change."""
    weight: Any = layer.weight
    if type(layer) not in UNDERSTOOD:
        raise UnsupportedModelError(
            f"layer {name!r} is a {type(layer).__name__}, which may be more than a linear layer", "leave it unpacked"
        )
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
        raise UnsupportedModelError(
            f"the weight of layer {name!r} is a {type(weight.data).__name__}",
            "leave it unpacked, or load it without quantisation",
        )
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks) or "forward" in vars(layer) or hasattr(layer, "_hf_hook"):
        raise UnsupportedModelError(
            f"layer {name!r} has hooks, of accelerate or of others",
            "remove them first, or load it without device_map",
        )
    if weight.device.type != "cpu" or weight.layout != torch.strided:
        raise UnsupportedModelError(f"layer {name!r} is on {weight.device}, and packing is for the CPU", CPU_REMEDY)
    if weight.dtype not in DTYPES:
        raise UnsupportedModelError(f"layer {name!r} is in {_short(weight.dtype)}", CPU_REMEDY)


@torch.no_grad()
def _try_kernel(dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` unless this build of PyTorch, on this processor, packs rightly.

    The operators are private, and which dtypes they take depends on the processor: trying says more than asking.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64), (64, 64)))
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            raise RuntimeError("torch.backends.mkldnn is not available or not enabled")
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        right = _same_bits(packed.to_dense(), weight)
    except (RuntimeError, AttributeError) as problem:
        reason = str(problem).splitlines()[0]
        raise UnsupportedModelError(
            f"PyTorch has no packed {_short(dtype)} kernel here ({reason})", CPU_REMEDY
        ) from problem
    expected = x.double() @ weight.double().t()
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    if not right or error > 4 * torch.finfo(dtype).eps:
        raise UnsupportedModelError(f"PyTorch's packed {_short(dtype)} kernel is wrong here by {error:.1g}", CPU_REMEDY)


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of the parameters that more than one module holds: packing one of them frees nothing."""
    holders = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values() if weight is not None
    )
    return {key for key, count in holders.items() if count > 1}


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Where each module is: its parents, and its name there. A layer may be at several places."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    return places


def _put(layer: nn.Module, places: list[tuple[nn.Module, str]]) -> None:
    for parent, name in places:
        layer.training = getattr(parent, name).training
        parent._modules[name] = layer


def _weight(layer: nn.Module) -> torch.Tensor:
    """Its weight; an empty one of a layer without any."""
    weight = layer._parameters.get("weight")
    return torch.empty(0) if weight is None else weight


def _like(weight: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter with other data, with whatever transformers and others have noted on the first one."""
    parameter = nn.Parameter(data, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    return parameter


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality in which a NaN equals itself, and zeros have signs."""
    as_integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(as_integers), other.contiguous().view(as_integers))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
