"""Functions that are compiled as part of others, with Python's errors: a division by zero raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def inlined(function: FunctionT) -> FunctionT:
    """Compile as part of those that call it."""
    return cast(FunctionT, numba.njit(function))
