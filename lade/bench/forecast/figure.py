"""A plan as a picture: what steps cost, and what they yield."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lade.bench.forecast.forecast import Prediction
from lade.bench.forecast.roofline import Roofline
from lade.bench.report.theme import LIGHT
from lade.errors import InputError

_MARKS = "osD^v<>"


def draw(roofline: Roofline, predictions: Sequence[Prediction], title: str, out: Path) -> None:
    """Draw t(S)/t(1) and the measured tokens per step: whatever lies above the curve is gained.

    Args:
        roofline: the cost of steps.
        predictions: the methods.
        title: what it is of.
        out: a file whose ending says what it is to be.

    Raises:
        InputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    largest = max([256.0, *(each.fed for each in predictions)])
    sizes = [2 ** (i / 16) for i in range(int(16 * math.log2(largest)) + 1)]
    costs = [roofline.relative(size) for size in sizes]
    axes.plot(sizes, costs, color=LIGHT.ink, label="cost of a step, t(S)/t(1): break-even")
    axes.fill_between(sizes, costs, color=LIGHT.soft, alpha=0.5, linewidth=0)
    colors = (*LIGHT.lines, LIGHT.loss, LIGHT.even)
    for number, (name, members) in enumerate(_series(predictions).items()):
        fed, made = [each.fed for each in members], [each.tokens_per_step for each in members]
        style: dict[str, Any] = {"marker": _MARKS[number % len(_MARKS)], "color": colors[number % len(colors)]}
        axes.plot(fed, made, linewidth=1, label=name, **style)
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(int(math.log2(largest)) + 1)]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_ylim(0, 1.2 * max([2.0, *(each.tokens_per_step for each in predictions)]))
    axes.set_xlabel("tokens fed by a step")
    axes.set_ylabel("tokens per step, and cost in passes of one token")
    axes.set_title(f"{title}: estimated, above the line is gain")
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(out)
    except OSError as problem:
        raise InputError(f"cannot write {str(out)!r} ({problem.strerror or problem}): give another file") from problem


def _series(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Methods whose names differ in what follows the last comma, together."""
    found: dict[str, list[Prediction]] = {}
    for each in predictions:
        found.setdefault(each.name.rpartition(", budget")[0] or each.name, []).append(each)
    return found
