"""What users are warned of: that decoding falls back to plain decoding, and that 16 bits round."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from lade.backends.cpu.invariant_marker import invariance_of
from lade.backends.cpu.packing.weight import short
from lade.errors import FallbackWarning, PrecisionWarning, UnsupportedError
from lade.locks import ForkSafeLock
from lade.model.runner import input_device
from lade.model.support.supports import unwrap
from lade.stats import Stats

logger = logging.getLogger(__name__)

LIBRARIES = frozenset({"lade", "transformers", "transformers_modules", "torch", "peft", "contextlib", "functools"})
"""Packages between the user's line and a fallback; `transformers_modules` holds the code of checkpoints."""

HALF = frozenset({torch.bfloat16, torch.float16})

_warned: WeakSet[PreTrainedModel] = WeakSet()
_warning = ForkSafeLock()


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


def warn_of_precision(model: Any) -> None:
    """Give the `PrecisionWarning` of a model that is about to be accelerated, at the user's line; see `precision_note`.

    To be called once nothing can be refused any more, and before anything is fed or borrowed: a warning may be raised.
    """
    note = precision_note(model)
    if note:
        warnings.warn(note, PrecisionWarning, stacklevel=_level_of_user())


def precision_note(model: Any) -> str:
    """Why accelerated output may differ from `generate`'s, and what prevents it.

    Args:
        model: a transformers model, or one wrapped by PEFT or `torch.compile`.

    Returns:
        Empty where output does not depend on what else is in a pass, and for a model that was asked about before.
    """
    inner = unwrap(model)
    device = input_device(inner).type
    cast = torch.is_autocast_enabled(device)
    if not cast and (inner.dtype not in HALF or invariance_of(inner) is not None):
        return ""
    dtype = torch.get_autocast_dtype(device) if cast and inner.dtype is torch.float32 else inner.dtype
    with _warning:
        if dtype not in HALF or inner in _warned:
            return ""
        _warned.add(inner)
    may_differ = "where two tokens score almost equally the output may differ from `generate`"
    return f"{short(dtype)}: {may_differ}; {_remedy(model, cast=cast)} prevents it"


def _remedy(model: Any, *, cast: bool) -> str:
    from lade.backends.cpu.invariant.make_invariant import (
        can_be_tried,  # compilers come with it: only where it is needed
    )

    inner = unwrap(model)
    if cast and (inner.dtype not in HALF or invariance_of(inner) is not None):
        return "leaving out torch.autocast"
    return "`lade.invariant(model)`" if can_be_tried(model) else "loading the model in float32"


def _level_of_user() -> int:
    """The `stacklevel` with which a warning of the caller points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
