"""The paper's scaling law (arXiv 2402.02057, section 4): records, fit, figure.

A line: S against the logarithm of the tokens fed, T. And an expectation: if each guessed token is right with
probability α, whatever came before, and b guesses of γ = N - 1 tokens are verified at once, a step yields

    E = (γ + 1) - Σ_{i=1..γ} (1 - α^i)^b          tokens, and with good guesses in one step of f only

    S = (f - 1 + E) / f

Nothing in them was timed: with greedy decoding tokens per step depend on model and text, not on the machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import correlation, linear_regression
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lade.errors import InputError, MissingExtraError
from lade_lab import results
from lade_lab.report.theme import LIGHT, RC, save_figure
from lade_lab.results import Environment, Mismatch, Model, Settings, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    """Least squares of S on log2 T; None for fewer than two different T."""
    if len(set(fed)) < 2:
        return None
    logs = [math.log2(each) for each in fed]
    slope, intercept = linear_regression(logs, rates)
    return Line(slope, intercept, correlation(logs, rates) ** 2 if len(set(rates)) > 1 else 1.0, len(logs))


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


SCHEMA = "lade-scaling/1"
NAME = "scaling.json"
_EXACT = ("float32", "float64")  # in which every answer must be plain decoding's


@dataclass(frozen=True)
class Reference:
    """Plain decoding's answer to a prompt, by hashes; see `lade_lab.results.Sample`."""

    prompt: str
    prompt_sha256: str
    new_tokens: int
    output_sha256: str


@dataclass(frozen=True)
class Point:
    """One size, on all prompts: for each of them the passes after prefill, and what these were fed and emitted."""

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
    """Results so far, as stored in `scaling.json`.

    Attributes:
        created: ISO 8601, UTC.
        command: the command line.
        environment, model, settings, workload: as in a benchmark.
        prompt_ngrams: whether n-grams of the prompt were among the guesses.
        references: plain decoding's answers.
        points: in the order of measurement.
        mismatches: answers that differ from plain decoding's.
        complete: whether all sizes of the last run are there.
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

    @property
    def fits(self) -> dict[str, Any]:
        """The fitted laws, for JSON; what is infinite is None there."""
        return {
            "lines": {str(n): asdict(line) for n in self.ngrams if (line := self.line(n)) is not None},
            "expectation": _finite(self.expectation()),
            "expectation_by_ngram": {str(n): _finite(self.expectation(n)) for n in self.ngrams},
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the record with its fits."""
        return {"schema": SCHEMA, **asdict(self), "fits": self.fits}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all; raises `InputError` where that fails."""
        results.save(path, SCHEMA, self, fits=self.fits)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scaling:
        """Read what `save` wrote; the fits are computed again.

        Raises:
            InputError: it cannot be read, or is something else.
        """
        return results.load(path, SCHEMA, cls, ignored=frozenset({"fits"}))


def _finite(found: Expectation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**asdict(found), "f": found.f if math.isfinite(found.f) else None}


_MARKS = "osD^v<>"
_CURVE_POINTS = 100


def save_figures(scaling: Scaling, folder: Path) -> list[Path]:
    """Draw it as an SVG that suits light and dark pages, and as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: a file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
    from matplotlib import rc_context

    try:
        with rc_context(RC):
            return save_figure(draw(scaling), folder, "scaling")
    except OSError as problem:
        raise InputError(f"figures cannot be written to {str(folder)!r} ({problem}): give another --out") from problem


def draw(scaling: Scaling) -> Figure:
    """The picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, scaling)
    _expectation(right, scaling)
    _dress(left, legend="upper left")  # S rises with T
    _dress(right, legend="lower right")
    left.set_ylabel("tokens per step, S")
    figure.suptitle(
        f"{scaling.model.name}, {scaling.model.dtype}, {scaling.workload.prompts} prompts of {scaling.workload.name}",
        fontsize=11,
    )
    return figure


def _lines(axes: Axes, scaling: Scaling) -> None:
    for number, ngram in enumerate(scaling.ngrams):
        points, line = scaling.of(ngram), scaling.line(ngram)
        fed = [point.fed_per_step for point in points]
        label = f"N = {ngram}" + ("" if line is None else f": {line.slope:.2f} a doubling, R² {line.r_squared:.3f}")
        axes.plot(fed, [point.tokens_per_step for point in points], label=label, linestyle="", **_mark(number))
        if line is not None:
            axes.plot(fed, [line.tokens_per_step(each) for each in fed], color=_mark(number)["color"], linewidth=1)
    _logarithmic(axes, [point.fed_per_step for point in scaling.points])
    axes.set_xlabel("tokens fed per step, T")
    axes.set_title("lines: least squares of S on log2 T", fontsize=10)


def _expectation(axes: Axes, scaling: Scaling) -> None:
    found = scaling.expectation()
    guesses = sorted({point.guesses for point in scaling.points})
    ratio = guesses[-1] / guesses[0]
    curve = [guesses[0] * ratio ** (place / _CURVE_POINTS) for place in range(_CURVE_POINTS + 1)]
    for number, ngram in enumerate(scaling.ngrams):
        points = scaling.of(ngram)
        made = [point.tokens_per_step for point in points]
        axes.plot([point.guesses for point in points], made, label=f"N = {ngram}", linestyle="", **_mark(number))
        if found is not None:
            rates = [found.tokens_per_step(ngram, each) for each in curve]
            axes.plot(curve, rates, color=_mark(number)["color"], linewidth=1)
    _logarithmic(axes, guesses)
    axes.set_xlabel("guesses and window columns, G = W")
    fit = "too few sizes" if found is None else f"alpha {found.alpha:.3f}, f {found.f:.2f}, rms {found.rms:.3f}"
    axes.set_title(f"curves: the formula, {fit}", fontsize=10)


def _mark(number: int) -> dict[str, Any]:
    colors = (*LIGHT.lines, LIGHT.loss, LIGHT.even)
    return {"color": colors[number % len(colors)], "marker": _MARKS[number % len(_MARKS)], "markersize": 5}


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis whose ticks are plain numbers."""
    ticks = [2**power for power in range(12) if min(values) / 2 < 2**power < max(values) * 2]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _dress(axes: Axes, legend: Literal["upper left", "lower right"]) -> None:
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc=legend)
