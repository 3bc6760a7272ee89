"""Which arguments a model's `forward` takes, also where it was replaced by a wrapper that takes any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params")
"""What models call the argument that takes their cache; the latter those whose layers are all recurrent."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_read: WeakKeyDictionary[Callable[..., Any], list[inspect.Parameter]] = WeakKeyDictionary()


def accepted(model: PreTrainedModel) -> frozenset[str]:
    """Arguments that can be passed to `forward` by name and mean something there.

    Those that it names itself; and if it takes any (`**kwargs`), as tracers and profilers do, those that the class, one
    of its bases, or the base model names. Whether they arrive is for the check of the model to find out.
    """
    own = _parameters(model.forward)
    names = _named(own)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own):
        for forward in _forwards(model):
            names |= _named(_parameters(forward))
    return frozenset(names)


def cache_name(model: PreTrainedModel) -> str | None:
    """What the model calls the argument that takes its cache; None where it is none of the names that we know."""
    names = accepted(model)
    return next((name for name in CACHE_NAMES if name in names), None)


def _forwards(model: PreTrainedModel) -> Iterator[Callable[..., Any]]:
    """All that a wrapper may hand its arguments on to."""
    for module in (model, model.base_model):
        yield from (vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))


def _parameters(forward: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Those of a function, or of the function behind a method, `self` included; read once, which takes a while."""
    function = getattr(forward, "__func__", forward)
    try:
        found = _read.get(function)
    except TypeError:  # what is no function may not be hashed, or not be held weakly
        return list(inspect.signature(function).parameters.values())
    if found is None:
        found = _read[function] = list(inspect.signature(function).parameters.values())
    return found


def _named(parameters: Sequence[inspect.Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
