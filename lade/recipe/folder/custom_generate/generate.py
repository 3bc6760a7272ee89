"""Lookahead decoding: fewer forward passes, the same tokens. Written by `lade export-recipe`."""

from typing import Any

PACKAGE, VERSION = "lookahead-decoding", "0.1"
INSTALL = f"pip install --upgrade .  in a checkout of {PACKAGE}"


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """`model.generate` with lookahead decoding; also takes `lookahead` and `stats`, as `lade.generate` does."""
    try:  # transformers would ask for the package by the name it is imported by, and that is another one
        from lade.recipe.generate import generate as decode
    except ImportError as problem:
        raise ImportError(f"this recipe needs {PACKAGE} {VERSION} or later ({problem}): run  {INSTALL}") from problem
    return decode(model, *args, **kwargs)
