"""What methods feed and what they gain by it, against what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lade.bench.analysis.curve import Curve, curve_of, curves_of
from lade.bench.analysis.summary import Summary
from lade.bench.results import Results

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


def points_of(results: Results, summary: Summary) -> list[Point]:
    """All methods that made steps, over all workloads; gains and losses by the step curve of their weights."""
    packed = {method.name: method.packed for method in results.methods}
    places: dict[tuple[float, float, Kind], list[str]] = {}
    for row in summary.overall.rows:
        if row.fed_per_step is not None and row.tokens_per_step is not None:
            fed, gained = round(row.fed_per_step, 2), round(row.tokens_per_step, 2)
            kind = _kind(curve_of(results, packed[row.method]), fed, gained)
            places.setdefault((fed, gained, kind), []).append(row.method)
    return [Point(", ".join(names), *place) for place, names in places.items()]


def timed_points(summary: Summary) -> list[Point]:
    """The same with break-evens from the run's own steps: their time by that of the base's, which feeds one token."""
    places: dict[tuple[float, float, Kind, float | None], list[str]] = {}
    for row in summary.overall.rows:
        if row.fed_per_step is not None and row.tokens_per_step is not None:
            fed, gained = round(row.fed_per_step, 2), round(row.tokens_per_step, 2)
            even = None if fed == 1 or row.step_cost is None else round(row.step_cost, 2)
            kind: Kind = "even" if even is None else "loss" if gained < even else "gain"
            places.setdefault((fed, gained, kind, even), []).append(row.method)
    return [Point(", ".join(names), *place) for place, names in places.items()]


def break_even(results: Results) -> list[tuple[int, Curve]]:
    """The lines above which a step brings more than it costs: one for each kind of weights that a method ran on.

    Returns:
        Each with its number among `curves_of`, so that it may look the same in all pictures.
    """
    every = curves_of(results)
    found = [curve_of(results, packed) for packed in sorted({method.packed for method in results.methods})]
    return [(every.index(curve), curve) for curve in found if curve is not None]


def _kind(curve: Curve | None, fed: float, gained: float) -> Kind:
    if curve is None or fed == 1 or fed > curve.sizes[-1]:
        return "even"
    return "loss" if gained < curve.relative(fed) else "gain"
