"""Calls of a framework, plain and accelerated: the same result in fewer forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lade
from lade.recipe.export import recipe_path

RECIPE = {"custom_generate": str(recipe_path()), "trust_remote_code": True}
FIXED = {"budget": 16}
"""What is drafted depends on no clock then, and what cannot be served is an error."""


@dataclass
class Count:
    """Forward passes of a model."""

    passes: int = 0


@contextmanager
def counted(model: Any) -> Iterator[Count]:
    """Count the passes of a transformers model."""
    count = Count()

    def after(*_: Any) -> None:
        count.passes += 1

    hook = model.register_forward_hook(after)
    try:
        yield count
    finally:
        hook.remove()


@contextmanager
def by_recipe(model: Any) -> Iterator[dict[str, Any]]:
    """What has to be handed on to `generate`."""
    yield {**RECIPE, "lookahead": FIXED}


@contextmanager
def by_enabling(model: Any) -> Iterator[dict[str, Any]]:
    """Nothing has to be: `generate` itself is accelerated meanwhile."""
    lade.enable(model, lookahead=lade.LookaheadConfig(**FIXED))
    try:
        yield {}
    finally:
        lade.disable(model)


Way = Callable[[Any], Any]


def accelerated(way: Way, model: Any, run: Callable[..., Any]) -> Any:
    """Assert that `run(**arguments)` gives in either way what `run()` gives, and in fewer passes; returns that."""
    with counted(model) as plain:
        expected = run()
    with counted(model) as ours, way(model) as arguments:
        assert run(**arguments) == expected
    assert 0 < ours.passes < plain.passes
    return expected
