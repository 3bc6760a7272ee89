"""Access log: one line per answer, per ten seconds of work, and per library message. No texts, no keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lade.server.settings import PROBES

if TYPE_CHECKING:  # importing these takes seconds, and the log starts before
    from lade.server.request_context import RequestContext
    from lade.serving.snapshot import EngineSnapshot

EVERY_S = 10.0
_LOGGERS = {"lade": logging.INFO, "uvicorn": logging.WARNING, "opentelemetry": logging.WARNING}


class AccessLog(logging.Handler):
    """Writes log lines, each with time and level; also those of libraries, see `listening`.

    With `debug` it logs probes, too, and all of the library's messages.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        as_json: bool,
        debug: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__()
        self._write, self._as_json, self._debug, self._clock = write, as_json, debug, clock
        self._lost = 0  # lines since the last that could be written
        self._last: EngineSnapshot | None = None
        self._next = clock() + EVERY_S

    def add(self, context: RequestContext, route: str = "") -> None:
        """Log an answer that has ended, whatever its route."""
        if context.path in PROBES and not self._debug:
            return
        self._line(_level(context.status), facts_of(context))

    def say(self, message: str, level: str = "info") -> None:
        """Log a message; only tracebacks span several lines."""
        self._line(level, {"message": message})

    def emit(self, record: logging.LogRecord) -> None:
        """Log a library's message with its traceback."""
        self.say(self.format(record), record.levelname.lower())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Redirect the library's and uvicorn's logging to this log within the block."""
        before = {}
        for name, level in _LOGGERS.items():
            logger = logging.getLogger(name)
            before[logger] = logger.handlers, logger.level, logger.propagate
            logger.handlers, logger.propagate = [self], False
            logger.setLevel(logging.DEBUG if self._debug else level)
        try:
            yield
        finally:
            for logger, (handlers, number, propagates) in before.items():
                logger.handlers, logger.propagate = handlers, propagates
                logger.setLevel(number)

    def tick(self, snapshot: EngineSnapshot | None) -> None:
        """Log the work since the last line, if it is due and anything was decoded."""
        if snapshot is None or self._clock() < self._next:
            return
        new = snapshot if self._last is None else snapshot.since(self._last)
        self._next, self._last = self._clock() + EVERY_S, snapshot
        if new.new_tokens:
            facts = {
                "rows": new.rows,
                "waiting": new.waiting,
                "tokens_per_s": round(new.new_tokens / EVERY_S, 1),
                "tokens_per_step": round(new.new_tokens / new.steps, 2) if new.steps else 0.0,
                "cached": round(new.cached_tokens / new.prompt_tokens, 2) if new.prompt_tokens else 0.0,
            }
            self._line("info", facts)

    def _line(self, level: str, facts: dict[str, Any]) -> None:
        """Write a line; one that cannot be written, as on a full disk, is counted, and the next one tells of it."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._lost:
            facts = {**facts, "lost_lines": self._lost}
        if self._as_json:
            line = json.dumps({"time": now, "level": level, **facts})
        else:
            more = f" ({self._lost} lines before this one could not be written)" * (self._lost > 0)
            message = facts.get("message")
            line = f"{message}{more}" if message else " ".join(f"{name}={_shown(facts[name])}" for name in facts)
            line = f"{now} {level:<7} {line}"
        try:
            self._write(line)
            self._lost = 0
        except OSError:
            self._lost += 1


def _level(status: int) -> str:
    """Return the level of an answer: neither overload nor a client's deadline is an error of the server."""
    return "warning" if status in (503, 504, 529) else "error" if status >= 500 else "info"


def facts_of(context: RequestContext) -> dict[str, Any]:
    """Return what a line has about an answer."""
    facts = {
        "id": context.id,
        "key": context.key,
        "method": context.method,
        "path": context.path,
        "status": context.status,
        "ms": round(1e3 * context.seconds),
    }
    if not context.endpoint:
        return facts
    handles = context.handles
    steps = sum(handle.stats.steps for handle in handles)
    accepted = sum(handle.stats.accepted_tokens for handle in handles)
    queued = [handle.queue_s for handle in handles if handle.queue_s is not None]
    return {
        **facts,
        "prompt": sum(handle.prompt_tokens for handle in handles),
        "cached": sum(handle.cached_tokens for handle in handles),
        "answer": sum(handle.stats.new_tokens for handle in handles),
        "queue_ms": round(1e3 * max(queued, default=0.0)),
        "first_ms": None if context.first_s is None else round(1e3 * context.first_s),
        "tokens_per_step": round(accepted / steps, 2) if steps else None,
        "end": context.outcome,
    }


def _shown(value: Any) -> str:
    """Return a path as one word: quoted if it would break the line's format."""
    text = "-" if value is None else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
