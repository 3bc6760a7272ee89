"""Validation of a `generation_config`, and removal of PEFT's per-call hooks when generation fails.

Transformers notices some of them when it loads, and most of them deep inside a generation. What it can live with, such
as the id -1 of a token that is none, is all right here, too.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from lade.errors import LadeError, UnsupportedArgumentError
from lade.model.support.adapters import call_values, remove_call_hooks
from lade.model.support.supports import unwrap


@dataclass(frozen=True)
class Nonsense:
    """A value that a field cannot have.

    Attributes:
        field: its name.
        value: as it was found.
        remedy: what to give instead.
    """

    field: str
    value: object
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={reprlib.repr(self.value)}: {self.remedy}"


Fits = Callable[[Any], bool]


def is_whole(value: object, least: float = -math.inf) -> bool:
    """Whether it is a whole number, `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object, above: float = -math.inf, most: float = math.inf) -> bool:
    """Whether it is a finite number greater than `above`, `most` or less."""
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
    "is_assistant": (_is_off, "leave it out: it is of models that draft for others"),
    "constraints": _CONSTRAINED,
    "force_words_ids": _CONSTRAINED,
}
"""Fields that any generation uses: what fits, and what to give instead. None is "not set"."""
LOADING: dict[str, tuple[Fits, str]] = {
    "max_new_tokens": _COUNT,
    "num_return_sequences": _COUNT,
    "early_stopping": (lambda value: isinstance(value, bool) or value == "never", 'give true, false or "never"'),
    "watermarking_config": (lambda value: isinstance(value, dict), "give an object, or leave it out"),
    "compile_config": (lambda value: isinstance(value, dict), "give an object, or leave it out"),
}
"""Fields that transformers cannot even load with other values."""
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
"""Fields that only a search of beams uses."""
_OF_ENDS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
_WITHIN = ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id")


def nonsense_in(
    values: Mapping[str, Any], *tables: Mapping[str, tuple[Fits, str]], vocabulary: int | None = None
) -> Nonsense | None:
    """The first field whose value cannot be used; None if all can.

    Args:
        values: by the names of the fields; None is "not set".
        tables: those of this module to look in.
        vocabulary: ids that some fields may only have are below it; None where it is not known.
    """
    for table in tables:
        for field, (fits, remedy) in table.items():
            value = values.get(field)
            if value is None:
                continue
            if not fits(value):
                return Nonsense(field, value, remedy)
            if field in _WITHIN and vocabulary is not None and max(_ids_in(value), default=0) >= vocabulary:
                return Nonsense(field, value, f"give ids below {vocabulary}, the size of the vocabulary")
    return _ends_that_are_none(values, vocabulary) if ALWAYS in tables else None


def _ends_that_are_none(values: Mapping[str, Any], vocabulary: int | None) -> Nonsense | None:
    """Ids that end no text do no harm, unless another field makes something of their scores."""
    ends = list(_ids_in(values.get("eos_token_id")))
    remedy = "leave out {}, or give ids of the vocabulary"
    for field in _OF_ENDS:
        if values.get(field) and min(ends, default=0) < 0:
            return Nonsense("eos_token_id", values["eos_token_id"], remedy.format(field))
    beyond = vocabulary is not None and max(ends, default=0) >= vocabulary
    if values.get("exponential_decay_length_penalty") and beyond:
        return Nonsense("eos_token_id", values["eos_token_id"], remedy.format("exponential_decay_length_penalty"))
    return None


def _ids_in(value: object) -> Iterable[int]:
    """All whole numbers in a value."""
    if isinstance(value, list | tuple):
        return [token for part in value for token in _ids_in(part)]
    return [value] if isinstance(value, int) else []


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
    refuse_values_of_one_call(dict.fromkeys(call_values(model), True), where)


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
        remove_call_hooks(model)
    if isinstance(problem, LadeError):
        return
    for config in (given, getattr(model, "generation_config", None)):
        wrong = _nonsense_in(config) if isinstance(config, GenerationConfig) else None
        if wrong and f"the generation_config has {wrong}" not in getattr(problem, "__notes__", ()):
            problem.add_note(f"the generation_config has {wrong}")


def _nonsense_in(config: GenerationConfig) -> Nonsense | None:
    return nonsense_in(config.to_dict(), ALWAYS, SAMPLING if config.do_sample else {})
