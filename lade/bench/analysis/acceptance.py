"""Which places of a step brought tokens, and who had proposed them."""

from __future__ import annotations

from collections import Counter

from lade.bench.results import Results

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
