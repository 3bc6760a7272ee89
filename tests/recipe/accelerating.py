"""Calls of a framework, plain and accelerated: the same result in fewer forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lade
from lade.recipe.export import recipe_path

RECIPE = {"custom_generate": str(recipe_path()), "trust_remote_code": True}
FIXED = {"budget": 16}
"""A fixed budget: drafts depend on no clock, and a model that is not served is an error."""


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Yield a list that gains an element with each forward pass of a transformers model."""
    passes: list[int] = []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        hook.remove()


@contextmanager
def by_recipe(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments that make `generate` use the recipe."""
    yield {**RECIPE, "lookahead": FIXED}


@contextmanager
def by_enabling(model: Any) -> Iterator[dict[str, Any]]:
    """Accelerate `generate` itself; it needs no arguments."""
    lade.enable(model, lookahead=lade.LookaheadConfig(**FIXED))
    try:
        yield {}
    finally:
        lade.disable(model)


Way = Callable[[Any], Any]


def accelerated(way: Way, model: Any, run: Callable[..., Any]) -> Any:
    """Return what `run()` gives, after asserting that `run(**arguments)` gives the same in fewer passes."""
    with counted(model) as plain:
        expected = run()
    with counted(model) as ours, way(model) as arguments:
        assert run(**arguments) == expected
    assert 0 < len(ours) < len(plain)
    return expected
