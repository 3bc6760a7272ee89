"""What `lookahead=` may be where only text or JSON arrives: on a command line, or in a file of settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from lade.config import LookaheadConfig
from lade.errors import ConfigError

FIELDS = tuple(field.name for field in fields(LookaheadConfig))
REMEDY = (
    'give "auto", "none" for plain decoding, a LookaheadConfig, or its fields: '
    '"budget=32", "window=7;ngram=5;guesses=7", or as JSON'
)


def lookahead_from(value: Any) -> LookaheadConfig | Literal["auto"] | None:
    """Read a value of `lookahead=`.

    Args:
        value: what `lade.generate` takes; or the fields of a `LookaheadConfig` as a mapping, as a JSON object in a
            string, or as `name=value` with commas, semicolons or spaces between; or "none".

    Returns:
        A `LookaheadConfig`, "auto", or None for plain decoding.

    Raises:
        ConfigError: it is none of these, or a field does not exist or is out of range.

    >>> lookahead_from("window=7;ngram=5;guesses=7")
    LookaheadConfig(window=7, ngram=5, guesses=7, prompt_ngrams=True, adaptive=False, budget=None, memory=None, seed=0)
    """
    if isinstance(value, str) and value.strip().lower() in ("auto", "none"):
        return "auto" if value.strip().lower() == "auto" else None
    given = _fields_of(value) if isinstance(value, str) else value
    if isinstance(given, Mapping):
        return _config(given)
    if given is None or isinstance(given, LookaheadConfig):
        return given
    raise ConfigError("lookahead", value, REMEDY)


def _fields_of(text: str) -> Any:
    """What a text says: the value of its JSON, or its pairs."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise ConfigError("lookahead", text, REMEDY) from None
    pairs = [part.partition("=") for part in re.split(r"[,;\s]+", text) if part]
    if not pairs or not all(name and value for name, _, value in pairs):
        raise ConfigError("lookahead", text, REMEDY)
    return {name: _value(value) for name, _, value in pairs}


def _value(text: str) -> Any:
    """A number, true, false or none; any other text stays one, and the field says what is wrong with it."""
    try:
        return json.loads("null" if text.lower() == "none" else text.lower())
    except json.JSONDecodeError:
        return text


def _config(given: Mapping[str, Any]) -> LookaheadConfig:
    for name in given:
        if name not in FIELDS:
            raise ConfigError("lookahead", dict(given), f"there is no field {name!r}, but {', '.join(FIELDS)}")
    return LookaheadConfig(**given)
