"""Validation of the fields of a `generation_config` that checkpoints were seen to get wrong.

Transformers reports some invalid fields when it loads a config, and most of them deep inside a generation. Values that
it tolerates, such as -1 for a token that does not exist, are accepted here too.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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


_ID = (_is_id, "give the id of a token, or null")
_IDS = (_is_id_or_are_ids, "give the id of a token, or a list of them")
_LIST = (_are_ids, "give a list of ids")
_WHOLE = (is_whole, "give a whole number")
_FACTOR = (lambda value: is_number(value, 0), "give a number > 0; 1 changes nothing")
_SHARE = (lambda value: is_number(value, 0, 1), "give a number > 0 and <= 1")
_NUMBER = (is_number, "give a number")

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
    "repetition_penalty": _FACTOR,
    "no_repeat_ngram_size": _WHOLE,
    "min_length": _WHOLE,
    "min_new_tokens": _WHOLE,
}
"""Fields that any generation uses: a predicate for valid values, and the remedy. None means "not set"."""
SAMPLING: dict[str, tuple[Fits, str]] = {
    "temperature": (lambda value: is_number(value, 0), "give a number > 0"),
    "top_k": (lambda value: is_whole(value, 0), "give a whole number >= 1, or 0 for no limit"),
    "top_p": _SHARE,
    "min_p": (lambda value: is_number(value, most=1) and value >= 0, "give a number from 0 to 1"),
    "typical_p": (lambda value: is_number(value, 0), "give a number > 0; 1 changes nothing"),
}
"""Fields that only sampling uses."""
BEAMS: dict[str, tuple[Fits, str]] = {
    "length_penalty": _NUMBER,
    "early_stopping": (lambda value: isinstance(value, bool) or value == "never", 'give true, false or "never"'),
}
"""Fields that only beam search uses."""
_EOS_FIELDS = ("min_length", "min_new_tokens")
_ID_FIELDS = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")


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
    return _invalid_eos(values) if ALWAYS in tables else None


def _invalid_eos(values: Mapping[str, Any]) -> InvalidField | None:
    """Check for ids that end no text, which are invalid only if another field uses their scores."""
    ends = list(_ids_in(values.get("eos_token_id")))
    for field in _EOS_FIELDS:
        if values.get(field) and min(ends, default=0) < 0:
            return InvalidField(
                "eos_token_id", values["eos_token_id"], f"leave out {field}, or give ids of the vocabulary"
            )
    return None


def _ids_in(value: object) -> Iterable[int]:
    """Return all whole numbers in a nested value."""
    if isinstance(value, list | tuple):
        return [token for part in value for token in _ids_in(part)]
    return [value] if isinstance(value, int) else []
