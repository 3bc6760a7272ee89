"""Validation of a `generation_config`, and removal of PEFT's per-call hooks when generation fails.

Transformers reports some invalid fields when it loads a config, and most of them deep inside a generation. Values that
it tolerates, such as -1 for a token that does not exist, are accepted here too.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lade.errors import LadeError, UnsupportedArgumentError
from lade.model.facts import adapters_backend
from lade.model.supports import unwrap


@dataclass(frozen=True)
class InvalidField:
    """A field with an invalid value.

    Attributes:
        field: name of the field.
        value: the value found.
        remedy: what to give instead.
    """

    field: str
    value: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={reprlib.repr(self.value)}: {self.remedy}"


Fits = Callable[[Any], bool]


def is_whole(value: object, least: float = -math.inf) -> bool:
    """Return whether a value is a whole number >= `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, above: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a value is a finite number > `above` and <= `most`."""
    whole_or_not = isinstance(value, int | float) and not isinstance(value, bool)
    return whole_or_not and math.isfinite(value) and above < value <= most  # type: ignore[arg-type, operator]


def _is_id(value: object) -> bool:
    return is_whole(value)


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_id, value))


def _is_id_or_are_ids(value: object) -> bool:
    return _is_id(value) or _are_ids(value)


def _are_words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_word(word) for word in value)


def _is_word(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_whole(token, 0) for token in value)


def _are_biases(value: object) -> bool:
    pairs = isinstance(value, list) and bool(value) and all(isinstance(it, list) and len(it) == 2 for it in value)
    return pairs and all(_is_word(word) and isinstance(bias, float) for word, bias in value)  # type: ignore[attr-defined]


def _is_decay(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and is_whole(value[0]) and is_number(value[1], 0)


def _is_off(value: object) -> bool:
    return not value


_ID = (_is_id, "give the id of a token, or null")
_IDS = (_is_id_or_are_ids, "give the id of a token, or a list of them")
_LIST = (_are_ids, "give a list of ids")
_WHOLE = (is_whole, "give a whole number")
_FACTOR = (lambda value: is_number(value, 0), "give a number > 0; 1 changes nothing")
_COUNT = (lambda value: is_whole(value, 1), "give a whole number >= 1")
_SHARE = (lambda value: is_number(value, 0, 1), "give a number > 0 and <= 1")
_NUMBER = (is_number, "give a number")
_CONSTRAINED = (_is_off, "leave it out: transformers has no constrained beam search any more")

ALWAYS: dict[str, tuple[Fits, str]] = {
    "eos_token_id": _IDS,
    "pad_token_id": _ID,
    "bos_token_id": _ID,
    "decoder_start_token_id": _IDS,
    "forced_bos_token_id": _ID,
    "forced_eos_token_id": _IDS,
    "suppress_tokens": _LIST,
    "begin_suppress_tokens": _LIST,
    "bad_words_ids": (_are_words, "give a list of lists of ids, such as [[5, 7]], or leave it out"),
    "sequence_bias": (_are_biases, "give a list of pairs such as [[[5, 7], -2.0]], or leave it out"),
    "repetition_penalty": _FACTOR,
    "encoder_repetition_penalty": _FACTOR,
    "no_repeat_ngram_size": _WHOLE,
    "encoder_no_repeat_ngram_size": _WHOLE,
    "min_length": _WHOLE,
    "min_new_tokens": _WHOLE,
    "prefill_chunk_size": _COUNT,
    "exponential_decay_length_penalty": (_is_decay, "give a pair such as [20, 1.05], or leave it out"),
    "guidance_scale": _NUMBER,
    "token_healing": (_is_off, "leave it out: it needs a tokenizer as an argument of generate"),
    "is_assistant": (_is_off, "leave it out: it is for models that draft for others"),
    "constraints": _CONSTRAINED,
    "force_words_ids": _CONSTRAINED,
}
"""Fields that any generation uses: a predicate for valid values, and the remedy. None means "not set"."""
LOADING: dict[str, tuple[Fits, str]] = {
    "max_new_tokens": _COUNT,
    "num_return_sequences": _COUNT,
    "early_stopping": (lambda value: isinstance(value, bool) or value == "never", 'give true, false or "never"'),
    "watermarking_config": (lambda value: isinstance(value, dict), "give an object, or leave it out"),
    "compile_config": (lambda value: isinstance(value, dict), "give an object, or leave it out"),
}
"""Fields with which transformers fails to load the config if they are invalid."""
SAMPLING: dict[str, tuple[Fits, str]] = {
    "temperature": (lambda value: is_number(value, 0), "give a number > 0"),
    "top_k": (lambda value: is_whole(value, 0), "give a whole number >= 1, or 0 for no limit"),
    "top_p": _SHARE,
    "min_p": (lambda value: is_number(value, most=1) and value >= 0, "give a number from 0 to 1"),
    "typical_p": (lambda value: is_number(value, 0), "give a number > 0; 1 changes nothing"),
    "top_h": _SHARE,
    "epsilon_cutoff": _NUMBER,
    "eta_cutoff": _NUMBER,
}
"""Fields that only sampling uses."""
BEAMS: dict[str, tuple[Fits, str]] = {"length_penalty": _NUMBER, "early_stopping": LOADING["early_stopping"]}
"""Fields that only beam search uses."""
_EOS_FIELDS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
_ID_FIELDS = ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id")


def find_invalid(
    values: Mapping[str, Any], *tables: Mapping[str, tuple[Fits, str]], vocabulary: int | None = None
) -> InvalidField | None:
    """Return the first field with an invalid value; None if all are valid.

    Args:
        values: values by field name; None means "not set".
        tables: tables of this module to check against.
        vocabulary: vocabulary size, to check ids against; None if unknown.
    """
    for table in tables:
        for field, (fits, remedy) in table.items():
            value = values.get(field)
            if value is None:
                continue
            if not fits(value):
                return InvalidField(field, value, remedy)
            if field in _ID_FIELDS and vocabulary is not None and max(_ids_in(value), default=0) >= vocabulary:
                return InvalidField(field, value, f"give ids below {vocabulary}, the size of the vocabulary")
    return _invalid_eos(values, vocabulary) if ALWAYS in tables else None


def _invalid_eos(values: Mapping[str, Any], vocabulary: int | None) -> InvalidField | None:
    """Check for ids that end no text, which are invalid only if another field uses their scores."""
    ends = list(_ids_in(values.get("eos_token_id")))
    remedy = "leave out {}, or give ids of the vocabulary"
    for field in _EOS_FIELDS:
        if values.get(field) and min(ends, default=0) < 0:
            return InvalidField("eos_token_id", values["eos_token_id"], remedy.format(field))
    beyond = vocabulary is not None and max(ends, default=0) >= vocabulary
    if values.get("exponential_decay_length_penalty") and beyond:
        return InvalidField("eos_token_id", values["eos_token_id"], remedy.format("exponential_decay_length_penalty"))
    return None


def _ids_in(value: object) -> Iterable[int]:
    """Return all whole numbers in a nested value."""
    if isinstance(value, list | tuple):
        return [token for part in value for token in _ids_in(part)]
    return [value] if isinstance(value, int) else []


ADAPTER_ARGUMENTS = ("adapter_names", "alora_offsets", "task_ids")
REMEDY = "choose the adapter with set_adapter, or use lade.generate"


def refuse_adapter_arguments(arguments: dict[str, Any], where: str) -> None:
    """Raise `UnsupportedArgumentError` for arguments that PEFT applies only while `model.generate` runs.

    Args:
        arguments: arguments of `model.generate`, which returns before the first pass here.
        where: name of the function or class that decodes afterwards, for the error message.
    """
    for name in ADAPTER_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(
                f"{name} cannot be used with {where}: PEFT applies it only while model.generate runs", REMEDY
            )


def refuse_adapter_hooks(model: PreTrainedModel, where: str) -> None:
    """Raise `UnsupportedArgumentError` if PEFT's per-call hooks are installed on the model."""
    adapters = adapters_backend()
    if adapters is not None:
        refuse_adapter_arguments(dict.fromkeys(adapters.call_values(model), True), where)


def clean_up(model: Any, problem: BaseException, given: object) -> None:
    """Remove PEFT's per-call hooks from a model, and add a note about an invalid generation_config to the error.

    Args:
        model: the model whose generation has failed.
        problem: the error, which mostly does not name the invalid field itself.
        given: the argument `generation_config`; None if there was none.
    """
    model = unwrap(model)
    adapters = adapters_backend() if isinstance(model, nn.Module) else None
    if adapters is not None:
        adapters.remove_call_hooks(model)
    if isinstance(problem, LadeError):
        return
    for config in (given, getattr(model, "generation_config", None)):
        wrong = _find_invalid(config) if isinstance(config, GenerationConfig) else None
        if wrong and f"the generation_config has {wrong}" not in getattr(problem, "__notes__", ()):
            problem.add_note(f"the generation_config has {wrong}")


def _find_invalid(config: GenerationConfig) -> InvalidField | None:
    return find_invalid(config.to_dict(), ALWAYS, SAMPLING if config.do_sample else {})
