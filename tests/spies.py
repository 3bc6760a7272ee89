"""Calls inside what is tested: noted, or failed on purpose, until the test's `monkeypatch` is undone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from typing import Any

import pytest


def watched(patch: pytest.MonkeyPatch, owner: Any, name: str, see: Callable[..., Any] | None = None) -> list[Any]:
    """Note the arguments of each call, or what `see` makes of them, before it goes on as ever."""
    seen, original = list[Any](), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        seen.append(see(*given, **named) if see else given)
        return original(*given, **named)

    patch.setattr(owner, name, call)
    return seen


def answered(patch: pytest.MonkeyPatch, owner: Any, name: str, see: Callable[..., Any] | None = None) -> list[Any]:
    """Note what each call has returned, or what `see` makes of that and of its arguments."""
    seen, original = list[Any](), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        seen.append(see(found, *given, **named) if see else found)
        return found

    patch.setattr(owner, name, call)
    return seen


def failing(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    problem: BaseException | type[BaseException],
    *,
    calls: Container[int] | None = None,
    where: Callable[..., bool] | None = None,
    after: bool = False,
) -> list[Any]:
    """Have calls raise `problem`, and return the arguments of those that have.

    Args:
        calls: numbers of the calls that fail, counted from 1; `None` for all.
        where: tells by its arguments whether a call fails.
        after: let the call do its work first.
    """
    numbers, failed, original = itertools.count(1), list[Any](), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        number = next(numbers)
        fails = (calls is None or number in calls) and (where is None or where(*given, **named))
        found = original(*given, **named) if after or not fails else None
        if fails:
            failed.append(given)
            raise problem
        return found

    patch.setattr(owner, name, call)
    return failed
