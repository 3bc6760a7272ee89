"""Trial passes on models that the tests do not cover, see `lade.model.registry`; and which lengths they have to exceed.

An attention window, a chunk, the number of keys that sparse attention selects: a check of a short text says nothing
about longer ones. The meaning of an unknown field is unknown too. So every whole number in the configuration counts as
a length unless its name says otherwise, such as a width or a number of layers.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from lade.backends.trials.linear_check import linear_refusal
from lade.backends.trials.tree_check import can_be_padded, depends_on_padding, tolerance, training_refusal, worst_error
from lade.model.config import CONTEXT_FIELDS, field
from lade.model.masks import plan_for
from lade.model.supports import TRIALS, Support, has_listed_decoder, takes_masks_by_layer_type

LONGEST_PROBE_TOKENS = 1024
"""Maximum length that a check exceeds; a model with a longer one is refused."""
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
    lengths = _windows(config) if listed else named_lengths(model)
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    if longest and lengths[longest] > LONGEST_PROBE_TOKENS and not listed:
        what = f"its {longest} of {lengths[longest]} tokens is too long to be checked"
        return Support(name, f"{what}, and this package does not test it")
    reach = max((length for length in lengths.values() if length <= LONGEST_PROBE_TOKENS), default=0)
    findings = []
    for by_layer_type in _mask_formats(config, listed=listed):
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


def _windows(config: PretrainedConfig) -> dict[str, int]:
    """Return the window and chunk sizes of a listed architecture."""
    values = {name: field(config, name) for name in ("sliding_window", "attention_chunk_size")}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _mask_formats(config: PretrainedConfig, *, listed: bool) -> Sequence[bool]:
    """Return the candidates for `by_layer_type`."""
    if listed:
        return (takes_masks_by_layer_type(config),)
    return (True, False) if field(config, "layer_types") else (False,)


class TrialsBackend:
    """Models that the tests do not cover, see `lade.model.registry`."""

    check = staticmethod(check)
    linear_refusal = staticmethod(linear_refusal)
    training_refusal = staticmethod(training_refusal)
    depends_on_padding = staticmethod(depends_on_padding)


BACKEND = TrialsBackend()
TRIALS.fill(BACKEND)
