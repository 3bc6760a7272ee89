"""`lade.pack` and `lade.unpack`: prepack the linear layers of a model for the CPU, in place.

A matrix product on the CPU first reorders its weights into blocks that suit the vector units. For a handful of tokens
that costs as much as the product itself, and `nn.Linear` repeats it in every pass. A packed layer does it once:

>>> lade.pack(model)        # in place, layer by layer; the original weights are freed
>>> lade.unpack(model)      # restores every weight bit for bit

The kernels are oneDNN's, which PyTorch ships and `torch.compile` uses on the CPU; their operators are private. Large
bfloat16 models take those compiled here if they were measured faster, see `panel_products`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lade.announcements import announced_if_slow
from lade.backends.cpu.invariant_marker import refuse_invariant
from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.integers import Int4Linear, Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear, PackingGuard, shape_of, weight_of
from lade.backends.cpu.packing.panel_products import faster_panel, panel_for
from lade.backends.cpu.packing.weight import UNPACK_REMEDY, HugePages, packed_weight, same_bits
from lade.errors import ConfigError, UnsupportedModelError
from lade.locks import ForkSafeLock
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.config import dtype_name
from lade.model.facts import ModelFacts
from lade.model.module_changes import HOOKS_REMEDY, has_own_forward

logger = logging.getLogger(__name__)
UNDERSTOOD: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""Classes that can be packed. Subclasses are refused, since they may compute something else."""
_LINEAR = (*UNDERSTOOD, PackedLinear)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_WEIGHTS = 2**17  # layers with fewer weights are not packed: calling the packed kernel costs more than it saves
INTEGER_LAYERS: dict[str, type[Int8Linear]] = {kind.WEIGHTS: kind for kind in (Int8Linear, Int4Linear)}
"""Classes of layers by the format of their integer weights."""
RELOAD_REMEDY = "load the model again, or pack it with keep_original=True to begin with"
CPU_REMEDY = "leave it unpacked, or load it on the CPU with dtype=torch.float32 or torch.bfloat16 and no device_map"
_Model = TypeVar("_Model", bound=nn.Module)
_packing = ForkSafeLock()


def pack(
    model: _Model,
    keep_original: bool = False,
    *,
    weights: str | None = None,
    keep: Sequence[str] | str = (),
    min_weights: int = MIN_WEIGHTS,
    panels: bool = False,
) -> _Model:
    """Replace the linear layers of a model by prepacked ones, in place, and return it. For inference on the CPU.

    `nn.Linear` and GPT-2's `Conv1D` are packed in float32, bfloat16 or, if the processor supports it, float16.
    Everything else (embeddings, norms, experts that are not linear layers) is left alone, and so are small layers. A
    model without a large enough layer is returned unchanged, and layers that are already packed stay packed. In
    bfloat16, layers use oneDNN's products, or this project's own if these are measured to be faster.

    A weight shared with another module, such as a head tied to the embedding, is kept: its packed form is a copy.
    Packed weights must not be changed; `load_state_dict`, moves to another device or dtype, and passes that need
    gradients are refused. No thread may call the model meanwhile.

    With `weights="int8"` or "int4", weights are rounded to 8 or 4 bits, and a layer's inputs to 8, with a scale for
    every 32 of them. Either makes another model, slightly worse, that reads fewer bytes. `unpack` refuses it unless
    the originals are kept; `state_dict` and `save_pretrained` write the dequantised weights, `lade.save_packed` the
    integers.

    Args:
        model: a model in evaluation mode, on the CPU.
        keep_original: keep the dense weights as the layers' `weight`, at the price of a second copy. By default they
            are freed layer by layer, and `weight` is a parameter in oneDNN's layout, whose values `weight.to_dense()`
            returns, or in panels. `state_dict` and `save_pretrained` write dense weights either way.
        weights: "int8" or "int4"; None to keep the dtype of the weights.
        keep: with int8 or int4, names of layers that are packed in their own dtype. Patterns such as "lm_head" or
            "layers.0.*" match the whole name or its end.
        min_weights: least number of weights of a layer that is packed.
        panels: in bfloat16, use this project's products without measuring; `lade.invariant` needs them.

    Raises:
        ConfigError: `weights` is unknown, or no layer matches `keep`.
        UnsupportedModelError: the model, a layer, its device or its dtype cannot be packed exactly, or this PyTorch
            lacks the kernel. The model is left unchanged.
    """
    with _packing, announced_if_slow(logger, f"packing the weights of {type(model).__name__}"):
        start = perf_counter()
        kinds = packable(model, weights=weights, keep=keep, min_weights=min_weights)
        panel = 0 if weights is not None else panel_for(torch.bfloat16) if panels else _bfloat16_panel(kinds)
        pack_layers(model, kinds, keep_original=keep_original, panel=panel)
        if kinds:
            logger.info("packed %d layers of %s in %.1f s", len(kinds), type(model).__name__, perf_counter() - start)
    return model


def unpack(model: _Model) -> _Model:
    """Undo `pack`, in place, and return the model: its original layers are back, bit for bit, ties included.

    Other models are left alone.

    Raises:
        UnsupportedModelError: the model was made invariant after packing; or layers are packed in int8 or int4 without
            their original weights; or layers have hooks, as offloaded ones do. The model is left unchanged.
    """
    refuse_invariant(model)
    with _packing:
        _check_restorable(model)
        places_of = _places(model)
        while places_of:  # popped one by one, so that each packed weight is freed before the next is unpacked
            module, places = places_of.popitem()
            if isinstance(module, PackedLinear):
                _put(module.unpacked(), places)
            elif isinstance(module, PackingGuard):
                for parent, _ in places:
                    PackingGuard.take_out(parent)
    return model


def packable(
    model: nn.Module, *, weights: str | None = None, keep: Sequence[str] | str = (), min_weights: int = MIN_WEIGHTS
) -> dict[nn.Module, type[PackedLinear]]:
    """Return the layers that `pack` would pack, each with its new class; runs only small trials of the kernels.

    Arguments and errors are those of `pack`; the model is left unchanged.
    """
    patterns = _patterns(weights, keep)
    check_model(model)
    kinds: dict[nn.Module, type[PackedLinear]] = {}
    names = [name for name, module in model.named_modules() if isinstance(module, _LINEAR)]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            some = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError("keep", pattern, f"no linear layer matches it: give one of {some}")
    for name, module in model.named_modules():
        in_integers = weights is not None and not any(matches(name, pattern) for pattern in patterns)
        if isinstance(module, UNDERSTOOD) and weight_of(module).numel() >= min_weights:
            check_layer(name, module)
            kinds[module] = INTEGER_LAYERS[weights] if weights is not None and in_integers else PackedLinear
        if in_integers and (module in kinds or in_own_dtype(module)):
            check_integer_layer(name, module)
    for dtype in {weight_of(layer).dtype for layer, kind in kinds.items() if kind is PackedLinear}:
        try_kernel(dtype)
    return kinds


def pack_layers(
    model: nn.Module,
    kinds: Mapping[Any, type[PackedLinear]],
    *,
    keep_original: bool = False,
    codes: Callable[[Any], BlockCodes | None] = lambda layer: None,
    panel: int = 0,
) -> None:
    """Replace layers of a model by packed ones of these kinds, in place, and guard them.

    `codes` is called layer by layer, for the codes of an integer layer if they are known already; `panel` is that of
    bfloat16 weights, see `PackedLinear`.
    """
    places, shared, done = _places(model), shared_weights(model), list[PackedLinear]()
    pages = HugePages()
    try:
        for layer, kind in kinds.items():
            known: Any = {"panel": panel * (weight_of(layer).dtype == torch.bfloat16)}
            if issubclass(kind, Int8Linear):
                known = {"codes": codes(layer)}
            packed = kind(layer, keep=keep_original or id(layer.weight) in shared, pages=pages, **known)
            done.append(packed)
            _put(packed, places[layer])
            layer._parameters["weight"] = None  # `packed` holds it, or can unpack it
    except BaseException:  # out of memory or Ctrl-C: roll back, so that no half-packed model remains
        for packed in done:
            if _is_restorable(packed):
                _put(packed.unpacked(), places[packed.layer])
        raise
    finally:  # integer layers that cannot be restored stay packed after an error
        guard(model)


def guard(model: nn.Module) -> None:
    """Insert guards into transformers models with packed layers, also inside wrappers.

    Containers get none, since they would call it as one of their layers.
    """
    inside = set[nn.Module]()
    for module in list(model.modules()):  # outermost first
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            if packed_layers(module):
                PackingGuard.put_into(module)


def rounds_visibly(model: Any) -> bool:
    """Return True if the rounding of a pass over several tokens may show in a model's text, as scores often tie."""
    return model.dtype.itemsize == 2 or integer_weights(model) is not None


def packed_layers(model: nn.Module) -> int:
    """Return the number of packed layers."""
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def int8_layers(model: nn.Module) -> int:
    """Return the number of layers packed in int8."""
    return sum(type(module) is Int8Linear for module in model.modules())


def int4_layers(model: nn.Module) -> int:
    """Return the number of layers packed in int4."""
    return sum(isinstance(module, Int4Linear) for module in model.modules())


def integer_weights(model: nn.Module) -> str | None:
    """Return the format of a packed model's integer weights, "int8" or "int4"; None if it has none."""
    return next((module.WEIGHTS for module in model.modules() if isinstance(module, Int8Linear)), None)


def in_own_dtype(module: nn.Module) -> bool:
    """Return True if a module is a layer packed in its own dtype."""
    return isinstance(module, PackedLinear) and not isinstance(module, Int8Linear)


def kept_layers(model: nn.Module) -> list[str]:
    """Return the names of layers packed in their own dtype."""
    return [name for name, module in model.named_modules() if in_own_dtype(module)]


def shared_weights(model: nn.Module) -> set[int]:
    """Return ids of parameters held by more than one module; packing these frees nothing."""
    holders = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values() if weight is not None
    )
    return {key for key, count in holders.items() if count > 1}


def check_model(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a model that cannot be packed as a whole."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{name} is not a model", "give a transformers model")
    refuse_invariant(model)
    if isinstance(model, _LINEAR):
        raise UnsupportedModelError(f"{name} is a layer", "give the model that it belongs to")
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
        raise UnsupportedModelError(f"{name} is in training mode, but packed layers only infer", "call model.eval()")
    if not any(isinstance(module, _LINEAR) for module in model.modules()):
        raise UnsupportedModelError(f"{name} has no linear layers", "leave it unpacked")


def check_layer(name: str, layer: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a layer that cannot be packed exactly."""
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
            f"layer {name!r} has hooks, for example of accelerate", f"{HOOKS_REMEDY}, or load it without device_map"
        )
    if weight.device.type != "cpu" or weight.layout != torch.strided:
        raise UnsupportedModelError(f"layer {name!r} is on {weight.device}, but packing is for the CPU", CPU_REMEDY)
    if weight.dtype not in DTYPES:
        raise UnsupportedModelError(f"layer {name!r} is in {dtype_name(weight.dtype)}", CPU_REMEDY)


def check_integer_layer(name: str, layer: Any) -> None:
    """Raise `UnsupportedModelError` for a layer whose weight cannot be quantised."""
    keep = f"keep it as it is, with keep=[{name!r}]"
    if isinstance(layer, PackedLinear):
        raise UnsupportedModelError(
            f"layer {name!r} is already packed in {dtype_name(layer.dtype)}", f"{UNPACK_REMEDY}, or {keep}"
        )
    if not layer.weight.detach().abs().amax(-1).isfinite().all():
        raise UnsupportedModelError(f"layer {name!r} has weights that are not finite", keep)


@torch.no_grad()
def try_kernel(dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` unless packing in a dtype works on this build of PyTorch and this processor.

    The operators are private, and the dtypes that they support depend on the processor, so they are tried.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for shape in ((3, 64), (64, 64))
    )
    try:
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
            raise RuntimeError("torch.backends.mkldnn is not available or not enabled")
        packed = packed_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        right = same_bits(packed.to_dense(), weight)
    except (RuntimeError, AttributeError) as problem:
        reason = str(problem).partition("\n")[0]
        what = f"PyTorch has no packed {dtype_name(dtype)} kernel here ({reason})"
        raise UnsupportedModelError(what, CPU_REMEDY) from problem
    expected = x.double() @ weight.double().t()
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    if not right or error > 4 * torch.finfo(dtype).eps:
        raise UnsupportedModelError(
            f"PyTorch's packed {dtype_name(dtype)} kernel is wrong here by {error:.1g}", CPU_REMEDY
        )


def _bfloat16_panel(kinds: Mapping[nn.Module, type[PackedLinear]]) -> int:
    """Return the outputs per panel of the layers to pack in bfloat16; 0 for oneDNN's products."""
    return faster_panel(Counter(shape_of(layer) for layer in kinds if weight_of(layer).dtype == torch.bfloat16))


def _patterns(weights: str | None, keep: Sequence[str] | str) -> list[str]:
    """Return the patterns in `keep`, after checking them against `weights`."""
    if weights is not None and weights not in INTEGER_LAYERS:
        choices = " or ".join(map(repr, INTEGER_LAYERS))
        raise ConfigError("weights", weights, f"give {choices}, or None for the model's own dtype")
    patterns = [keep] if isinstance(keep, str) else list(keep)
    if patterns and weights is None:
        raise ConfigError("keep", patterns, "it has an effect with weights='int8' or 'int4' only: leave it out")
    return patterns


def matches(name: str, pattern: str) -> bool:
    """Return True if a shell pattern matches a module's name, or the end of it after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _is_restorable(layer: PackedLinear) -> bool:
    return layer.keeps_original or in_own_dtype(layer)


def _check_restorable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, PackedLinear):
            continue
        if has_own_forward(module):
            raise UnsupportedModelError(f"layer {name!r} has hooks, for example of accelerate", HOOKS_REMEDY)
        if not _is_restorable(module):
            what = getattr(module, "WEIGHTS", dtype_name(module.dtype))
            raise UnsupportedModelError(
                f"layer {name!r} is packed in {what}, and its original weight was not kept", RELOAD_REMEDY
            )


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the parents of each module, with its name in each; a layer may have several."""
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
