"""Methods and settings of a benchmark, their notation (`hf`, `lookahead=15,5,15`) and checks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lade import peers
from lade.config import LookaheadConfig
from lade.decoding.mtp import MOST_PASSES
from lade.drafter import Drafter
from lade.errors import ConfigError, InputError
from lade_lab.results import Method, Settings
from lade_lab.workloads import Workload

_LARGEST_SEED = 2**63 - 1
_MOST_REPEATS = 10_000
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "give a whole number >= 1"),
    "temperature": (lambda value: value is None or 1e-10 <= value <= 1e10, "give a number > 0, from 1e-10 to 1e10"),
    "top_k": (lambda value: value is None or value >= 0, "give a whole number >= 1, or 0 for no limit"),
    "top_p": (lambda value: value is None or 0.0 < value <= 1.0, "give a number > 0 and <= 1"),
    "seeds": (
        lambda value: len(set(value)) == len(value) > 0 and all(0 <= seed <= _LARGEST_SEED for seed in value),
        f"give different whole numbers from 0 to {_LARGEST_SEED}",
    ),
    "repeats": (lambda value: 1 <= value <= _MOST_REPEATS, f"give a whole number >= 1 and <= {_MOST_REPEATS}"),
}


def check_settings(settings: Settings) -> None:
    """Raise `ConfigError` for a value out of its range, or one that nothing would use."""
    for name, (fits, remedy) in _RANGES.items():
        value = getattr(settings, name)
        if not fits(value):
            raise ConfigError(name, value, remedy)
    if settings.temperature is None:
        for name, unused in (("top_k", None), ("top_p", None), ("seeds", [0])):
            value = getattr(settings, name)
            if value != unused:
                raise ConfigError(name, value, "only sampling uses it: give a temperature too, or leave it out")


def check_workloads(workloads: Sequence[Workload]) -> None:
    """Raise `InputError` unless there are workloads, with prompts, and names to tell all of them apart by."""
    names = [workload.record.name for workload in workloads]
    if not names:
        raise InputError("there is no workload: give at least one")
    for workload, name in zip(workloads, names, strict=True):
        if names.count(name) > 1:
            raise InputError(f"two workloads are named {name!r}: rename one of the files")
        if not workload.items:
            raise InputError(f"workload {name!r} has no prompts: give another")
        ids = [item.id for item in workload.items]
        for item in ids:
            if ids.count(item) > 1:
                raise InputError(f"workload {name!r} has several prompts named {item!r}: give each a name of its own")


KINDS = {
    "hf": "model.generate",
    "hf-prompt-lookup": "model.generate with n-grams of the prompt as guesses",
    "hf-assisted": "model.generate with a draft model",
    "plain": "this library's loop, one token a step",
    "jacobi": "plain Jacobi decoding; jacobi=K: with K guesses",
    "prompt-lookup": "n-grams of the text as guesses, all places in one tree; prompt-lookup=B, lookup=B: B tokens fed",
    "suffix": "SuffixDecoding: what followed the ends of the text before; suffix=B: B tokens fed in a step",
    "token-recycling": "Token Recycling: what was likely after a token last time; token-recycling=B: likewise",
    "hf-mtp": "model.generate(use_mtp=True): a chain of the checkpoint's MTP layers",
    "mtp": "a chain of the checkpoint's MTP layer; mtp=K: with K tokens drafted in a step",
    "lookahead": "the paper's method; lookahead=W,N,G: of these sizes",
    "adaptive": "this library's own method; adaptive=B: with B tokens fed in a step",
    "adaptive-warm": "the same, its memory kept across the prompts of a workload",
    "drafter": "adaptive with a lade.Drafter beside the memory; drafter=MODULE:CLASS=B: with B tokens fed in a step",
}
"""Kinds of methods, and what they are."""

FIXED = tuple(f"adaptive={budget}" for budget in (8, 16, 32))
"""Fixed sizes that run by default: the best of them is what the adaptive method has to beat."""
DEFAULT = (
    *("hf", "hf-prompt-lookup", "plain", "jacobi", "prompt-lookup", "suffix", "lookahead"),
    *FIXED,
    *("adaptive", "adaptive-warm"),
)
PEERS: dict[str, Callable[..., Drafter]] = {
    "jacobi": peers.Jacobi,
    "prompt-lookup": peers.PromptLookup,
    "suffix": peers.Suffix,
    "token-recycling": peers.TokenRecycling,
}
"""Methods of others, each of which drafts alone."""
_SHORT = {"lookup": "prompt-lookup"}
TRANSFORMERS = frozenset({"hf", "hf-prompt-lookup", "hf-assisted", "hf-mtp"})
PROMPT_LOOKUP_TOKENS = 10
MTP_DEPTH = 3
"""Tokens that a chain of the MTP layer has by default."""

_SIZES = {
    "jacobi": {"K": "guesses"},
    "lookahead": {"W": "window", "N": "ngram", "G": "guesses"},
    **{kind: {"B": "budget"} for kind in ("prompt-lookup", "suffix", "token-recycling")},
    "mtp": {"K": "depth"},
    "adaptive": {"B": "budget"},
    "adaptive-warm": {"B": "budget"},
}
"""Parameters allowed after the equals sign, by letter."""

_DRAW_OTHERWISE = frozenset({"hf-prompt-lookup", "hf-assisted", "hf-mtp"})


def parse(text: str) -> Method:
    """The method that a text names.

    >>> parse("lookahead=15,5,15").config
    {'window': 15, 'ngram': 5, 'guesses': 15}

    Raises:
        ConfigError: there is no such kind, or its sizes are not valid.
    """
    kind, given, sizes = (part.strip() for part in text.partition("="))
    kind = _SHORT.get(kind, kind)
    if kind == "drafter":
        return _drafter_method(sizes)
    if kind not in KINDS:
        raise ConfigError("methods", text, f"give one of {', '.join(KINDS)}")
    if not given:
        return Method(kind, kind, _settled(kind, {}))
    names, parts = _SIZES.get(kind, {}), [part.strip() for part in sizes.split(",")]
    if len(parts) != len(names) or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ConfigError(
            "methods", text, f"write {kind}={','.join(names)} with whole numbers" if names else f"write {kind}"
        )
    values = dict(zip(names.values(), map(int, parts), strict=True))
    try:
        config = _settled(kind, values)
    except ConfigError as problem:  # about a field, which is a letter here
        letter = next(letter for letter, field in names.items() if field == problem.field)
        remedy = f"{letter}={problem.value}: {problem.remedy.removesuffix(', or None')}"
        raise ConfigError("methods", text, remedy) from problem
    return Method(f"{kind} {','.join(map(str, values.values()))}", kind, config)


def _drafter_method(text: str) -> Method:
    """Return the method that `MODULE:CLASS` or `MODULE:CLASS=B` names; the class is imported."""
    place, given, size = (part.strip() for part in text.partition("="))
    if given and not (size.isascii() and size.isdigit() and len(size) < 10):
        raise ConfigError("drafter", text, "write MODULE:CLASS or MODULE:CLASS=B with B tokens fed in a step")
    budget = int(size) if given else None
    LookaheadConfig(budget=budget, sources=[load_drafter(place)])
    name = place.rpartition(":")[2]
    return Method(f"{name} {budget}" if given else name, "drafter", {"drafter": place, "budget": budget})


def load_drafter(place: str) -> Drafter:
    """Import and make the drafter that `MODULE:CLASS` names; the current folder is searched first.

    Raises:
        ConfigError: it cannot be imported, or made without arguments.
    """
    module, _, name = place.partition(":")
    if not module or not name:
        raise ConfigError("drafter", place, "write MODULE:CLASS, such as my_drafts:MyDrafter")
    sys.path.insert(0, os.getcwd())
    try:
        made: Drafter = getattr(importlib.import_module(module), name)()
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise ConfigError("drafter", place, f"give a class that is made without arguments ({reason})") from problem
    finally:
        sys.path.pop(0)
    return made


def parse_all(texts: Sequence[str], *, sampling: bool = False, draft: bool = False) -> list[Method]:
    """The methods that several texts name.

    Args:
        texts: each may name several, with commas between them.
        sampling: whether tokens are drawn. Transformers' assisted methods then draw otherwise than `model.generate`
            does, from the same distribution, so that their texts are not compared.
        draft: whether there is a draft model.

    Raises:
        ConfigError: as `parse` does; or none is named, one is named twice, or `hf-assisted` lacks its draft model.
    """
    methods = [parse(text) for line in texts for text in _split(line)]
    names = [method.name for method in methods]
    if not methods:
        raise ConfigError("methods", ",".join(texts), f"give some of {', '.join(KINDS)}")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("methods", ",".join(texts), f"{name} is named twice: name it once")
    if any(method.kind == "hf-assisted" for method in methods) != draft:
        value = ",".join(texts)
        remedy = "only hf-assisted uses a draft model: name it too" if draft else "hf-assisted needs --draft MODEL"
        raise ConfigError("methods", value, remedy)
    return [replace(method, compared=not (sampling and method.kind in _DRAW_OTHERWISE)) for method in methods]


def reference_of(methods: Sequence[Method]) -> Method:
    """The one that all others are compared with: `hf`, else `plain`, else the first.

    Raises:
        ConfigError: only methods are left that draw otherwise than all others.
    """
    comparable = [method for method in methods if method.compared]
    for kind in ("hf", "plain"):
        for method in comparable:
            if method.kind == kind:
                return method
    if not comparable:
        raise ConfigError("methods", ",".join(m.name for m in methods), "when sampling, add one such as hf or plain")
    return comparable[0]


def _settled(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """All sizes of a method, checked."""
    match kind:
        case "hf-prompt-lookup":
            return {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        case "hf-mtp":
            return {"use_mtp": True}
        case "mtp":
            depth = sizes.get("depth", MTP_DEPTH)
            if not 1 <= depth <= MOST_PASSES:
                raise ConfigError("depth", depth, f"give a whole number >= 1 and <= {MOST_PASSES}")
            return {"depth": depth}
        case _ if kind in PEERS:
            made, field = PEERS[kind](**sizes), next(iter(_SIZES[kind].values()))
            return {field: getattr(made, field)}
        case "lookahead":
            config = LookaheadConfig(**sizes, adaptive=False)
            return {"window": config.window, "ngram": config.ngram, "guesses": config.guesses}
        case "adaptive" | "adaptive-warm":
            return {"budget": LookaheadConfig(**sizes, adaptive=True).budget}
    return {}


def _split(line: str) -> list[str]:
    """At the commas between methods, not at those between the sizes of one."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in line.split(","))):
        if part.isdigit() and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found
