"""The scaling law as a picture: tokens per step against tokens fed, and against guesses with the fitted formula."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lade.bench.report.theme import LIGHT, RC, as_svg
from lade.bench.scaling.records import Scaling
from lade.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^v<>"
_CURVE_POINTS = 100


def save_figures(scaling: Scaling, folder: Path) -> list[Path]:
    """Draw it as an SVG that suits light and dark pages, and as PNG.

    Args:
        scaling: has one point at least.
        folder: where to put `scaling.svg` and `scaling.png`.

    Returns:
        The files.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: a file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
    from matplotlib import rc_context

    svg, png = folder / "scaling.svg", folder / "scaling.png"
    try:
        with rc_context(RC):
            figure = draw(scaling)
            svg.write_text(as_svg(figure), encoding="utf-8")
            figure.savefig(png, dpi=144, metadata={"Software": None})
    except OSError as problem:
        raise InputError(f"figures cannot be written to {str(folder)!r} ({problem}): give another --out") from problem
    return [svg, png]


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
