"""What is known of how tokens per step grow with the tokens fed: the records behind `scaling.json`, and their fits.

Nothing in them was timed: with greedy decoding tokens per step depend on model and text, not on the machine.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lade.bench.fit import Expectation, Line, fit_expectation, fit_line
from lade.bench.results import Environment, Mismatch, Model, Settings, Workload
from lade.errors import InputError

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
        complete: whether all sizes that were asked for last are there.
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the record with the fits; what is infinite is None there."""
        fits = {
            "lines": {str(n): asdict(line) for n in self.ngrams if (line := self.line(n)) is not None},
            "expectation": _finite(self.expectation()),
            "expectation_by_ngram": {str(n): _finite(self.expectation(n)) for n in self.ngrams},
        }
        return {"schema": SCHEMA, **asdict(self), "fits": fits}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            InputError: it cannot be written.
        """
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as problem:
            raise InputError(f"{str(path)!r} cannot be written ({problem}): give another --out") from problem

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scaling:
        """Read what `save` wrote; the fits are computed anew.

        Raises:
            InputError: it cannot be read, or is something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as problem:
            raise InputError(f"cannot read {str(path)!r} ({problem}): give another --out") from problem
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise InputError(f"{str(path)!r} is not of schema {SCHEMA}: give another --out")
        found.pop("fits", None)
        try:
            parts = {name: kind(**found[name]) for name, kind in _ONE.items()}
            lists = {name: [kind(**each) for each in found[name]] for name, kind in _MANY.items()}
            return cls(**{**found, **parts, **lists})
        except (TypeError, KeyError, AttributeError) as problem:
            raise InputError(f"{str(path)!r} is damaged ({problem}): give another --out") from problem


_ONE: dict[str, Any] = {"environment": Environment, "model": Model, "settings": Settings, "workload": Workload}
_MANY: dict[str, Any] = {"references": Reference, "points": Point, "mismatches": Mismatch}


def _finite(found: Expectation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**asdict(found), "f": found.f if math.isfinite(found.f) else None}
