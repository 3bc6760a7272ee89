"""Checks of foreign linear layers, above all quantised ones: does a pass over several tokens equal plain passes?

Quantised weights do no harm: plain decoding has the same ones. But some layers also round their *inputs*:

- with one scale for all tokens of a pass, or outlier columns determined by any of them: then a token's result depends
  on the drafts beside it;
- with a scale per token: then it does not, but the layer is a step function. The last bits, in which a pass over
  several tokens differs from a pass over one, decide on which step an input lands. After a few layers the difference is
  as large as the steps, thousands of times the rounding error of float32, and most texts diverge.

The class of a layer does not tell: one class serves all schemes of a library. So each layer is tried once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from math import isqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from lade.model.config import dtype_name
from lade.model.facts import PACKED, ModelFacts, is_invariant, is_tensor_parallel, packed_classes
from lade.model.module_changes import own_class
from lade.model.runner import input_device

logger = logging.getLogger(__name__)

ROWS, KEPT_ROWS = 16, 4
"""Number of rows in a trial, and of those that are compared; the others may influence them."""
LOUD = 1000.0
"""Factor by which the other rows grow, so that any shared scale or threshold moves by a lot."""
SUMS, MULTIPLE = 6, 1.5
"""Number of sums tried, and the factor: not a power of two, with which the steps of float8 would grow."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 6e-3
"""Relative errors. Float32 rounds by 1e-6, bfloat16 by 0.002 to 0.004; inputs of eight bits miss by 0.008 where there
are 32 of them, and by more where there are more."""

WEIGHTS_ONLY = frozenset({"Mxfp4GptOssExperts", "ParametrizationList"})
"""Modules with quantised weights that do not round their inputs."""
REMEDY = "quantise the weights only"
INTEGER_REMEDY = (
    "which magnifies the rounding differences of attention: call lade.invariant(model), or add --invariant in the shell"
)

Layer = Callable[[torch.Tensor], torch.Tensor]

_tried: WeakKeyDictionary[nn.Module, tuple[Hashable, str]] = WeakKeyDictionary()


def linear_refusal(facts: ModelFacts) -> str:
    """Return why a layer gives a token in a tree another result than alone; empty if no layer does.

    A layer is tried again after its weight was replaced.
    """
    model: PreTrainedModel = facts.model
    for name, layer in foreign_layers(model, type(model).__module__):
        if _is_integer(layer):
            if not is_invariant(model):
                return f"its layer {name!r} is packed in {layer.WEIGHTS} and rounds its inputs, {INTEGER_REMEDY}"
            continue  # equal inputs give equal outputs, bit for bit
        weight = getattr(layer, "weight", None)
        state = (id(weight), type(weight), model.dtype)
        known, reason = _tried.get(layer, (None, ""))
        if known != state:
            reason = _trial_refusal(layer, model)
            _tried[layer] = (state, reason)
            logger.debug("tried the layer %r (%s): %s", name, _kind(layer), reason or "supported")
        if reason:
            return f"its layer {name!r} ({_kind(layer)}) {reason}"
    return ""


def _is_integer(layer: nn.Module) -> bool:
    packed = PACKED.loaded()
    return packed is not None and isinstance(layer, packed.int8_layer)


def foreign_layers(module: nn.Module, home: str, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers not known to be exact: outermost linear layers other than torch's own, and quantised experts.

    Args:
        module: the module to search.
        home: name of the architecture's Python module. Its own layers are covered by the check of the architecture,
            unless their weights are quantised.
        name: qualified name of the module.
    """
    if _is_known(module, home):
        return
    if _is_linear(module) or _hides_quantised(module):
        yield name, module
        return
    for child_name, child in module._modules.items():
        if child is not None:
            yield from foreign_layers(child, home, f"{name}.{child_name}" if name else child_name)


def _is_known(module: Any, home: str) -> bool:
    kind = own_class(module)
    if kind in packed_classes() or _has(module, "num_embeddings"):  # embeddings only look up
        return True
    part = kind.__module__ == home or kind.__module__.startswith("transformers.models.")
    if kind is not nn.Linear and not (part and isinstance(module, nn.Linear)):
        return False
    forward = vars(module).get("_old_forward") or vars(module).get("forward")  # the former is under accelerate's hooks
    own = forward is not None and getattr(forward, "__func__", None) is not kind.forward
    own = own and not is_tensor_parallel(forward)  # which computes a shard of the same product
    return _is_dense(module.weight) and not own


def _is_linear(module: nn.Module) -> bool:
    """Return whether it has the attributes that all linear layers share; adapters are searched instead."""
    return _has(module, "in_features") and isinstance(module.in_features, int) and "base_layer" not in module._modules


def _has(module: nn.Module, name: str) -> bool:
    """Return `hasattr`, without its slow path for missing attributes of modules."""
    return name in vars(module) or hasattr(type(module), name)


def _hides_quantised(module: nn.Module) -> bool:
    matrices = (weight for weight in module._parameters.values() if weight is not None and weight.dim() > 1)
    return type(module).__name__ not in WEIGHTS_ONLY and not all(map(_is_dense, matrices))


def _is_dense(weight: torch.Tensor) -> bool:
    """Return whether a weight simply holds its values, even if sharded over devices."""
    kind = type(weight.data)
    ordinary = kind is torch.Tensor or kind.__module__.startswith("torch.distributed.")
    return ordinary and weight.dtype.itemsize > 1


def _kind(layer: nn.Module) -> str:
    weight = getattr(layer, "weight", None)
    wrapped = isinstance(weight, torch.Tensor) and not _is_dense(weight)
    return type(layer).__name__ + (f" of {type(weight).__name__}" if wrapped else "")


def _trial_refusal(layer: Any, model: PreTrainedModel) -> str:
    """Return why a layer is not supported, as a phrase that continues its name; empty if it is."""
    if not _is_linear(layer):
        return f"has quantised weights and cannot be tried by itself: {REMEDY} of linear layers"
    device = next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), torch.device("meta"))
    device = input_device(model) if device.type == "meta" else device
    try:
        return _reason_of_trial(layer, layer.in_features, model.dtype, device)
    except Exception as problem:  # noqa: BLE001 - any failure of an unknown layer is the reason to refuse it
        return f"cannot be tried: {type(problem).__name__}: {problem}".splitlines()[0]


@torch.no_grad()
def _reason_of_trial(layer: Any, features: int, dtype: torch.dtype, device: torch.device) -> str:
    def call(rows: torch.Tensor) -> torch.Tensor:
        output = layer(rows[None].to(device, dtype))
        if not isinstance(output, torch.Tensor) or output.shape[:-1] != (1, len(rows)):
            raise TypeError(f"it made {type(output).__name__} of one tensor")
        return output[0].double()  # [T, out]

    if _sees_other_rows(call, features):
        return f"gives a token another result beside other tokens: {REMEDY}"
    error = _linearity_error(call, features)
    if not error <= HALF_TOLERANCE:
        return f"rounds its inputs (by {error:.1g} of their size), which magnifies other rounding errors: {REMEDY}"
    if dtype.itemsize > 2 and error > TOLERANCE:
        remedy = "load it with dtype=torch.bfloat16 or float16"
        return f"computes in 16 bits, and the model is in {dtype_name(dtype)}: {remedy}"
    return ""


def _sees_other_rows(call: Layer, features: int) -> bool:
    """Return whether rows change when others do. Most layers keep them bit-identical, as the kernel is the same."""
    quiet = torch.randn(ROWS, features, generator=torch.Generator().manual_seed(0))
    loud = quiet.clone()
    loud[KEPT_ROWS:] *= LOUD
    first, changed = (call(rows)[:KEPT_ROWS] for rows in (quiet, loud))
    return not _rms(changed - first) <= TOLERANCE * _rms(first)


def _linearity_error(call: Layer, features: int) -> float:
    """Return the deviation from linearity, and of one row from the same row among others, relative to their size.

    In x one input is as large as all of y's together, so x + y has another scale than y. That reveals scales derived
    from each token; a multiple reveals those fixed beforehand. Inputs have six significant bits, so that the multiple
    has no more than bfloat16's eight.
    """
    generator = torch.Generator().manual_seed(1)
    mantissas, exponents = torch.frexp(torch.randn(SUMS, features, generator=generator))
    y = torch.ldexp((64 * mantissas).round() / 64, exponents)
    place = torch.randint(features, (SUMS, 1), generator=generator)
    x = torch.zeros_like(y).scatter_(1, place, float(isqrt(features)))
    y = y.scatter_(1, place, 0.0)
    rows = torch.cat([x + y, x, y, MULTIPLE * (x + y), torch.zeros(1, features)])
    *outputs, bias = call(rows).split([SUMS] * 4 + [1])
    both, of_x, of_y, multiple = (output - bias for output in outputs)
    one = call(rows[:1]) - bias
    size = _rms(both)
    error = max(_rms(both - of_x - of_y), _rms(multiple / MULTIPLE - both), _rms(one - both[:1]))
    return error / size if size else error


def _rms(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()
