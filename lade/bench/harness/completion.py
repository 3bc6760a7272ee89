"""What one call of a method returned, and the record of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lade.bench.results import Sample
from lade.stats import Stats, Step, distinct_ngrams


@dataclass(frozen=True)
class Place:
    """Which answer.

    Attributes:
        workload, prompt, turn: the workload's name, the item's id in it, and the turn of a conversation.
        seed, repeat: which of them.
    """

    workload: str
    prompt: str
    turn: int
    seed: int
    repeat: int


@dataclass(frozen=True)
class Completion:
    """One answer to one prompt.

    Attributes:
        tokens: the new ids.
        seconds: wall-clock time of the call.
        stats: figures of its passes.
        steps: all of them, prefill first; none for transformers' own methods.
    """

    tokens: list[int]
    seconds: float
    stats: Stats
    steps: list[Step] = field(default_factory=list)

    def sample(self, place: Place, method: str, prompt: Sequence[int]) -> Sample:
        """The record of it.

        Args:
            place: which answer it is.
            method: name of the method that gave it.
            prompt: ids.
        """
        stats = self.stats
        return Sample(
            workload=place.workload,
            prompt=place.prompt,
            turn=place.turn,
            prompt_sha256=digest(prompt),
            prompt_tokens=len(prompt),
            method=method,
            seed=place.seed,
            repeat=place.repeat,
            new_tokens=len(self.tokens),
            seconds=self.seconds,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            forward_s=stats.forward_s,
            steps=stats.steps,
            step_tokens=[step.fed for step in self.steps[1:]] if self.steps else list(stats.step_tokens),
            accepted=[len(step.tokens) for step in self.steps[1:]] if self.steps else list(stats.accepted),
            sources=sources_by_place(self.steps[1:]),
            distinct_4grams=distinct_ngrams(self.tokens),
            output_sha256=digest(self.tokens),
        )


def sources_by_place(steps: Sequence[Step]) -> list[dict[str, int]]:
    """For each place in a step, 0 being after the root: who proposed the tokens emitted there, and how many."""
    counts: list[Counter[str]] = [Counter() for _ in range(max((len(step.tokens) for step in steps), default=0))]
    for step in steps:
        for place, source in enumerate(step.sources):
            counts[place][source] += 1
    return [dict(count) for count in counts]


def digest(ids: Sequence[int]) -> str:
    """The SHA-256 of ids as little-endian int64, in hexadecimal."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()
