"""Pack the linear layers of a model for the CPU, after checking what can be packed.

A matrix product on the CPU brings its weights into blocks that suit the vector units. For a handful of tokens that
costs as much as the product itself, and `nn.Linear` does it again in every pass. A packed layer has done it once:

>>> lade.pack(model)        # in place, layer by layer; the original weights are freed
>>> lade.unpack(model)      # every weight is back, bit for bit

The kernels are oneDNN's, which PyTorch ships and `torch.compile` uses on the CPU; their operators are private ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lade.backends.cpu.invariant_marker import refuse_invariant
from lade.backends.cpu.packing.int8 import MOST_INPUTS, RELOAD_REMEDY, Int8Linear, SharedInputs, input_form
from lade.backends.cpu.packing.integer_products import Codes, required, scale_of
from lade.backends.cpu.packing.linear import Guard, PackedLinear, weight_of
from lade.backends.cpu.packing.weight import UNPACK_REMEDY, HugePages, packed_weight, same_bits
from lade.errors import ConfigError, UnsupportedModelError
from lade.locks import ForkSafeLock
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.config import dtype_name
from lade.model.facts import ModelFacts
from lade.model.in_place_subclassing import HOOKS_REMEDY, has_own_forward

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
        raise UnsupportedModelError(f"layer {name!r} is in {dtype_name(weight.dtype)}", CPU_REMEDY)


@torch.no_grad()
def try_kernel(dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` unless this build of PyTorch, on this processor, packs rightly.

    The operators are private, and which dtypes they take depends on the processor: trying says more than asking.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64), (64, 64)))
    with required(f"packed {dtype_name(dtype)} kernel", CPU_REMEDY):
        packed = packed_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        right = same_bits(packed.to_dense(), weight)
    expected = x.double() @ weight.double().t()
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    if not right or error > 4 * torch.finfo(dtype).eps:
        raise UnsupportedModelError(
            f"PyTorch's packed {dtype_name(dtype)} kernel is wrong here by {error:.1g}", CPU_REMEDY
        )


def check_int8_layer(name: str, layer: Any) -> None:
    """Raise `UnsupportedModelError` for a layer whose weight has no codes, or whose sums might overflow."""
    keep = f"keep it as it is, with keep=[{name!r}]"
    if isinstance(layer, PackedLinear):
        raise UnsupportedModelError(
            f"layer {name!r} is packed in {dtype_name(layer.dtype)} already", f"{UNPACK_REMEDY}, or {keep}"
        )
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    if weight.shape[1] > MOST_INPUTS:
        raise UnsupportedModelError(f"layer {name!r} has {weight.shape[1]} inputs, more than {MOST_INPUTS}", keep)
    if not scale_of(weight.detach()).isfinite().all():
        raise UnsupportedModelError(f"layer {name!r} has weights that are not finite", keep)


logger = logging.getLogger(__name__)

MIN_WEIGHTS = 2**17
"""Layers with fewer weights are left alone: calling the packed kernel takes longer there than it saves."""
INT8 = "int8"

_Model = TypeVar("_Model", bound=nn.Module)
_packing = ForkSafeLock()


def pack(
    model: _Model,
    keep_original: bool = False,
    *,
    weights: str | None = None,
    keep: Sequence[str] | str = (),
    min_weights: int = MIN_WEIGHTS,
) -> _Model:
    """Replace the linear layers of a model by prepacked ones, in place. For inference on the CPU.

    Packed are `nn.Linear` and GPT-2's `Conv1D` in float32, bfloat16 or, where the processor has it, float16. Everything
    else (embeddings, norms, experts that are no linear layers) stays as it is, and so do small layers. A model without
    any layer large enough is returned as it is, and layers that are packed already stay packed.

    A weight that another module holds too, such as a head tied to the embedding, stays where it is: its packed form is
    a second copy. The packed weights must not be changed; `load_state_dict`, a move to another device or dtype, and a
    pass that needs gradients are refused. While it is packed no thread may call the model.

    With `weights="int8"` weights are rounded to int8, each output by its own scale, and inputs token by token: another
    model, a little worse, with half the bytes of 16 bits to read. `unpack` refuses it unless the originals are kept;
    `state_dict` and `save_pretrained` write what the rounded weights stand for, `lade.save_packed` the integers.

    Args:
        model: a model in evaluation mode, on the CPU.
        keep_original: keep the dense weights as the layers' `weight`, at the price of a second copy. By default they
            are freed, layer by layer, and `weight` is a parameter in oneDNN's layout, whose values `weight.to_dense()`
            gives, or in panels for tiles. `state_dict` and `save_pretrained` write dense weights either way.
        weights: "int8", or None for weights in the dtype that they have.
        keep: with int8: names of layers that keep their dtype, and are packed in it. Patterns such as "lm_head" or
            "layers.0.*", for the whole name or the end of it.
        min_weights: number of weights from which on a layer is packed.

    Returns:
        The model itself.

    Raises:
        ConfigError: `weights` is unknown, or no layer has a name in `keep`.
        UnsupportedModelError: a layer, its device, its dtype or the model is of a kind that cannot be packed exactly,
            or this PyTorch has no kernel for it, or, with int8, not an exact one. The model is then as it was.
    """
    with _packing:
        start = perf_counter()
        kinds = packable(model, weights=weights, keep=keep, min_weights=min_weights)
        try:
            pack_layers(model, kinds, keep_original=keep_original)
        finally:  # int8 layers that cannot be undone stay, whatever has happened
            guard(model)
        if kinds:
            logger.info("packed %d layers of %s in %.1f s", len(kinds), type(model).__name__, perf_counter() - start)
    return model


def guard(model: nn.Module) -> None:
    """Protect transformers models with packed layers, also those in a wrapper; a container would call a guard."""
    inside = set[nn.Module]()
    for module in list(model.modules()):  # from the outside in
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            if packed_layers(module):
                Guard.put_into(module)


def pack_layers(
    model: nn.Module,
    kinds: Mapping[Any, type[PackedLinear]],
    *,
    keep_original: bool = False,
    codes: Mapping[Any, Codes] | None = None,
) -> None:
    """Pack these layers of a model, each as what stands beside it.

    Args:
        model: is changed.
        kinds: of its layers.
        keep_original: see `pack`.
        codes: of layers whose int8 weights are known.
    """
    places, shared, done = _places(model), shared_weights(model), list[PackedLinear]()
    common = {"inputs": SharedInputs(), "pages": HugePages()}
    try:
        for layer, kind in kinds.items():
            known: Any = {"codes": (codes or {}).get(layer), **common} if kind is Int8Linear else {}
            packed = kind(layer, keep=keep_original or id(layer.weight) in shared, **known)
            done.append(packed)
            _put(packed, places[layer])
            layer._parameters["weight"] = None  # `packed` has it, or can unpack it
    except BaseException:  # out of memory or Ctrl-C amid the work: no half-packed model remains, if that can be undone
        for packed in done:
            if packed.restorable:
                _put(packed.unpacked(), places[packed.layer])
        raise


def unpack(model: _Model) -> _Model:
    """Undo `pack`, in place: the layers are the ones they were, their weights equal bit for bit, ties included.

    Args:
        model: packed or not.

    Returns:
        The model itself.

    Raises:
        UnsupportedModelError: the model was made invariant, packed as it is; or layers are packed in int8, and what
            they were packed from was not kept; or have hooks, as offloaded ones do. The model is then as it was.
    """
    refuse_invariant(model)
    with _packing:
        _check_restorable(model)
        places_of = _places(model)
        while places_of:  # taken out one by one, so that what is unpacked is freed before the next one
            module, places = places_of.popitem()
            if isinstance(module, PackedLinear):
                _put(module.unpacked(), places)
            elif isinstance(module, Guard):
                for parent, _ in places:
                    Guard.take_out(parent)
    return model


def packed_layers(model: nn.Module) -> int:
    """How many layers of a model are packed."""
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def int8_layers(model: nn.Module) -> int:
    """How many of them are packed in int8."""
    return sum(isinstance(module, Int8Linear) for module in model.modules())


def in_own_dtype(module: nn.Module) -> bool:
    """Whether a module is packed in the dtype that it had."""
    return isinstance(module, PackedLinear) and not isinstance(module, Int8Linear)


def kept_layers(model: nn.Module) -> list[str]:
    """Names of the layers that are packed in their dtype."""
    return [name for name, module in model.named_modules() if in_own_dtype(module)]


def packable(
    model: nn.Module, *, weights: str | None = None, keep: Sequence[str] | str = (), min_weights: int = MIN_WEIGHTS
) -> dict[nn.Module, type[PackedLinear]]:
    """The layers that `pack` would pack, and as what; it computes only small trials of the kernels.

    Args:
        model: is left as it is.
        weights: see `pack`.
        keep: see `pack`.
        min_weights: see `pack`.

    Raises:
        ConfigError, UnsupportedModelError: as `pack` does.
    """
    patterns = _patterns(weights, keep)
    check_model(model)
    kinds: dict[nn.Module, type[PackedLinear]] = {}
    names = {name for name, module in model.named_modules() if isinstance(module, (*UNDERSTOOD, PackedLinear))}
    _check_patterns(patterns, names)
    for name, module in model.named_modules():
        in_int8 = weights is not None and not any(fits(name, pattern) for pattern in patterns)
        if isinstance(module, UNDERSTOOD) and weight_of(module).numel() >= min_weights:
            check_layer(name, module)
            kinds[module] = Int8Linear if in_int8 else PackedLinear
        if in_int8 and (module in kinds or in_own_dtype(module)):
            check_int8_layer(name, module)
    _try_kernels(kinds)
    return kinds


def _try_kernels(kinds: Mapping[nn.Module, type[PackedLinear]]) -> None:
    for dtype in {weight_of(layer).dtype for layer, kind in kinds.items() if kind is PackedLinear}:
        try_kernel(dtype)
    for outputs, inputs in {_shape(layer) for layer, kind in kinds.items() if kind is Int8Linear}:
        input_form(inputs, outputs)


def _shape(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs."""
    first, second = weight_of(layer).shape
    return (second, first) if isinstance(layer, Conv1D) else (first, second)


def _patterns(weights: str | None, keep: Sequence[str] | str) -> list[str]:
    """The patterns of `keep`, checked together with `weights`."""
    if weights not in (None, INT8):
        raise ConfigError("weights", weights, f"give {INT8!r}, or None for the model's own dtype")
    patterns = [keep] if isinstance(keep, str) else list(keep)
    if patterns and weights is None:
        raise ConfigError("keep", patterns, f"without weights={INT8!r} all layers keep their dtype: leave it out")
    return patterns


def _check_patterns(patterns: Sequence[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            some = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError("keep", pattern, f"no linear layer has such a name; their last parts are {some}")


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern of the shell's kind describes the name of a module, or the end of it that follows a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _check_restorable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear) and has_own_forward(module):
            raise UnsupportedModelError(f"layer {name!r} has hooks, of accelerate or of others", HOOKS_REMEDY)
        if isinstance(module, PackedLinear) and not module.restorable:
            raise UnsupportedModelError(
                f"layer {name!r} is packed in int8, and cannot become what it was", RELOAD_REMEDY
            )


def shared_weights(model: nn.Module) -> set[int]:
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
