"""Trial passes on models that the tests do not cover, see `lade.model.registry`; and which lengths they have to exceed.

An attention window, a chunk, the number of keys that sparse attention selects: a check of a short text says nothing
about longer ones. The meaning of an unknown field is unknown too. So every whole number in the configuration counts as
a length unless its name says otherwise, such as a width or a number of layers.

Foreign linear layers are checked by themselves, above all quantised ones: does a pass over several tokens equal plain
passes? Quantised weights do no harm: plain decoding has the same ones. But some layers also round their *inputs*:

- with one scale for all tokens of a pass, or outlier columns determined by any of them: then a token's result depends
  on the drafts beside it;
- with a scale per token: then it does not, but the layer is a step function. The last bits, in which a pass over
  several tokens differs from a pass over one, decide on which step an input lands. After a few layers the difference is
  as large as the steps, thousands of times the rounding error of float32, and most texts diverge.

The class of a layer does not tell: one class serves all schemes of a library. So each layer is tried once.
"""

from __future__ import annotations

import logging
import re
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lade.backends.trials.tree_check import can_be_padded, depends_on_padding, tolerance, training_refusal, worst_error
from lade.model.config import CONTEXT_FIELDS, dtype_name, field, window_lengths
from lade.model.facts import PACKED, ModelFacts, is_invariant, is_tensor_parallel, packed_classes
from lade.model.inputs import plan_for
from lade.model.module_changes import own_class
from lade.model.runner import input_device
from lade.model.supports import TRIALS, Support, has_listed_decoder, takes_masks_by_layer_type

logger = logging.getLogger(__name__)

ROWS, KEPT_ROWS = 16, 4  # number of rows in a trial, and of those that are compared; the others may influence them
LOUD = 1000.0  # factor by which the other rows grow, so that any shared scale or threshold moves by a lot
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
    packed = PACKED.loaded()
    for name, layer in foreign_layers(model, type(model).__module__):
        if packed is not None and isinstance(layer, packed.int8_layer):
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


def foreign_layers(module: nn.Module, home: str, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers not known to be exact: outermost linear layers other than torch's own, and quantised experts.

    Layers of the architecture's own Python module, `home`, are covered by the check of the architecture, unless their
    weights are quantised. Names are qualified.
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


LONGEST_PROBE_TOKENS = 1024  # maximum length that a check exceeds; a model with a longer one is refused
_LENGTH_WORDS = frozenset(
    """
    block blocks bucket buckets chunk chunks context ctx distance extent floor horizon keep keys len length lengths
    limit local mem memory past period recent seq sink sinks span stride tokens topk window windows
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
_SIZE_WORDS = frozenset(
    """
    bits channels classes codebook conv depth dff dim dims embd embedding embeddings factor features ffn filters group
    groups headdim inner iters kernel labels lambda lowrank mlp model multiple norm num patch rank sampling scalar seed
    state theta width
    """.split()  # noqa: SIM905
)
_MODALITIES = frozenset({"audio", "image", "speech", "video", "vision", "visual"})
_NEVER_LENGTHS = _MODALITIES | frozenset(
    "expert experts head heads hidden id ids idx idxs intermediate layer layers vocab".split()  # noqa: SIM905
)
"""Words that rule out a length even in names with a word such as "local" or "window"."""
_READ_ELSEWHERE = CONTEXT_FIELDS | frozenset(
    """
    id2label label2id original_max_position_embeddings quantization_config rope_parameters rope_scaling
    task_specific_params
    """.split()  # noqa: SIM905
)


def named_lengths(model: PreTrainedModel) -> dict[str, int]:
    """Return name and value of every possible length, except for the context length, which `Positions` reads.

    Attributes of modules, whose names are less systematic than those of a configuration, count only if their name says
    that they are a length.
    """
    lengths: dict[str, int] = {}
    known: set[int] = set()
    configs = {id(config): config for config in (model.config, model.config.get_text_config(decoder=True))}
    for path, value in _numbers((), [config.to_dict() for config in configs.values()]):
        if not _READ_ELSEWHERE.isdisjoint(path):
            known.add(value)
        elif _may_be_length(path):
            lengths[path[-1]] = max(value, lengths.get(path[-1], 0))
    for name, value in _attributes([*configs.values(), *model.modules()]):
        if value not in known and _is_length(name):  # rotary embeddings keep copies of known lengths
            lengths[name] = max(value, lengths.get(name, 0))
    return lengths


def _numbers(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield whole numbers with the names of the fields that contain them, innermost last."""
    if isinstance(value, int) and value > 1:  # no bool either
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers((*path, str(key)) if re.search("[a-z]", str(key)) else path, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(path, inner)


def _attributes(things: Iterable[object]) -> Iterator[tuple[str, int]]:
    """Yield whole numbers among the attributes of modules and configurations, and of their classes."""
    for thing in things:
        attributes = dict(ChainMap(vars(thing), *(dict(vars(kind)) for kind in type(thing).__mro__)))
        for name, value in attributes.items():
            yield from ((name, number) for _, number in _numbers((), value) if not isinstance(value, Mapping))


def _may_be_length(path: Sequence[str]) -> bool:
    words = _words(path[-1])
    if any(_words(part) & _MODALITIES for part in path) or words & _NEVER_LENGTHS or path[-1].endswith("token_index"):
        return False
    return bool(words & _LENGTH_WORDS) or not words & _SIZE_WORDS


def _is_length(name: str) -> bool:
    words = _words(name)
    return bool(words & _LENGTH_WORDS) and not words & _NEVER_LENGTHS and name not in _READ_ELSEWHERE


def _words(name: str) -> set[str]:
    return set(re.split("[^a-z0-9]+", name.lower()))


def check(model: PreTrainedModel, config: PretrainedConfig) -> Support:
    """Try the possible mask formats of a model; the first one that is exact is its plan."""
    name, listed = type(model).__name__, has_listed_decoder(model, config)
    lengths = {} if listed else named_lengths(model)
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    if longest and lengths[longest] > LONGEST_PROBE_TOKENS:
        what = f"its {longest} of {lengths[longest]} tokens is too long to be checked"
        return Support(name, f"{what}, and this package does not test it")
    exceeded = window_lengths(config) if listed else lengths.values()
    reach = max((length for length in exceeded if length <= LONGEST_PROBE_TOKENS), default=0)
    findings, formats = list[str](), [True, False] if field(config, "layer_types") else [False]
    for by_layer_type in [takes_masks_by_layer_type(config)] if listed else formats:
        try:
            plan = plan_for(config, by_layer_type=by_layer_type)
            error = worst_error(model, plan, beyond=reach)
        except Exception as problem:  # noqa: BLE001 - any failure of an unknown model is the reason to refuse it
            findings.append(f"{type(problem).__name__}: {problem}".splitlines()[0])
            continue
        if error <= tolerance(model):
            return Support(name, plan=replace(plan, pads=can_be_padded(model, plan)))
        findings.append(f"logits differ by {error:.2g} standard deviations")
    reason = f"a tree pass does not equal plain passes on it ({'; '.join(findings)})"
    return Support(name, reason)


class TrialsBackend:
    """Models that the tests do not cover, see `lade.model.registry`."""

    check = staticmethod(check)
    linear_refusal = staticmethod(linear_refusal)
    training_refusal = staticmethod(training_refusal)
    depends_on_padding = staticmethod(depends_on_padding)


BACKEND = TrialsBackend()
TRIALS.fill(BACKEND)
