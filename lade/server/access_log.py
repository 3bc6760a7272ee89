"""A line for every answer, and one for every ten seconds of work. Neither texts nor keys are in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

from lade.server.exchange import Exchange
from lade.serving.snapshot import Snapshot

EVERY_S = 10.0


class AccessLog:
    """Writes what was asked and what came of it.

    Args:
        write: takes a line.
        as_json: whether lines are objects.
    """

    def __init__(self, write: Callable[[str], None], *, as_json: bool) -> None:
        self._write, self._as_json = write, as_json
        self._last: Snapshot | None = None
        self._next = perf_counter() + EVERY_S

    def add(self, exchange: Exchange) -> None:
        """An answer has ended."""
        facts: dict[str, Any] = {
            "id": exchange.id,
            "key": exchange.key,
            "path": exchange.path,
            "status": exchange.status,
            "ms": round(1e3 * exchange.seconds),
        }
        if exchange.flight is not None:
            facts |= _decoded(exchange)
        self._say(facts)

    def tick(self, snapshot: Snapshot | None) -> None:
        """Time passes; says a line when it is time for one and anything was decoded."""
        if snapshot is None or perf_counter() < self._next:
            return
        self._next, last, self._last = perf_counter() + EVERY_S, self._last, snapshot
        new = snapshot.new_tokens - (last.new_tokens if last else 0)
        steps = snapshot.steps - (last.steps if last else 0)
        prompt = snapshot.prompt_tokens - (last.prompt_tokens if last else 0)
        cached = snapshot.cached_tokens - (last.cached_tokens if last else 0)
        if new:
            self._say(
                {
                    "rows": snapshot.rows,
                    "waiting": snapshot.waiting,
                    "tokens_per_s": round(new / EVERY_S, 1),
                    "tokens_per_step": round(new / steps, 2) if steps else 0.0,
                    "cached": round(cached / prompt, 2) if prompt else 0.0,
                }
            )

    def _say(self, facts: dict[str, Any]) -> None:
        self._write(json.dumps(facts) if self._as_json else " ".join(f"{name}={_shown(facts[name])}" for name in facts))


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
