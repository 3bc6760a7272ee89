"""Which arguments a model's `forward` takes, also where it was replaced by a wrapper that takes any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params")
"""What models call the argument that takes their cache; the latter those whose layers are all recurrent."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Arguments(NamedTuple):
    """Names that a function gives its arguments, and whether it takes others, too."""

    names: frozenset[str]
    takes_any: bool


_known: WeakKeyDictionary[Callable[..., Any], _Arguments] = WeakKeyDictionary()


def accepted(model: PreTrainedModel) -> frozenset[str]:
    """Arguments that can be passed to `forward` by name and mean something there.

    Those that it names itself; and if it takes any (`**kwargs`), as tracers and profilers do, those that the class, one
    of its bases, or the base model names. Whether they arrive is for the check of the model to find out.
    """
    own = _arguments(model.forward)
    return own.names.union(*(_arguments(forward).names for forward in _forwards(model))) if own.takes_any else own.names


def cache_name(model: PreTrainedModel) -> str | None:
    """What the model calls the argument that takes its cache; None where it is none of the names that we know."""
    names = accepted(model)
    return next((name for name in CACHE_NAMES if name in names), None)


def _forwards(model: PreTrainedModel) -> Iterator[Callable[..., Any]]:
    """All that a wrapper may hand its arguments on to."""
    for module in (model, model.base_model):
        yield from (vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))


def _arguments(forward: Callable[..., Any]) -> _Arguments:
    """Those of a function, or of the function behind a method, `self` included; read once, which takes a while."""
    function = getattr(forward, "__func__", forward)
    try:
        found = _known.get(function)
    except TypeError:  # what is no function may not be hashed, or not be held weakly
        return _read(function)
    if found is None:
        found = _known[function] = _read(function)
    return found


def _read(function: Callable[..., Any]) -> _Arguments:
    parameters = inspect.signature(function).parameters.values()
    names = frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)
    return _Arguments(names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters))
