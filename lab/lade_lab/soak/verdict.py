"""What samples of a soak say: slopes, and which bars are missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import linear_regression, median
from typing import Any, NamedTuple

WARM_UP_MINUTES = 10.0
MOST_MB_A_MINUTE = 2.0
MOST_MORE = 2
"""Descriptors and threads that may be there more at the end than at the beginning."""
SLOWEST = {"probe_ms": 1.5, "probe_processor_ms": 1.25}
"""Times of the probe at the end by those at the beginning; processor time is not that of others on the machine."""

Sample = Mapping[str, Any]


class Finding(NamedTuple):
    """One line of the verdict."""

    what: str
    found: str
    bar: str
    passed: bool


def warm(samples: Sequence[Sample]) -> list[Sample]:
    """The samples after the first ten minutes, or after the first sixth of a shorter run."""
    if not samples:
        return []
    begin = min(WARM_UP_MINUTES, samples[-1]["minute"] / 6)
    return [each for each in samples if each["minute"] >= begin]


def slope(samples: Sequence[Sample], name: str) -> float:
    """Growth a minute, by least squares."""
    return linear_regression([each["minute"] for each in samples], [each[name] for each in samples]).slope


def ends(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Medians of the first and of the last third."""
    third = max(1, len(samples) // 3)
    return median(each[name] for each in samples[:third]), median(each[name] for each in samples[-third:])


def verdict(samples: Sequence[Sample]) -> list[Finding]:
    """Hold the samples after the warm-up to the bars; without three of them nothing can be said."""
    kept = warm(samples)
    if len(kept) < 3:
        return [Finding("samples after the warm-up", str(len(kept)), "3 at least", False)]
    last = kept[-1]
    growth = slope(kept, "rss_mb")
    found = [
        Finding(
            "memory (RSS) grows", f"{growth:+.2f} MB a minute", f"< {MOST_MB_A_MINUTE:g}", growth < MOST_MB_A_MINUTE
        )
    ]
    for name in ("descriptors", "threads"):
        begin, end = ends(kept, name)
        found.append(Finding(name, f"{begin:g} to {end:g}", f"{MOST_MORE} more at most", end - begin <= MOST_MORE))
    for name, what in (("probe_ms", "latency of the probe"), ("probe_processor_ms", "processor time of the probe")):
        begin, end = ends(kept, name)
        times, bar = f"{begin:.0f} to {end:.0f} ms", f"{SLOWEST[name]:g} times at most"
        found.append(Finding(what, times, bar, end <= SLOWEST[name] * begin))
    unequal = sum(not each["equal"] for each in samples)
    compared = f"{last['different']} of {last['compared']:,} differ"
    return [
        *found,
        Finding("probe's answers, greedy and sampled", f"{unequal} of {len(samples)} differ", "equal", not unequal),
        Finding("answers to repeated requests", compared, "equal", not last["different"]),
        Finding("requests lost", f"{last['lost']} of {last['requests']:,}", "none", not last["lost"]),
    ]
