"""The scaling law as a picture: tokens per step against tokens fed, and against guesses with the fitted formula."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lade.bench.report.theme import DARK, LIGHT, Theme
from lade.bench.scaling.records import Scaling
from lade.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^v<>"
_CURVE_POINTS = 100


def save_figures(scaling: Scaling, folder: Path) -> list[Path]:
    """Draw it light and dark, as SVG and PNG.

    Args:
        scaling: has one point at least.
        folder: where to put `scaling_light.svg` and so on.

    Returns:
        The files.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: a file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
    from matplotlib import rc_context

    files = []
    for theme in (LIGHT, DARK):
        svg, png = (folder / f"scaling_{theme.name}.{form}" for form in ("svg", "png"))
        try:
            with rc_context({"svg.hashsalt": "lade"}):  # the same picture gives the same file
                figure = draw(scaling, theme)
                figure.savefig(svg, metadata={"Date": None, "Creator": None})
                figure.savefig(png, dpi=144, metadata={"Software": None})
        except OSError as problem:
            raise InputError(
                f"figures cannot be written to {str(folder)!r} ({problem}): give another --out"
            ) from problem
        files += [svg, png]
    return files


def draw(scaling: Scaling, theme: Theme = LIGHT) -> Figure:
    """The picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor=theme.paper)
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, scaling, theme)
    _expectation(right, scaling, theme)
    _dress(left, theme, legend="upper left")  # S rises with T
    _dress(right, theme, legend="lower right")
    left.set_ylabel("tokens per step, S")
    figure.suptitle(
        f"{scaling.model.name}, {scaling.model.dtype}, {scaling.workload.prompts} prompts of {scaling.workload.name}",
        color=theme.ink,
        fontsize=11,
    )
    return figure


def _lines(axes: Axes, scaling: Scaling, theme: Theme) -> None:
    for number, ngram in enumerate(scaling.ngrams):
        points, line = scaling.of(ngram), scaling.line(ngram)
        fed = [point.fed_per_step for point in points]
        label = f"N = {ngram}" + ("" if line is None else f": {line.slope:.2f} a doubling, R² {line.r_squared:.3f}")
        axes.plot(fed, [point.tokens_per_step for point in points], label=label, linestyle="", **_mark(number, theme))
        if line is not None:
            axes.plot(
                fed, [line.tokens_per_step(each) for each in fed], color=_mark(number, theme)["color"], linewidth=1
            )
    _logarithmic(axes, [point.fed_per_step for point in scaling.points])
    axes.set_xlabel("tokens fed per step, T")
    axes.set_title("lines: least squares of S on log2 T", fontsize=10)


def _expectation(axes: Axes, scaling: Scaling, theme: Theme) -> None:
    found = scaling.expectation()
    guesses = sorted({point.guesses for point in scaling.points})
    ratio = guesses[-1] / guesses[0]
    curve = [guesses[0] * ratio ** (place / _CURVE_POINTS) for place in range(_CURVE_POINTS + 1)]
    for number, ngram in enumerate(scaling.ngrams):
        points = scaling.of(ngram)
        made = [point.tokens_per_step for point in points]
        axes.plot([point.guesses for point in points], made, label=f"N = {ngram}", linestyle="", **_mark(number, theme))
        if found is not None:
            rates = [found.tokens_per_step(ngram, each) for each in curve]
            axes.plot(curve, rates, color=_mark(number, theme)["color"], linewidth=1)
    _logarithmic(axes, guesses)
    axes.set_xlabel("guesses and window columns, G = W")
    fit = "too few sizes" if found is None else rf"$\alpha$ = {found.alpha:.3f}, f = {found.f:.2f}, rms {found.rms:.3f}"
    axes.set_title(f"curves: the formula, {fit}", fontsize=10)


def _mark(number: int, theme: Theme) -> dict[str, Any]:
    colors = (*theme.lines, theme.loss, theme.even)
    return {"color": colors[number % len(colors)], "marker": _MARKS[number % len(_MARKS)], "markersize": 5}


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis whose ticks are plain numbers."""
    ticks = [2**power for power in range(12) if min(values) / 2 < 2**power < max(values) * 2]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _dress(axes: Axes, theme: Theme, legend: Literal["upper left", "lower right"]) -> None:
    axes.set_facecolor(theme.paper)
    axes.grid(color=theme.soft, linewidth=0.6)
    axes.tick_params(colors=theme.ink, which="both", labelsize=9)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(theme.ink)
    for side, spine in axes.spines.items():
        spine.set_color(theme.soft)
        spine.set_visible(side in ("left", "bottom"))
    for text in axes.legend(frameon=False, fontsize=8, loc=legend).get_texts():
        text.set_color(theme.ink)
