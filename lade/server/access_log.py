"""A line for every answer, for ten seconds of work, and for what is said besides. No texts and no keys are in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lade.server.settings import PROBES

if TYPE_CHECKING:  # what these import takes seconds, and a log begins before that
    from lade.server.request_context import Exchange
    from lade.serving.snapshot import EngineSnapshot

EVERY_S = 10.0
_LOGGERS = {"lade": logging.INFO, "uvicorn": logging.WARNING}


class AccessLog:
    """Writes what was asked and what came of it, each line with a time and a level.

    Args:
        write: takes a line.
        as_json: whether lines are objects.
        debug: whether probes have lines, too, and all that the library logs.
    """

    def __init__(self, write: Callable[[str], None], *, as_json: bool, debug: bool = False) -> None:
        self._write, self._as_json, self._debug = write, as_json, debug
        self._last: EngineSnapshot | None = None
        self._next = perf_counter() + EVERY_S

    def add(self, exchange: Exchange) -> None:
        """An answer has ended."""
        if exchange.path in PROBES and not self._debug:
            return
        facts: dict[str, Any] = {
            "id": exchange.id,
            "key": exchange.key,
            "method": exchange.method,
            "path": exchange.path,
            "status": exchange.status,
            "ms": round(1e3 * exchange.seconds),
        }
        if exchange.flight is not None:
            facts |= _decoded(exchange)
        self._line(_level(exchange.status), facts)

    def say(self, message: str, level: str = "info") -> None:
        """A line of words; only those of a traceback are several lines."""
        self._line(level, {"message": message})

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which what the library and uvicorn log goes here, and nowhere else."""
        handler, before = _Records(self), {}
        for name, level in _LOGGERS.items():
            logger = logging.getLogger(name)
            before[logger] = logger.handlers, logger.level, logger.propagate
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(logging.DEBUG if self._debug else level)
        try:
            yield
        finally:
            for logger, (handlers, number, propagates) in before.items():
                logger.handlers, logger.propagate = handlers, propagates
                logger.setLevel(number)

    def tick(self, snapshot: EngineSnapshot | None) -> None:
        """Time passes; says a line when it is time for one and anything was decoded."""
        if snapshot is None or perf_counter() < self._next:
            return
        self._next, last, self._last = perf_counter() + EVERY_S, self._last, snapshot
        new = snapshot.new_tokens - (last.new_tokens if last else 0)
        steps = snapshot.steps - (last.steps if last else 0)
        prompt = snapshot.prompt_tokens - (last.prompt_tokens if last else 0)
        cached = snapshot.cached_tokens - (last.cached_tokens if last else 0)
        if new:
            self._line(
                "info",
                {
                    "rows": snapshot.rows,
                    "waiting": snapshot.waiting,
                    "tokens_per_s": round(new / EVERY_S, 1),
                    "tokens_per_step": round(new / steps, 2) if steps else 0.0,
                    "cached": round(cached / prompt, 2) if prompt else 0.0,
                },
            )

    def _line(self, level: str, facts: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._as_json:
            self._write(json.dumps({"time": now, "level": level, **facts}))
        else:
            words = facts.get("message") or " ".join(f"{name}={_shown(facts[name])}" for name in facts)
            self._write(f"{now} {level:<7} {words}")


class _Records(logging.Handler):
    """Hands on what is logged.

    Args:
        log: where to.
    """

    def __init__(self, log: AccessLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record on, with the traceback of its error."""
        self._log.say(self.format(record), record.levelname.lower())


def _level(status: int) -> str:
    """How much an answer should worry whoever runs the server: overload is not its fault."""
    return "warning" if status in (503, 529) else "error" if status >= 500 else "info"


def _decoded(exchange: Exchange) -> dict[str, Any]:
    flight = exchange.flight
    assert flight is not None
    handles = flight.handles
    steps = sum(handle.stats.steps for handle in handles)
    accepted = sum(handle.stats.accepted_tokens for handle in handles)
    queued = [handle.queue_s for handle in handles if handle.queue_s is not None]
    return {
        "prompt": sum(handle.prompt_tokens for handle in handles),
        "cached": sum(handle.cached_tokens for handle in handles),
        "answer": sum(handle.stats.new_tokens for handle in handles),
        "queue_ms": round(1e3 * max(queued, default=0.0)),
        "first_ms": None if flight.first_s is None else round(1e3 * flight.first_s),
        "tokens_per_step": round(accepted / steps, 2) if steps else None,
        "end": flight.outcome,
    }


def _shown(value: Any) -> str:
    """Paths are the client's: what would begin another word or line is quoted."""
    text = "-" if value is None else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
