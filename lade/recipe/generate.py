"""What a recipe's `generate` calls, with all that the user gave to `model.generate`."""

from __future__ import annotations

import inspect
from typing import Any

from lade.hf.generate import generate as lookahead_generate
from lade.hf.original import is_decoded_plainly
from lade.hf.plain import Generated
from lade.recipe.lookahead import lookahead_from


class OwnGenerate:
    """A model whose `generate` is its class's own.

    Where a model's folder holds a recipe, `from_pretrained` puts that in place of the model's `generate`; a recipe that
    called it would call itself.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, **arguments: Any) -> Any:
        """The class's own, on this model."""
        return type(self._model).generate(self._model, **arguments)

    def get_base_model(self) -> Any:
        """The model itself; by this name `lade.model.support.supports.unwrap` finds it, as in PEFT's wrappers."""
        return self._model


def generate(model: Any, *args: Any, **kwargs: Any) -> Generated:
    """Decode as `lade.generate` does, called as a recipe is: with the arguments of `model.generate`, unprepared.

    Args:
        model: whose `generate` was called.
        args: positional arguments of `model.generate`.
        kwargs: the others. `lookahead` (default "auto") may also be text or a mapping, see `lookahead_from`; `stats`
            is as in `lade.generate`. With another `custom_generate` among them this is just the class's own `generate`.

    Returns:
        What `model.generate` returns.

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
    positional = inspect.signature(type(model).generate).bind(model, *args).arguments
    named = dict(list(positional.items())[1:])  # without self
    twice = sorted(named.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"generate() got multiple values for argument {twice[0]!r}")
    return {**named, **kwargs}
