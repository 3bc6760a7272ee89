"""Linear layers prepacked for the CPU: a pass over a few tokens costs about as much as one over a single token.

A matrix product on the CPU brings its weights into blocks that suit the vector units. For a handful of tokens that
costs as much as the product itself, and `nn.Linear` does it again in every pass. A packed layer has done it once:

>>> lade.pack(model)        # in place, layer by layer; the original weights are freed
>>> lade.unpack(model)      # every weight is back, bit for bit

The kernels are oneDNN's, which PyTorch ships and `torch.compile` uses on the CPU; their operators are private ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lade.errors import UnsupportedModelError
from lade.locks import ForkSafeLock
from lade.model.invariance import refuse_invariant
from lade.model.packing.linear import Guard, PackedLinear, same_bits, short, weight_of

logger = logging.getLogger(__name__)

MIN_WEIGHTS = 2**17
"""Layers with fewer weights are left alone: calling the packed kernel takes longer there than it saves."""

UNDERSTOOD: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""What can be packed: these classes themselves, since a subclass may compute something else."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_REMEDY = "leave it unpacked, or load it on the CPU with dtype=torch.float32 or torch.bfloat16 and no device_map"

_Model = TypeVar("_Model", bound=nn.Module)
_packing = ForkSafeLock()


def pack(model: _Model, keep_original: bool = False, *, min_weights: int = MIN_WEIGHTS) -> _Model:
    """Replace the linear layers of a model by prepacked ones, in place. For inference on the CPU.

    Packed are `nn.Linear` and GPT-2's `Conv1D` in float32, bfloat16 or, where the processor has it, float16. Everything
    else (embeddings, norms, experts that are no linear layers) stays as it is, and so do small layers. A model without
    any layer large enough is returned as it is, and layers that are packed already stay packed.

    A weight that another module holds too, such as a head tied to the embedding, stays where it is: its packed form is
    a second copy. The packed weights must not be changed; `load_state_dict`, a move to another device or dtype, and a
    pass that needs gradients are refused. While it is packed no thread may call the model.

    Args:
        model: a model in evaluation mode, on the CPU.
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
    start = perf_counter()
    with _packing:
        layers = packable(model, min_weights=min_weights)
        _pack(model, layers, keep_original=keep_original)
        if layers and isinstance(model, PreTrainedModel):  # a container, such as nn.Sequential, would call a guard
            Guard.put_into(model)
    if layers:
        logger.info("packed %d layers of %s in %.1f s", len(layers), type(model).__name__, perf_counter() - start)
    return model


def _pack(model: nn.Module, layers: Sequence[Any], *, keep_original: bool) -> None:
    places, shared, done = _places(model), _shared_weights(model), []
    try:
        for layer in layers:
            packed = PackedLinear(layer, keep=keep_original or id(layer.weight) in shared)
            done.append(packed)
            _put(packed, places[layer])
            layer._parameters["weight"] = None  # `packed` has it, or can unpack it
    except BaseException:  # out of memory or Ctrl-C amid the work: no half-packed model remains
        for packed in done:
            _put(packed.unpacked(), places[packed.layer])
        raise


def unpack(model: _Model) -> _Model:
    """Undo `pack`, in place: the layers are the ones they were, their weights equal bit for bit, ties included.

    Args:
        model: packed or not.

    Returns:
        The model itself.

    Raises:
        UnsupportedModelError: the model was made invariant, packed as it is.
    """
    refuse_invariant(model)
    with _packing:
        places_of = _places(model)
        while places_of:  # taken out one by one, so that what is unpacked is freed before the next one
            module, places = places_of.popitem()
            if isinstance(module, PackedLinear):
                _put(module.unpacked(), places)
            elif isinstance(module, Guard):
                for parent, name in places:
                    del parent._modules[name]
    return model


def packed_layers(model: nn.Module) -> int:
    """How many layers of a model are packed."""
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def packable(model: nn.Module, *, min_weights: int = MIN_WEIGHTS) -> list[nn.Module]:
    """The layers that `pack` would pack; it computes only a small trial of the kernel.

    Args:
        model: is left as it is.
        min_weights: least number of weights of a layer, see `pack`.

    Raises:
        UnsupportedModelError: as `pack` does.
    """
    _check_model(model)
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, UNDERSTOOD) and weight_of(module).numel() >= min_weights:
            _check_layer(name, module)
            layers.append(module)
    for dtype in {weight_of(layer).dtype for layer in layers}:
        _try_kernel(dtype)
    return layers


def _check_model(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a model that is not to be touched at all."""
    refuse_invariant(model)
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
        raise UnsupportedModelError(f"layer {name!r} is in {short(weight.dtype)}", CPU_REMEDY)


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
        right = same_bits(packed.to_dense(), weight)
    except (RuntimeError, AttributeError) as problem:
        reason = str(problem).splitlines()[0]
        raise UnsupportedModelError(
            f"PyTorch has no packed {short(dtype)} kernel here ({reason})", CPU_REMEDY
        ) from problem
    expected = x.double() @ weight.double().t()
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    if not right or error > 4 * torch.finfo(dtype).eps:
        raise UnsupportedModelError(f"PyTorch's packed {short(dtype)} kernel is wrong here by {error:.1g}", CPU_REMEDY)


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
