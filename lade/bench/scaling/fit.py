"""The paper's scaling law, fitted to measured tokens per step (arXiv 2402.02057, section 4).

A line: S against the logarithm of the tokens fed, T. And an expectation: if each guessed token is right with
probability α, whatever came before, and b guesses of γ = N - 1 tokens are verified at once, a step yields

    E = (γ + 1) - Σ_{i=1..γ} (1 - α^i)^b          tokens, and with good guesses in one step of f only

    S = (f - 1 + E) / f
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_FEWEST = 3
_GRID = 401  # values of α in a round of the search; the next one looks between the neighbours of the best
_ROUNDS = 5  # the last one's values lie closer than 1e-11


@dataclass(frozen=True)
class Line:
    """S = intercept + slope · log2 T.

    Attributes:
        slope: tokens per step that a doubling of the tokens fed is worth.
        intercept: where it meets T = 1; plain decoding has 1 there.
        r_squared: the share of the variance that it explains; 1.0 if there is none.
        points: how many it was fitted to.
    """

    slope: float
    intercept: float
    r_squared: float
    points: int

    def tokens_per_step(self, fed: float) -> float:
        """S, for T tokens fed."""
        return self.intercept + self.slope * math.log2(fed)


@dataclass(frozen=True)
class Expectation:
    """The formula, with its two parameters as fitted.

    Attributes:
        alpha: α, how often a guessed token is right, from 0 to 1.
        f: one step in this many has good guesses; at least 1, infinite if none ever had.
        rms: root of the mean squared error, in tokens per step.
        worst: the largest error.
        points: how many it was fitted to.
    """

    alpha: float
    f: float
    rms: float
    worst: float
    points: int

    def tokens_per_step(self, ngram: int, candidates: float) -> float:
        """S, for n-grams of N tokens and b candidates."""
        return 1.0 + (expected(self.alpha, ngram, candidates) - 1.0) / self.f


def expected(alpha: float, ngram: int, candidates: float) -> float:
    """E: tokens that a step with good guesses yields, the bonus token included.

    Args:
        alpha: α.
        ngram: N; a guess has γ = N - 1 tokens.
        candidates: b, guesses verified at once.
    """
    return float(_expected(np.array(alpha), ngram, candidates))


def _expected(alpha: Vector, ngram: int, candidates: float) -> Vector:
    missed = [(1.0 - alpha**place) ** candidates for place in range(1, ngram)]
    return np.asarray(ngram - sum(missed))


def fit_line(fed: Sequence[float], rates: Sequence[float]) -> Line | None:
    """Least squares of S on log2 T; None for fewer than two different T.

    Args:
        fed: T of each point, at least 1.
        rates: S of each point.
    """
    x, y = np.log2(np.asarray(fed, dtype=float)), np.asarray(rates, dtype=float)
    if len(x) < 2 or np.ptp(x) == 0.0:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    intercept = float(y.mean() - slope * x.mean())
    left, total = float(((y - intercept - slope * x) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return Line(slope, intercept, 1.0 - left / total if total > 0.0 else 1.0, len(x))


def fit_expectation(points: Sequence[tuple[int, float, float]]) -> Expectation | None:
    """Least squares of the formula; None for fewer than three sizes, which its two parameters would fit anyhow.

    For a given α the best 1 / f is known, since S - 1 is proportional to it: what is searched for is α alone, on grids
    that get finer and finer.

    Args:
        points: (N, b, S) of each.
    """
    if len({(ngram, candidates) for ngram, candidates, _ in points}) < _FEWEST:
        return None
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        alphas = np.linspace(low, high, _GRID)
        shares, errors = _best_shares(alphas, points)
        best = int((errors**2).sum(axis=1).argmin())
        low, high = float(alphas[max(0, best - 1)]), float(alphas[min(best + 1, _GRID - 1)])
    return Expectation(
        alpha=float(alphas[best]),
        f=1.0 / float(shares[best]) if shares[best] > 0.0 else math.inf,
        rms=float(np.sqrt((errors[best] ** 2).mean())),
        worst=float(np.abs(errors[best]).max()),
        points=len(points),
    )


def _best_shares(alphas: Vector, points: Sequence[tuple[int, float, float]]) -> tuple[Vector, Vector]:
    """For each of A values of α the 1 / f from 0 to 1 that fits best, [A], and the errors it leaves, [A, points]."""
    gains = np.stack([_expected(alphas, ngram, candidates) - 1.0 for ngram, candidates, _ in points], axis=1)
    seen = np.array([rate - 1.0 for _, _, rate in points])
    squares = (gains**2).sum(axis=1)
    shares = np.clip((gains @ seen) / np.where(squares > 0.0, squares, 1.0), 0.0, 1.0)
    return shares, shares[:, None] * gains - seen
