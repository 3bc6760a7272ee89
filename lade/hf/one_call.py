"""What is on a model only while one call of `model.generate` runs, and how it comes off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lade.errors import LadeError, UnsupportedArgumentError
from lade.hf.generation_fields import ALWAYS, SAMPLING, Nonsense, nonsense_in
from lade.model.support.adapters import remove_hooks_of_one_call, values_of_one_call
from lade.model.support.supports import unwrap

P = ParamSpec("P")
T = TypeVar("T")
OF_ADAPTERS = ("adapter_names", "alora_offsets", "task_ids")
REMEDY = "choose the adapter with set_adapter, or use lade.generate"


def refuse_values_of_one_call(arguments: dict[str, Any], where: str) -> None:
    """Raise `UnsupportedArgumentError` for arguments that act only while `model.generate` runs.

    Args:
        arguments: of `model.generate`, which here returns before the first pass.
        where: what decodes then.
    """
    for name in OF_ADAPTERS:
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(
                f"{name} cannot be used with {where}: PEFT applies it only while model.generate runs", REMEDY
            )


def refuse_hooks_of_one_call(model: PreTrainedModel, where: str) -> None:
    """Raise `UnsupportedArgumentError` where PEFT has hooks of one generation on the model; see above."""
    refuse_values_of_one_call(dict.fromkeys(values_of_one_call(model), True), where)


def guarded(call: Callable[P, T]) -> Callable[P, T]:
    """Clean up after a call that raises; the model is its first argument. See `clean_up`."""

    @functools.wraps(call)
    def guard(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as problem:
            clean_up(args[0] if args else kwargs.get("model"), problem, kwargs.get("generation_config"))
            raise

    return guard


def clean_up(model: Any, problem: BaseException, given: object) -> None:
    """Take PEFT's hooks of one generation off a model, and tell what transformers has stumbled over.

    Args:
        model: of a generation that has failed.
        problem: gets a note if a field of a generation_config is nonsense, which transformers mostly does not name.
        given: the generation_config that was an argument, if one was.
    """
    model = unwrap(model)
    if isinstance(model, nn.Module):
        remove_hooks_of_one_call(model)
    if isinstance(problem, LadeError):
        return
    for config in (given, getattr(model, "generation_config", None)):
        wrong = _nonsense_in(config) if isinstance(config, GenerationConfig) else None
        if wrong and f"the generation_config has {wrong}" not in getattr(problem, "__notes__", ()):
            problem.add_note(f"the generation_config has {wrong}")


def _nonsense_in(config: GenerationConfig) -> Nonsense | None:
    return nonsense_in(config.to_dict(), ALWAYS, SAMPLING if config.do_sample else {})
