"""Counters of an engine and the snapshot that `Engine.snapshot` returns."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import FrameType
from typing import Any

from lade.locks import ForkSafeLock
from lade.stats import Step


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """State of an engine, and its totals since it was opened.

    Attributes:
        rows: requests being prefilled or decoded.
        max_rows: upper bound on `rows`.
        waiting: waiting requests and reserved queue slots.
        max_waiting: upper bound on `waiting`, beyond those that free rows could take.
        displaced: preempted requests that wait to be resumed.
        slots: cache slots that hold a token of a request.
        room: cache slots allocated over all rows.
        max_slots: upper bound on `room`: `Engine.max_tokens`.
        prefix_texts: texts in the prefix cache.
        prefix_bytes: size of the prefix cache's content in bytes.
        max_prefix_bytes: upper bound on `prefix_bytes`.
        closed: True if no request is accepted any more.
        requests: number of ended requests by `Handle.reason`.
        prompt_tokens: prompt tokens of requests that have had their first token.
        cached_tokens: prompt tokens among them served from the prefix cache.
        new_tokens: tokens emitted, including the first one of each request.
        displacements: number of preemptions.
        passes: forward passes after prefill, each over all rows.
        steps: row steps: passes times the rows in each.
        resting_steps: those of them in which drafting rested, see `Step.rested`.
        fed_tokens: tokens fed in these steps, roots included.
        sources: tokens emitted by draft source, see `Step.sources`.
        acceptance: steps with drafts among `steps`, by the number of draft tokens accepted.
        prefill_s: seconds spent in prefill.
        decode_s: seconds spent in decode passes.
        forward_s: seconds of `decode_s` inside the model's forward pass.
    """

    rows: int
    max_rows: int
    waiting: int
    max_waiting: int
    displaced: int
    slots: int = 0
    room: int = 0
    max_slots: int
    prefix_texts: int = 0
    prefix_bytes: int = 0
    max_prefix_bytes: int
    closed: bool
    requests: Mapping[str, int]  # from here on totals
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    displacements: int = 0
    passes: int = 0
    steps: int = 0
    resting_steps: int = 0
    fed_tokens: int = 0
    sources: Mapping[str, int]
    acceptance: Mapping[int, int]
    prefill_s: float = 0.0
    decode_s: float = 0.0
    forward_s: float = 0.0

    def since(self, earlier: EngineSnapshot) -> EngineSnapshot:
        """Return this snapshot with totals that count from an earlier one on."""
        names = [each.name for each in fields(self)]
        totals: dict[str, Any] = {}
        for name in names[names.index("requests") :]:
            old, new = getattr(earlier, name), getattr(self, name)
            totals[name] = {key: new[key] - old.get(key, 0) for key in new} if isinstance(new, Mapping) else new - old
        return replace(self, **totals)


@dataclass(frozen=True)
class CurrentWork:
    """The work of the decoding thread at the moment, see `Engine.current_work`.

    Attributes:
        phase: "admission", "prefill", "decode" or "probe".
        began: when it began, on the `perf_counter` clock; no other work has the same value.
        rows: numbers of prompt and answer tokens of each running request.
        frame: innermost call of the thread; None if it has just ended.
    """

    phase: str
    began: float
    rows: tuple[tuple[int, int], ...]
    frame: FrameType | None


_MAX_PENDING = 256  # passes queued before they are counted


class Tally:
    """Thread-safe counters of an engine.

    Passes are queued and counted in bulk, on a snapshot or when the queue is long. After a pass the counters are no
    longer in the processor's caches, so counting each pass at once takes ten times as long.
    """

    def __init__(self) -> None:
        self._pending = deque[tuple[Sequence[Step], float]]()
        self._totals = defaultdict[str, float](int)  # by attribute of `EngineSnapshot`
        self._requests, self._sources, self._acceptance = Counter[str](), Counter[str](), Counter[int]()
        self._lock = ForkSafeLock()  # never held during a pass

    def add_end(self, reason: str) -> None:
        """Count an ended request."""
        with self._lock:
            self._requests[reason] += 1

    def add_first(self, step: Step, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a request's first token and its prompt."""
        with self._lock:
            self._totals["prompt_tokens"] += prompt_tokens
            self._totals["cached_tokens"] += cached_tokens
            self._add_tokens(step)

    def add(self, total: str, amount: float) -> None:
        """Add to one of the totals, by its name in `EngineSnapshot`."""
        with self._lock:
            self._totals[total] += amount

    def add_pass(self, steps: Sequence[Step], forward_s: float) -> None:
        """Queue a pass over all rows, `forward_s` seconds of it in the model. Each emitted token takes one slot."""
        self._pending.append((steps, forward_s))
        if len(self._pending) >= _MAX_PENDING:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Count queued passes; the caller holds the lock."""
        totals = self._totals
        while self._pending:
            steps, forward_s = self._pending.popleft()
            totals["passes"] += 1
            totals["decode_s"] += steps[0].seconds
            totals["forward_s"] += forward_s
            for step in (step for step in steps if step.tokens):  # rows without tokens failed
                totals["steps"] += 1
                totals["resting_steps"] += step.rested
                totals["fed_tokens"] += step.fed
                if step.fed > 1:
                    self._acceptance[step.accepted_drafts] += 1
                totals["slots"] += len(step.tokens)
                self._add_tokens(step)

    def _add_tokens(self, step: Step) -> None:
        self._totals["new_tokens"] += len(step.tokens)
        self._sources.update(step.sources)

    def set_use(self, **use: int) -> None:
        """Set the current memory use, by its names in `EngineSnapshot`."""
        with self._lock:
            self._count()
            self._totals.update(use)

    def snapshot(self, **known: Any) -> EngineSnapshot:
        """Return a copy of the counters together with the scheduler's own figures."""
        with self._lock:
            self._count()
            known |= {"requests": dict(self._requests), "sources": dict(self._sources)}
            known |= {"acceptance": dict(self._acceptance), **self._totals}
        return EngineSnapshot(**known)
