"""Code of others on a model: forwards that were replaced, hooks, and modules that are not transformers' own.

What the tests say about a listed architecture holds for transformers' own code. A tracer, a profiler, a kernel library
or a user's hook may swallow the positions of a tree, or look at the last token of a pass only. So a model that carries
such code is checked like one of an unknown architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.model.survey import Survey

TRUSTED = frozenset({"accelerate", "lade", "peft", "torch", "transformers"})
"""Packages whose wrappers and hooks hand on what they are given."""
_METHODS = ("forward", "prepare_inputs_for_generation")


def foreign_code(survey: Survey) -> list[Any]:
    """Functions, hooks and classes that take part in a pass of a model and come from none of the trusted packages.

    So do configurations that are not the model's: what is read in that one, a layer may not go by. Linear layers of
    other makes are none of them, as each is tried by itself.
    """
    model: PreTrainedModel = survey.model
    config = model.config.get_text_config(decoder=True)
    found = [*_attention_of(config), *_hooks(vars(torch_module), "_global_forward_hooks", "_global_forward_pre_hooks")]
    found.extend(vars(model).get(name) for name in _METHODS)
    for state in map(vars, (*survey.replaced, *survey.hooked)):
        found.extend((state.get("forward"), state.get("_hf_hook")))  # the latter is called by accelerate's forward
        found.extend(_hooks(state, "_forward_hooks", "_forward_pre_hooks"))
    kinds = survey.kinds
    found.extend(_of_classes([kind for kind in kinds if _is_trusted(kind) or not _is_tried_by_itself(kinds[kind][0])]))
    configs = (vars(module).get("config") for module in survey.modules)
    strays = [own for own in configs if isinstance(own, PretrainedConfig) and own is not config]
    return strays + [thing for thing in found if thing is not None and not _is_trusted(thing)]


def _of_classes(kinds: Sequence[type]) -> Iterator[Any]:
    """The classes, and their methods: these may have been replaced in classes of trusted packages."""
    yield from kinds
    for base in dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds)):
        yield from (vars(base).get(name) for name in _METHODS)


def _attention_of(config: PretrainedConfig) -> Iterator[Any]:
    """The functions of the attention implementation."""
    yield ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    yield torch.nn.functional.scaled_dot_product_attention


def _hooks(state: Mapping[str, Any], *tables: str) -> Iterator[Any]:
    return chain.from_iterable(state[table].values() for table in tables)


def _is_tried_by_itself(module: nn.Module) -> bool:
    """Whether it is a linear layer, or an embedding, which only looks up."""
    return hasattr(module, "in_features") or hasattr(module, "num_embeddings")


def _is_trusted(thing: Any) -> bool:
    """Whether a class or a callable is defined in a trusted package, and so is all that it wraps."""
    if type(thing) is FunctionType and not thing.__dict__:  # most are
        return str(thing.__globals__.get("__name__")).partition(".")[0] in TRUSTED
    return _home(thing).partition(".")[0] in TRUSTED and all(map(_is_trusted, _wrapped_by(thing)))


def _home(thing: Any) -> str:
    """The module that defines it. A function may bear the name of another one's module (`functools.wraps`)."""
    match thing:
        case partial():
            return _home(thing.func)
        case MethodType():
            return _home(thing.__func__)
        case FunctionType():
            return str(thing.__globals__.get("__name__"))
        case type() | BuiltinFunctionType():
            return str(thing.__module__)
    return type(thing).__module__


def _wrapped_by(thing: Any) -> Iterator[Any]:
    """What a callable hands its arguments on to, as far as it says so."""
    if isinstance(thing, type):
        return
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if type(thing).__module__ == "accelerate.hooks":
        yield from getattr(thing, "hooks", ())  # of a SequentialHook
    if hasattr(thing, "__wrapped__"):
        yield thing.__wrapped__
