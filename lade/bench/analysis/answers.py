"""Single answers: how fast each method wrote each of them, and where texts part."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from lade.bench.analysis.speed import CALL, key_of, speedup
from lade.bench.results import Results, Sample


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
