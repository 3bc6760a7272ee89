"""Watchdog: finds an engine that makes no progress, and says what it was doing."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from time import perf_counter
from types import FrameType

from lade.serving.snapshot import CurrentWork

logger = logging.getLogger(__name__)

SET_UP = frozenset(
    [
        ("lade.backends.cuda_graphs.capture", "record"),
        ("lade.tuning.measure", "measure_step_cost"),
        ("torch._dynamo.convert_frame", "__call__"),
        ("triton.compiler.compiler", "compile"),
    ]
)
"""Modules and functions that do what is done once: capture, measure and compile passes. Their time does not count."""


class Watchdog:
    """Watches the decoding thread of an engine.

    Only the time of one piece of work counts, such as one pass, however long a request takes.

    Args:
        limit_s: seconds that a piece of work may take, set-up aside; 0 for no limit.

    Attributes:
        limit_s: the limit, which may be set at any time.
        reason: description of the work that takes too long; "" if none does.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.reason = ""
        self._began: float | None = None  # of the work that is watched
        self._looked = self._set_up_s = 0.0

    def look(self, work: CurrentWork | None) -> None:
        """Look at what the engine does now; log once that it takes too long, and once that it has ended.

        The time between two looks counts as set-up if the later one finds it, so there should be several a second.

        Args:
            work: the engine's current work; None if it waits for requests.
        """
        now, began = perf_counter(), None if work is None else work.began
        if began != self._began:
            if self.reason:
                logger.warning("the engine goes on after %.0f s", now - (self._began or now))
            self._began, self._looked, self._set_up_s, self.reason = began, began or now, 0.0, ""
        if work is None or not self.limit_s:
            return
        if is_set_up(work.frame):
            self._set_up_s += now - self._looked
        self._looked = now
        seconds = now - work.began - self._set_up_s
        if seconds > self.limit_s and not self.reason:
            self.reason = f"{work.phase} of {len(work.rows)} rows has taken more than {self.limit_s:g} s"
            logger.error("the engine makes no progress: %s\n%s", self.reason, described(work))


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_set_up(frame: FrameType | None) -> bool:
    """Return True if a call within `frame`'s stack does what is done once."""
    return any((each.f_globals.get("__name__"), each.f_code.co_name) in SET_UP for each in _calls(frame))


def described(work: CurrentWork) -> str:
    """Return the sizes of the rows and the stack of the decoding thread. It has no texts."""
    rows = ", ".join(f"{prompt} + {answer}" for prompt, answer in work.rows)
    stack = "".join(traceback.format_list(traceback.extract_stack(work.frame))) if work.frame is not None else ""
    return f"phase {work.phase}, tokens of prompt + answer of each row: {rows or '-'}\n{stack.rstrip()}"
