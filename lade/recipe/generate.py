"""The `generate` of the recipe, and its `lookahead=` as text or JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError
from lade.hf.call import Generated, is_decoded_plainly
from lade.hf.generate import generate as lookahead_generate

FIELDS = tuple(field.name for field in fields(LookaheadConfig))
REMEDY = (
    'give "auto", "none" for plain decoding, a LookaheadConfig, or its fields: '
    '"budget=32", "window=7;ngram=5;guesses=7", or as JSON'
)


def lookahead_from(value: Any) -> Lookahead:
    """Return a value of `lookahead=` as `lade.generate` takes it.

    It may also be the fields of a `LookaheadConfig` as a mapping, as a JSON object in a string, or as `name=value` with
    commas, semicolons or spaces between; or "none".

    Raises:
        ConfigError: it is none of these, or a field does not exist or is out of range.

    >>> lookahead_from("window=7;ngram=5;guesses=7")
    LookaheadConfig(window=7, ngram=5, guesses=7, ...)
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
            raise ConfigError("lookahead", dict(given), f"unknown field {name!r}: give some of {', '.join(FIELDS)}")
    return LookaheadConfig(**given)


class OwnGenerate:
    """A model whose `generate` is its class's own.

    Where a model's folder holds a recipe, `from_pretrained` puts that in place of the model's `generate`; a recipe that
    called it would call itself.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, **arguments: Any) -> Any:
        """The class's own, on this model."""
        return type(self._model).generate(self._model, **arguments)

    def get_base_model(self) -> Any:
        """The model itself; by this name `lade.model.supports.unwrap` finds it, as in PEFT's wrappers."""
        return self._model


def generate(model: Any, *args: Any, **kwargs: Any) -> Generated:
    """Decode as `lade.generate` does, called as a recipe is: with the arguments of `model.generate`, unprepared.

    `lookahead` (default "auto") may also be text or a mapping, see `lookahead_from`; `stats` is as in `lade.generate`.
    With another `custom_generate` among the arguments this is just the class's own `generate`.

    Raises:
        TypeError: an argument is given twice, or there are too many.
        ConfigError: `lookahead` is not valid.
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served.
        InputError: the prompt cannot be decoded.
    """
    arguments = _named(model, args, kwargs)
    own = OwnGenerate(model)
    if arguments.get("custom_generate") is not None or is_decoded_plainly(model):
        plain: Generated = own.generate(**arguments)
        return plain
    lookahead = lookahead_from(arguments.pop("lookahead", "auto"))
    output: Generated = lookahead_generate(own, lookahead=lookahead, **arguments)
    return output


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    _, *named = inspect.signature(type(model).generate).bind(model, *args, **kwargs).arguments.items()
    return {**{name: value for name, value in named if name != "kwargs"}, **kwargs}
