"""The report of a fallback: plain decoding in place of what cannot be served."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lade.errors import FallbackWarning, UnsupportedError
from lade.stats import Stats

logger = logging.getLogger(__name__)

LIBRARIES = frozenset({"lade", "transformers", "transformers_modules", "torch", "peft", "contextlib", "functools"})
"""Packages between the user's line and a fallback; `transformers_modules` holds the code of checkpoints."""


@contextmanager
def falling_back(stats: Stats | None, *, allowed: bool = True) -> Iterator[None]:
    """Suppress an `UnsupportedError` of the block, and report why decoding is plain.

    The report is one `FallbackWarning` at the user's line, a line in the log, and `stats.fallback`.

    Args:
        stats: gets the reason.
        allowed: whether to fall back, as `lookahead="auto"` does; otherwise the error is raised.
    """
    try:
        yield
    except UnsupportedError as problem:
        if not allowed:
            raise
        logger.info("decoding plainly: %s", problem.reason)
        if stats is not None:
            stats.fallback = problem.reason
        warnings.warn(f"decoding plainly: {problem.reason}", FallbackWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """The `stacklevel` with which a warning of the caller points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
