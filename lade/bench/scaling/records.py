"""What is known of how tokens per step grow with the tokens fed: the records in `scaling.json`, and their fits.

Nothing in them was timed: with greedy decoding tokens per step depend on model and text, not on the machine.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from lade.bench import record_file
from lade.bench.results import Environment, Mismatch, Model, Settings, Workload
from lade.bench.scaling.fit import Expectation, Line, fit_expectation, fit_line

SCHEMA = "lade-scaling/1"
NAME = "scaling.json"
_EXACT = ("float32", "float64")  # in which every answer must be plain decoding's


@dataclass(frozen=True)
class Reference:
    """Plain decoding's answer to a prompt, by hashes; see `lade.bench.results.Sample`."""

    prompt: str
    prompt_sha256: str
    new_tokens: int
    output_sha256: str


@dataclass(frozen=True)
class Point:
    """One size, on all prompts.

    Attributes:
        window, ngram, guesses: W, N and G.
        steps: forward passes after prefill, one entry a prompt.
        fed: tokens fed in all of them, one entry a prompt.
        accepted: tokens emitted in all of them, one entry a prompt.
    """

    window: int
    ngram: int
    guesses: int
    steps: list[int]
    fed: list[int]
    accepted: list[int]

    @property
    def fed_per_step(self) -> float:
        """T, the mean number of tokens fed."""
        return sum(self.fed) / sum(self.steps)

    @property
    def tokens_per_step(self) -> float:
        """S."""
        return sum(self.accepted) / sum(self.steps)


@dataclass
class Scaling:
    """What was found so far, and what `scaling.json` holds.

    Attributes:
        created: ISO 8601, UTC.
        command: the command line.
        environment, model, settings, workload: as in a benchmark.
        prompt_ngrams: whether n-grams of the prompt were among the guesses.
        references: plain decoding's answers.
        points: in the order of measurement.
        mismatches: answers that differ from plain decoding's.
        complete: whether all sizes of the last run are there.
    """

    created: str
    command: list[str]
    environment: Environment
    model: Model
    settings: Settings
    workload: Workload
    prompt_ngrams: bool
    references: list[Reference] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    complete: bool = False

    @property
    def ngrams(self) -> list[int]:
        """The N that there are points of, ascending."""
        return sorted({point.ngram for point in self.points})

    def of(self, ngram: int) -> list[Point]:
        """The points of one N, by their W."""
        return sorted((point for point in self.points if point.ngram == ngram), key=lambda point: point.window)

    def line(self, ngram: int) -> Line | None:
        """The line through the points of one N."""
        own = self.of(ngram)
        return fit_line([point.fed_per_step for point in own], [point.tokens_per_step for point in own])

    def expectation(self, ngram: int | None = None) -> Expectation | None:
        """The paper's formula fitted to all points, or to those of one N."""
        own = self.points if ngram is None else self.of(ngram)
        return fit_expectation([(point.ngram, point.guesses, point.tokens_per_step) for point in own])

    @property
    def wrong(self) -> list[Mismatch]:
        """Mismatches that rounding does not excuse: all in float32 and float64, else those that are no near ties."""
        return [each for each in self.mismatches if self.model.dtype in _EXACT or not each.near_tie]

    @property
    def fits(self) -> dict[str, Any]:
        """The fitted laws, for JSON; what is infinite is None there."""
        return {
            "lines": {str(n): asdict(line) for n in self.ngrams if (line := self.line(n)) is not None},
            "expectation": _finite(self.expectation()),
            "expectation_by_ngram": {str(n): _finite(self.expectation(n)) for n in self.ngrams},
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the record with its fits."""
        return {"schema": SCHEMA, **asdict(self), "fits": self.fits}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all; raises `InputError` where that fails."""
        record_file.save(path, SCHEMA, self, fits=self.fits)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scaling:
        """Read what `save` wrote; the fits are computed again.

        Raises:
            InputError: it cannot be read, or is something else.
        """
        return record_file.load(path, SCHEMA, cls, ignored=frozenset({"fits"}))


def _finite(found: Expectation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**asdict(found), "f": found.f if math.isfinite(found.f) else None}
