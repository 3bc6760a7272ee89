"""How an engine stands at one moment, and what it has done so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lade.locks import ForkSafeLock
from lade.stats import Step


@dataclass(frozen=True)
class Snapshot:
    """What `Engine.snapshot` returns. The sums are those since the engine was opened.

    Attributes:
        rows: requests that are prefilled or decoded now.
        max_rows: as many may be.
        waiting: requests that wait, and places that are reserved.
        max_waiting: as many may, beside those that there are free rows for.
        displaced: requests that had to make room for older ones, and go on when there is room again.
        slots: of the KV cache, those that hold a token of a request now.
        room: slots that there are buffers for now, over all rows.
        max_slots: as many may be: `Engine.max_tokens`.
        prefix_texts: texts that are kept for prompts that begin like them.
        prefix_bytes: what they take.
        max_prefix_bytes: what they may take.
        closed: whether it takes no more requests.
        requests: how many have ended, by `Handle.reason`.
        prompt_tokens: of the requests that have had their first token.
        cached_tokens: those of them that were taken from texts that had been kept.
        new_tokens: emitted, the first one of each request included.
        displacements: how often a request had to make room for older ones.
        passes: forward passes after prefill, of all rows together.
        steps: the same, each counted once for every row that took part.
        fed_tokens: tokens fed in these steps, roots included.
        sources: tokens emitted, by `Step.sources`.
        prefill_s: seconds spent on prompts.
        decode_s: seconds of all passes.
        forward_s: the part of `decode_s` inside the model's forward pass.
    """

    rows: int
    max_rows: int
    waiting: int
    max_waiting: int
    displaced: int
    slots: int
    room: int
    max_slots: int
    prefix_texts: int
    prefix_bytes: int
    max_prefix_bytes: int
    closed: bool
    requests: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    displacements: int
    passes: int
    steps: int
    fed_tokens: int
    sources: Mapping[str, int]
    prefill_s: float
    decode_s: float
    forward_s: float


@dataclass
class Sums:
    """Those of `Snapshot`, and what of its memory is in use."""

    slots: int = 0
    room: int = 0
    prefix_texts: int = 0
    prefix_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    displacements: int = 0
    passes: int = 0
    steps: int = 0
    fed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    forward_s: float = 0.0


_MOST_NOTED = 256
"""Passes that are noted before they are counted."""


class Tally:
    """Counts what an engine does; a copy can be made at any time, whatever the engine is doing.

    Passes are noted, and counted when somebody looks, or when there are many: a pass leaves nothing of this in the
    processor's caches, so that counting it at once takes ten times as long.
    """

    def __init__(self) -> None:
        self._noted = deque[tuple[Sequence[Step], float]]()
        self._sums, self._requests, self._sources = Sums(), Counter[str](), Counter[str]()
        self._lock = ForkSafeLock()  # never held while anything is decoded

    def add_end(self, reason: str) -> None:
        """A request has ended."""
        with self._lock:
            self._requests[reason] += 1

    def add_first(self, step: Step, prompt_tokens: int, cached_tokens: int) -> None:
        """A request has had its first token."""
        with self._lock:
            self._sums.prompt_tokens += prompt_tokens
            self._sums.cached_tokens += cached_tokens
            self._add_tokens(step)

    def add_displacement(self) -> None:
        """A request has made room for older ones."""
        with self._lock:
            self._sums.displacements += 1

    def add_prefill(self, seconds: float) -> None:
        """So long a piece of a prompt took."""
        with self._lock:
            self._sums.prefill_s += seconds

    def add_pass(self, steps: Sequence[Step], forward_s: float) -> None:
        """A pass of all rows, which took `forward_s` in the model. Each token takes one more slot."""
        self._noted.append((steps, forward_s))
        if len(self._noted) >= _MOST_NOTED:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Count the passes that were noted; by a thread that has the lock."""
        while self._noted:
            steps, forward_s = self._noted.popleft()
            self._sums.passes += 1
            self._sums.decode_s += steps[0].seconds
            self._sums.forward_s += forward_s
            for step in (step for step in steps if step.tokens):  # the others failed before they had any
                self._sums.steps += 1
                self._sums.fed_tokens += step.fed
                self._sums.slots += len(step.tokens)
                self._add_tokens(step)

    def _add_tokens(self, step: Step) -> None:
        self._sums.new_tokens += len(step.tokens)
        self._sources.update(step.sources)

    def set_use(self, slots: int, room: int, prefix_texts: int, prefix_bytes: int) -> None:
        """So much memory is in use, see `Snapshot`."""
        with self._lock:
            self._count()
            self._sums.slots, self._sums.room = slots, room
            self._sums.prefix_texts, self._sums.prefix_bytes = prefix_texts, prefix_bytes

    def snapshot(self, **known: Any) -> Snapshot:
        """A copy, with what only the queue knows."""
        with self._lock:
            self._count()
            known |= {"requests": dict(self._requests), "sources": dict(self._sources), **asdict(self._sums)}
        return Snapshot(**known)
