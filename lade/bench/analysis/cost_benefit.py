"""What methods feed and what they gain by it, against what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lade.bench.analysis.summary import Summary

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
