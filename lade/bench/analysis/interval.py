"""A mean ratio, and how sure of it one can be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["faster", "slower", "no difference seen"]

_RESAMPLES = 10_000
_BLOCK = 1_000  # resamples at a time, to keep memory small
_EXACT = 1e-9  # ratios that vary less than this do not vary


@dataclass(frozen=True)
class Interval:
    """A ratio and what it may be: B over A, above 1 is faster.

    Attributes:
        ratio: geometric mean over the units.
        low, high: the interval's ends; 0 and infinite where there are too few units to say anything.
        units: how many there are: prompts, or single answers.
    """

    ratio: float
    low: float
    high: float
    units: int

    @property
    def verdict(self) -> Verdict:
        """Whether the interval leaves out 1."""
        return "slower" if self.high < 1.0 else "faster" if self.low > 1.0 else "no difference seen"


def interval_of(logs: Iterable[float], alpha: float, generator: np.random.Generator) -> Interval:
    """The geometric mean of ratios, and its studentized bootstrap interval.

    Args:
        logs: logarithm of the ratio, one for each unit.
        alpha: how often the interval may miss.
        generator: draws the resamples.
    """
    x = np.asarray(list(logs), dtype=float)
    if not len(x):
        return Interval(1.0, 0.0, math.inf, 0)
    mean, count = float(x.mean()), len(x)
    if count < 2:
        return Interval(math.exp(mean), 0.0, math.inf, count)
    error = float(x.std(ddof=1)) / math.sqrt(count)
    if error < _EXACT:
        return Interval(math.exp(mean), math.exp(mean), math.exp(mean), count)
    low, high = np.quantile(_studentized(x, generator), [alpha / 2, 1 - alpha / 2], method="inverted_cdf")
    return Interval(math.exp(mean), _exp(mean - float(high) * error), _exp(mean - float(low) * error), count)


def _studentized(x: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """How many standard errors of their own the means of resamples lie from the mean, [_RESAMPLES].

    Infinite, of either sign, for a resample of a single value: it says nothing about spread.
    """
    found = []
    for _ in range(_RESAMPLES // _BLOCK):
        drawn = x[generator.integers(len(x), size=(_BLOCK, len(x)))]
        distance, error = drawn.mean(axis=1) - x.mean(), drawn.std(axis=1, ddof=1) / math.sqrt(len(x))
        flat = error < _EXACT
        found.append(np.where(flat, np.copysign(np.inf, distance), distance / np.where(flat, 1.0, error)))
    return np.concatenate(found)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf
