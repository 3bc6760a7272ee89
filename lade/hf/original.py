"""`model.generate` without what `lade.enable` put in its place: for plain decoding, and for comparing with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lade.errors import UnsupportedModelError
from lade.model.support.supports import PLAIN_REMEDY, unwrap

REPLACED = "_generate_before_lade"
"""Where an enabled model keeps a `generate` that was an attribute of its own before."""

_decoded_plainly: ContextVar[Any] = ContextVar("_decoded_plainly", default=None)
"""The innermost model whose `generate` is not to be accelerated in this context."""


@contextmanager
def original_generate(model: Any) -> Iterator[Callable[..., Any]]:
    """While it is entered, the `generate` that it yields decodes plainly, whether or not the model is enabled.

    That holds for the models inside PEFT's and other wrappers as well, and for this thread alone.

    >>> with original_generate(model) as generate:
    ...     output = generate(**inputs)
    """
    token = _decoded_plainly.set(unwrap(model))
    try:
        yield model.generate
    finally:
        _decoded_plainly.reset(token)


def check_generate(model: Any) -> None:
    """Raise `UnsupportedModelError` for a model whose checkpoint brings a way of decoding of its own.

    Transformers puts that in place of `generate` when it loads the model. It need not take `custom_generate=`.
    """
    model = unwrap(model)
    attributes = getattr(model, "__dict__", {})
    own = attributes.get(REPLACED, attributes.get("generate"))
    if isinstance(own, functools.partial) and own.keywords.get("model") is model and not _is_our_recipe(own.func):
        reason = f"{type(model).__name__} decodes by the custom_generate of its checkpoint"
        raise UnsupportedModelError(reason, PLAIN_REMEDY)


def _is_our_recipe(function: Any) -> bool:
    """Whether it is the `generate` that `lade export-recipe` writes, which hands a callable on."""
    return getattr(function, "__globals__", {}).get("PACKAGE") == "lookahead-decoding"


def is_decoded_plainly(model: Any) -> bool:
    """Whether an `original_generate` of this model, or of a wrapper around it, is running."""
    return _decoded_plainly.get() is unwrap(model)
