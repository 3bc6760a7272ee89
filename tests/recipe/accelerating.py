"""Calls of a framework, plain and accelerated by the recipe: the same result in fewer forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lade.recipe import recipe_path

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


def accelerated(model: Any, run: Callable[..., Any]) -> Any:
    """Return the result of `run()`, after asserting that with the recipe it is the same in fewer passes."""
    with counted(model) as plain:
        expected = run()
    with counted(model) as ours:
        assert run(**RECIPE, lookahead=FIXED) == expected
    assert 0 < len(ours) < len(plain)
    return expected
