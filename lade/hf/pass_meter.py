"""Counts and times the forward passes of plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from lade.model.support.supports import unwrap
from lade.model.thread_patches import hooked
from lade.stats import Stats, Step

EVERY_PASS = sys.maxsize
"""The length of a row that gets a token from every pass, as the beams of a prompt do."""


@dataclass
class _Pass:
    """One forward pass, or one that has not come to its end."""

    fed: int
    start: float
    end: float = 0.0


@contextmanager
def metered(model: Any, stats: Stats | None) -> Iterator[list[int]]:
    """Count and time the forward passes that this thread makes meanwhile, as one generation of one token a pass.

    Passes over more than one token at the beginning (a prefill in chunks) count as prefill. After an error the last
    pass does not count: it has failed, or its token was never emitted.

    Yields:
        A list; put in how many tokens each row of a batch has got, and every row counts.
    """
    rows: list[int] = []
    if stats is None:
        yield rows
        return
    model = unwrap(model)
    passes: list[_Pass] = []

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        passes.append(_Pass(1 if ids is None else ids.shape[-1], perf_counter()))

    def after(output: Any) -> None:
        passes[-1].end = perf_counter()

    begin = perf_counter()
    with hooked(model, before=before, after=after):
        try:
            yield rows
        except BaseException:
            _add_passes(stats, _with_token(passes), begin, perf_counter(), rows)
            raise
        _add_passes(stats, passes, begin, perf_counter(), rows)


def _with_token(passes: Sequence[_Pass]) -> Sequence[_Pass]:
    """The passes of a failed generation whose tokens were emitted: those that another pass came after."""
    prefilled = any(each.fed == 1 for each in passes[1:])
    return passes[:-1] if prefilled else ()


def _add_passes(stats: Stats, passes: Sequence[_Pass], begin: float, end: float, rows: Sequence[int]) -> None:
    prefill = max(1, next((i for i, each in enumerate(passes) if each.fed == 1), len(passes)))
    laps = [*(each.start for each in passes[prefill:]), end]  # a step ends where the next pass begins

    def add(index: int, source: str, fed: int, seconds: float, forward_s: float) -> None:
        going_on = sum(length > index for length in rows) if rows else 1
        if going_on:
            stats.add(*[Step(index, [-1], [source], fed, seconds)] * going_on, forward_s=forward_s)

    if passes:
        add(0, "prefill", sum(each.fed for each in passes[:prefill]), laps[0] - begin, 0.0)
    for index, each in enumerate(passes[prefill:], start=1):
        add(index, "bonus", each.fed, laps[index] - each.start, each.end - each.start)
