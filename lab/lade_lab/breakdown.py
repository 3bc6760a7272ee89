"""Breakdown of a run: acceptance by position and source, single answers, gain against cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from lade_lab.results import Results, Sample
from lade_lab.summary import CALL, Summary, key_of, speedup

SOURCES = ("prompt", "text", "memory", "pool", "window", "bonus")
"""Who may propose a token after the root, in the order in which they are shown; `bonus`: the model itself."""


def acceptance(results: Results, method: str, workload: str | None = None) -> list[dict[str, float]]:
    """For each place in a step (the first is the one after the root), the share of steps that emitted a token there.

    Args:
        results: a run.
        method: its name.
        workload: only this one.

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


@dataclass(frozen=True)
class Cell:
    """One method on one answer.

    Attributes:
        speedup: of the whole call over the reference, median over repeats; None if one of the two is missing.
        tokens_per_step: None for an answer of one token.
        differs: whether some repeat differs from the reference by more than rounding explains.
        near_tie: whether some repeat differs where rounding decides.
    """

    speedup: float | None
    tokens_per_step: float | None
    differs: bool
    near_tie: bool


@dataclass(frozen=True)
class Answer:
    """One answer of all methods; they are distinguished by everything but the repeat.

    Attributes:
        workload, prompt, turn, seed: of the samples.
        prompt_tokens, new_tokens: as the reference has them, else the first method that wrote it.
        distinct_4grams: likewise.
        cells: by method; those without samples are missing.
    """

    workload: str
    prompt: str
    turn: int
    seed: int
    prompt_tokens: int
    new_tokens: int
    distinct_4grams: float
    cells: dict[str, Cell]


def answers(results: Results) -> list[Answer]:
    """All answers in the order in which they were written."""
    groups: dict[tuple[str, str, int, int], list[Sample]] = {}
    for sample in results.samples:
        groups.setdefault(key_of(sample)[:4], []).append(sample)
    differing: dict[tuple[str, str, int, int, str], set[bool]] = {}
    for each in results.mismatches:
        place = each.workload, each.prompt, each.turn, each.seed, each.method
        differing.setdefault(place, set()).add(each.near_tie)
    return [_answer(results, key, samples, differing) for key, samples in groups.items()]


def _answer(
    results: Results,
    key: tuple[str, str, int, int],
    samples: list[Sample],
    differing: dict[tuple[str, str, int, int, str], set[bool]],
) -> Answer:
    reference = {key_of(sample): sample for sample in samples if sample.method == results.reference}
    first = next(iter(reference.values()), samples[0])
    cells = {}
    for method in dict.fromkeys(sample.method for sample in samples):
        own = [sample for sample in samples if sample.method == method]
        faster, kinds = speedup(own, reference, CALL), differing.get((*key, method), set())
        per_step = [sum(sample.accepted) / sample.steps for sample in own if sample.steps]
        cells[method] = Cell(
            faster.each.median if faster else None,
            fmean(per_step) if per_step else None,
            differs=False in kinds,
            near_tie=True in kinds,
        )
    return Answer(*key, first.prompt_tokens, first.new_tokens, first.distinct_4grams, cells)


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
