"""Figures of a run: SVG and PNG."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lade.errors import MissingExtraError
from lade_lab.breakdown import Point, acceptance, points_of
from lade_lab.report.prose import LOSS, caption, is_loss, workload_name
from lade_lab.report.theme import LIGHT, RC, save_figure
from lade_lab.results import Results
from lade_lab.summary import Row, curves_of, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels from the top left corner."""

CHARACTER = 0.56
"""Width of a character by the size of its font, about."""


@dataclass(frozen=True)
class Spot:
    """Placement of a label: anchored at its start, middle or end, by its distance from the mark."""

    anchor: Literal["start", "middle", "end"]
    dx: float
    dy: float


SPOTS = (
    Spot("start", 10, 4), Spot("end", -10, 4), Spot("middle", 0, -11), Spot("middle", 0, 20), Spot("start", 8, -9),
    Spot("end", -8, -9), Spot("start", 8, 17), Spot("end", -8, 17), Spot("middle", 0, -25), Spot("middle", 0, 34),
)  # fmt: skip
"""The nearest ones first."""


def around(x: float, y: float, reach: float) -> Box:
    """Return the box that a mark covers."""
    return x - reach, y - reach, x + reach, y + reach


def place(name: str, x: float, y: float, size: float, taken: list[Box], sheet: Box) -> Spot:
    """The spot beside a mark where a name covers least of what is there, off the sheet included."""
    boxes = [_box(spot, x, y, len(name) * size * CHARACTER, size) for spot in SPOTS]
    covered = [sum(_shared(box, other) for other in taken) + _area(box) - _shared(box, sheet) for box in boxes]
    best = covered.index(min(covered))
    taken.append(boxes[best])
    return SPOTS[best]


def _box(spot: Spot, x: float, y: float, width: float, size: float) -> Box:
    left = x + spot.dx - {"start": 0.0, "middle": width / 2, "end": width}[spot.anchor]
    return left, y + spot.dy - size, left + width, y + spot.dy + size / 4


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _shared(one: Box, other: Box) -> float:
    """The area that is in both."""
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


MEANINGS = {
    "speedup": "Speed-up of each method, median and middle half of the answers",
    "trade": "Tokens per step against tokens fed per step, and how many break even",
    "step_cost": "Time of a forward pass by the tokens it feeds",
    "acceptance": "Who proposed the accepted tokens, by their place in the step",
}
"""Alternative text of each figure."""

_RATIOS = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DASHES = ("-", "--", ":", "-.")
_MOST_PLACES = 10
_FONT = 9


def save_figures(results: Results, folder: str | os.PathLike[str], names: Collection[str] | None = None) -> list[Path]:
    """Draw what the run has data for.

    Args:
        results: a run, complete or not.
        folder: made if it does not exist. Files are named like `speedup.svg` and `speedup.png`.
        names: names of the pictures in `MEANINGS` to draw; None for all.

    Returns:
        The files.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if not can_draw():
        raise MissingExtraError("matplotlib", "bench")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in _drawn(results, names):
        written += save_figure(figure, folder, name)
    return written


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _drawn(results: Results, names: Collection[str] | None = None) -> Iterator[tuple[str, Figure]]:
    """Every picture that there is data for; each is to be saved before the next one is drawn."""
    from matplotlib import rc_context

    draws: list[Callable[[Results], Figure | None]] = [_speedup, _trade, _step_cost, _acceptance]
    for name, draw in zip(MEANINGS, draws, strict=True):
        with rc_context(RC):
            figure = draw(results) if names is None or name in names else None
            if figure is not None:
                yield name, figure


def _blank(results: Results, width: float, height: float) -> Figure:
    """An empty sheet with the caption below."""
    from matplotlib.figure import Figure

    lines = textwrap.wrap(caption(results), int(width * 17))
    figure = Figure(figsize=(width, height + 0.17 * len(lines)), layout="constrained")
    figure.supxlabel("\n".join(lines), fontsize=7, x=0.01, ha="left", alpha=0.75)
    return figure


def _speedup(results: Results) -> Figure | None:
    """Bars from the line at 1: gains to the right, losses to the left, half as fast as long as twice as fast."""
    summary = summarise(results)
    rows = [
        (f"{workload_name(block)}\n" if not number else "", row)
        for block in summary.blocks
        for number, row in enumerate(row for row in block.rows if row.method != summary.reference)
    ]
    spreads = [row.speedup.each for _, row in rows if row.speedup]
    if not spreads:
        return None
    figure = _blank(results, 7.5, 0.9 + 0.2 * len(rows) + 0.3 * len(summary.blocks))
    axes = figure.subplots()
    low, high = min([0.9, *(each.low for each in spreads)]), max([1.1, *(each.high for each in spreads)])
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.05, high * 1.22)
    ticks = [tick for tick in _RATIOS if low / 1.05 <= tick <= high * 1.05]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    y, places = 0.0, []
    for heading, row in rows:
        if heading:
            y += 1.0
            axes.text(
                -0.01, y, heading.strip(), transform=axes.get_yaxis_transform(), weight="bold", ha="right", va="center"
            )
            y += 1.0
        places.append(y)
        _bar(axes, y, row)
        y += 1.0
    axes.axvline(1, color=LIGHT.ink, linewidth=1.2)
    axes.set_yticks(places, [row.method for _, row in rows])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_ylim(y, 0.3)
    axes.set_title(f"speed-up over {summary.reference}: median and middle half of the answers", fontsize=10, loc="left")
    return figure


def _bar(axes: Axes, y: float, row: Row) -> None:
    if row.speedup is None:
        axes.text(1.02, y, "not measured", va="center", alpha=0.7)
        return
    each = row.speedup.each
    lost = is_loss(each.median)
    axes.barh(y, each.median - 1, left=1, height=0.62, color=LIGHT.loss if lost else LIGHT.gain)
    axes.errorbar(
        each.median,
        y,
        xerr=[[each.median - each.low], [each.high - each.median]],
        color=LIGHT.ink,
        linewidth=1,
        capsize=2,
    )
    value = f"{LOSS} {each.median:.2f}" if lost else f"{each.median:.2f}"
    colour = LIGHT.loss if lost else LIGHT.ink
    spot = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center", "weight": "bold"}
    axes.text(1, y, value, color=colour, **spot)  # type: ignore[arg-type]


def _trade(results: Results) -> Figure | None:
    """A mark for each method; the bar over or under it is its break-even: its step time by that of one token a step."""
    points = points_of(summarise(results))
    if not points:
        return None
    figure = _blank(results, 6.5, 4.2)
    axes = figure.subplots()
    highest = max([2.0, *(each.gained for each in points), *(each.even or 0.0 for each in points)])
    right, top = 1.5 * max([2.0, *(each.fed for each in points)]), 1.12 * highest
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, right)
    axes.set_ylim(0.8, top)
    _size_ticks(axes, right)
    axes.axhline(1, color=LIGHT.soft, linewidth=1)
    for each in points:
        if each.even is not None:
            axes.plot([each.fed] * 2, [each.even, each.gained], color=LIGHT.of(each.kind), alpha=0.55, linewidth=2)
            axes.plot([each.fed / 1.06, each.fed * 1.06], [each.even] * 2, color=LIGHT.ink, linewidth=2.5)
        axes.plot(each.fed, each.gained, "v" if each.kind == "loss" else "o", color=LIGHT.of(each.kind), markersize=7)
    due = any(each.even is not None for each in points)
    axes.set_xlabel(f"tokens fed per step{' (a method gains above its break-even, the short bar)' if due else ''}")
    axes.set_ylabel("tokens per step")
    axes.set_title("tokens per step, and their price", fontsize=10, loc="left")
    figure.draw_without_rendering()  # settles the layout, in which names are then placed
    _place_names(axes, points, (0.95, top), (right, 0.8))
    return figure


def _place_names(axes: Axes, points: list[Point], first: tuple[float, float], last: tuple[float, float]) -> None:
    """Write each method's name beside its mark; `first` and `last` are the corners of the free sheet."""

    def pixels(x: float, y: float) -> tuple[float, float]:
        """In points, downwards."""
        across, up = axes.transData.transform((x, y))
        return float(across) * 72 / axes.figure.dpi, -float(up) * 72 / axes.figure.dpi

    taken: list[Box] = []
    for each in points:
        x, y = pixels(each.fed, each.gained)
        taken.append(around(x, y, 5))
        if each.even is not None:
            level = pixels(each.fed, each.even)[1]
            taken.append((x - 9, min(level, y) - 2, x + 9, max(level, y) + 2))
    for each in points:
        spot = place(each.name, *pixels(each.fed, each.gained), _FONT, taken, (*pixels(*first), *pixels(*last)))
        align = {"start": "left", "middle": "center", "end": "right"}[spot.anchor]
        axes.annotate(each.name, (each.fed, each.gained), (spot.dx, -spot.dy), textcoords="offset points", ha=align)


def _size_ticks(axes: Axes, last: float) -> None:
    ticks = [size for size in _SIZES if size <= last]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()


def _step_cost(results: Results) -> Figure | None:
    curves = curves_of(results)
    if not curves:
        return None
    figure = _blank(results, 6.5, 3.8)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    for number, curve in enumerate(curves):
        colour = LIGHT.lines[number % len(LIGHT.lines)]
        spreads = curve.relative_spreads
        weights = "packed" if curve.packed else "plain"
        label = f"{weights} weights, {curve.cached} cached: {1e3 * curve.seconds(1):.3g} ms for one token"
        low, high = [spread.low for spread in spreads], [spread.high for spread in spreads]
        axes.fill_between(curve.sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        medians = [spread.median for spread in spreads]
        axes.plot(curve.sizes, medians, color=colour, linestyle=_DASHES[number % len(_DASHES)], label=label)
    axes.axhline(1, color=LIGHT.soft, linewidth=1)
    _size_ticks(axes, max(curve.sizes[-1] for curve in curves))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens fed by a forward pass")
    axes.set_ylabel("time, one token = 1")
    axes.set_title("what a step costs", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    return figure


def _acceptance(results: Results) -> Figure | None:
    found = {method.name: acceptance(results, method.name)[:_MOST_PLACES] for method in results.methods}
    found = {name: places for name, places in found.items() if len(places) > 1}
    if not found:
        return None
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = _blank(results, 2.6 * columns, 0.7 + 1.9 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    known = LIGHT.by_source()
    others = (source for places in found.values() for shares in places for source in shares if source not in known)
    colours = known | dict.fromkeys(others, LIGHT.loss)
    for axes, (name, places) in zip(grid, found.items(), strict=False):
        _columns(axes, places, colours)
        axes.set_title(name, fontsize=_FONT, loc="left")
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    seen = [source for source in colours if any(source in shares for places in found.values() for shares in places)]
    handles = [grid[0].bar(0, 0, color=colours[source], label=source) for source in seen]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(seen), frameon=False, fontsize=8, handlelength=1)
    figure.supylabel("steps that emitted a token there, %", fontsize=8)
    return figure


def _columns(axes: Axes, places: list[dict[str, float]], colours: dict[str, str]) -> None:
    for place_number, shares in enumerate(places, start=1):
        below = 0.0
        for source, share in shares.items():
            axes.bar(place_number, 100 * share, bottom=below, width=0.8, color=colours[source])
            below += 100 * share
        axes.text(place_number, below + 2, f"{below:.0f}", ha="center", fontsize=7)
    axes.set_xticks(range(1, len(places) + 1))
    axes.set_yticks([0, 50, 100])
    axes.set_ylim(0, 112)
    axes.tick_params(length=0)
