"""Breakdown of a run: acceptance by position and source, gain against cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from lade_lab.results import Results
from lade_lab.summary import Summary

SOURCES = ("prompt", "text", "memory", "pool", "window", "bonus")
"""Who may propose a token after the root, in the order in which they are shown; `bonus`: the model itself."""


def acceptance(results: Results, method: str, workload: str | None = None) -> list[dict[str, float]]:
    """For each place in a step (the first is the one after the root), the share of steps that emitted a token there.

    Returns:
        One dictionary a place: sources, in the order of `SOURCES`, to shares of the method's steps. Their sum falls
        from place to place, and all of them together are its tokens per step. Empty where sources were not recorded.
    """
    samples = [sample for sample in results.of(method, workload) if sample.sources]
    steps = sum(sample.steps for sample in samples)
    places: list[Counter[str]] = []
    for sample in samples:
        for place, counts in enumerate(sample.sources):
            if place == len(places):
                places.append(Counter())
            places[place].update(counts)
    if not steps:
        return []
    return [{source: counts[source] / steps for source in _ordered(counts)} for counts in places]


def _ordered(counts: Counter[str]) -> list[str]:
    present = [source for source, count in counts.items() if count]
    return [each for each in SOURCES if each in present] + sorted(set(present) - set(SOURCES))


Kind = Literal["gain", "loss", "even"]


@dataclass(frozen=True)
class Point:
    """A method; or several that share a place, as all do that feed one token.

    Attributes:
        name: of all of them.
        fed: tokens fed per step.
        gained: tokens per step.
        kind: whether the place lies above the break-even of the method, or below it; "even" where one token is fed, or
            nothing was measured that would tell.
        even: tokens per step at which it would be as fast as one token a step; None where that is not known.
    """

    name: str
    fed: float
    gained: float
    kind: Kind
    even: float | None = None


def points_of(summary: Summary) -> list[Point]:
    """All methods that made steps, over all workloads; methods that share a place share a point.

    Break-evens are from the run's own steps: their time by that of the base's, which feeds one token.
    """
    places: dict[tuple[float, float, Kind, float | None], list[str]] = {}
    for row in summary.overall.rows:
        if row.fed_per_step is not None and row.tokens_per_step is not None:
            fed, gained = round(row.fed_per_step, 2), round(row.tokens_per_step, 2)
            even = None if fed == 1 or row.step_cost is None else round(row.step_cost, 2)
            kind: Kind = "even" if even is None else "loss" if gained < even else "gain"
            places.setdefault((fed, gained, kind, even), []).append(row.method)
    return [Point(", ".join(names), *place) for place, names in places.items()]
