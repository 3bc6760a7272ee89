"""What is on a model only while one call of `model.generate` runs, and how it comes off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lade.errors import LadeError, UnsupportedArgumentError
from lade.hf.generation_fields import ALWAYS, SAMPLING, Nonsense, nonsense_in
from lade.model.support.adapters import remove_hooks_of_one_call, values_of_one_call
from lade.model.support.supports import unwrap

OF_ADAPTERS = ("adapter_names", "alora_offsets", "task_ids")
REMEDY = "choose the adapter with set_adapter, or use lade.generate"


def refuse_values_of_one_call(arguments: dict[str, Any], where: str) -> None:
    """Raise `UnsupportedArgumentError` for arguments that act only while `model.generate` runs.

    Args:
        arguments: arguments of `model.generate`, which here returns before the first pass.
        where: the function or class that decodes then, for the message.
    """
    for name in OF_ADAPTERS:
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(
                f"{name} cannot be used with {where}: PEFT applies it only while model.generate runs", REMEDY
            )


def refuse_hooks_of_one_call(model: PreTrainedModel, where: str) -> None:
    """Raise `UnsupportedArgumentError` where PEFT has hooks of one generation on the model."""
    refuse_values_of_one_call(dict.fromkeys(values_of_one_call(model), True), where)


@contextmanager
def cleaning_up(model: Any, generation_config: object) -> Iterator[None]:
    """Clean up after a block that raises; see `clean_up`."""
    try:
        yield
    except BaseException as problem:
        clean_up(model, problem, generation_config)
        raise


def clean_up(model: Any, problem: BaseException, given: object) -> None:
    """Take PEFT's hooks of one generation off a model, and note what transformers stumbled over.

    Args:
        model: the model whose generation has failed.
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
