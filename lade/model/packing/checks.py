"""What can be packed: models, layers, and the kernels of this build of PyTorch on this processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lade.errors import UnsupportedModelError
from lade.model.attachments import GIVE_INSIDE, wraps_model
from lade.model.class_change import HOOKS_REMEDY, has_own_forward
from lade.model.facts import ModelFacts
from lade.model.invariance import refuse_invariant
from lade.model.packing.codes import scale_of
from lade.model.packing.int8 import MOST_INPUTS
from lade.model.packing.layout import packed_weight
from lade.model.packing.linear import PackedLinear
from lade.model.packing.onednn import required
from lade.model.packing.weight import UNPACK_REMEDY, same_bits, short

UNDERSTOOD: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""What can be packed: these classes themselves, since a subclass may compute something else."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_REMEDY = "leave it unpacked, or load it on the CPU with dtype=torch.float32 or torch.bfloat16 and no device_map"


def check_model(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a model that is not to be touched at all."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{name} is no model", "give one of transformers")
    refuse_invariant(model)
    if isinstance(model, (*UNDERSTOOD, PackedLinear)):
        raise UnsupportedModelError(f"{name} is a layer", "give the model it belongs to")
    if wraps_model(model):
        raise UnsupportedModelError(f"{name} wraps a model", GIVE_INSIDE)
    if hasattr(model, "_orig_mod") or ModelFacts.of(model).compiled:
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


def check_layer(name: str, layer: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a layer that packing would change."""
    weight: Any = layer.weight
    if type(layer) not in UNDERSTOOD:
        raise UnsupportedModelError(
            f"layer {name!r} is a {type(layer).__name__}, which may be more than a linear layer", "leave it unpacked"
        )
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
        raise UnsupportedModelError(
            f"the weight of layer {name!r} is a {type(weight.data).__name__}",
            "leave it unpacked, or load it whole and without quantisation",
        )
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks) or has_own_forward(layer):
        raise UnsupportedModelError(
            f"layer {name!r} has hooks, of accelerate or of others", f"{HOOKS_REMEDY}, or load it without device_map"
        )
    if weight.device.type != "cpu" or weight.layout != torch.strided:
        raise UnsupportedModelError(f"layer {name!r} is on {weight.device}, and packing is for the CPU", CPU_REMEDY)
    if weight.dtype not in DTYPES:
        raise UnsupportedModelError(f"layer {name!r} is in {short(weight.dtype)}", CPU_REMEDY)


@torch.no_grad()
def try_kernel(dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` unless this build of PyTorch, on this processor, packs rightly.

    The operators are private, and which dtypes they take depends on the processor: trying says more than asking.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64), (64, 64)))
    with required(f"packed {short(dtype)} kernel", CPU_REMEDY):
        packed = packed_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        right = same_bits(packed.to_dense(), weight)
    expected = x.double() @ weight.double().t()
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    if not right or error > 4 * torch.finfo(dtype).eps:
        raise UnsupportedModelError(f"PyTorch's packed {short(dtype)} kernel is wrong here by {error:.1g}", CPU_REMEDY)


def check_int8_layer(name: str, layer: Any) -> None:
    """Raise `UnsupportedModelError` for a layer whose weight has no codes, or whose sums might overflow."""
    keep = f"keep it as it is, with keep=[{name!r}]"
    if isinstance(layer, PackedLinear):
        raise UnsupportedModelError(
            f"layer {name!r} is packed in {short(layer.dtype)} already", f"{UNPACK_REMEDY}, or {keep}"
        )
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    if weight.shape[1] > MOST_INPUTS:
        raise UnsupportedModelError(f"layer {name!r} has {weight.shape[1]} inputs, more than {MOST_INPUTS}", keep)
    if not scale_of(weight.detach()).isfinite().all():
        raise UnsupportedModelError(f"layer {name!r} has weights that are not finite", keep)
