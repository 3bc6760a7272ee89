"""Draw one iteration of the lookahead window, as docs/how-it-works.md shows it.

    python scripts/draw_window.py docs/images

The window is the library's own, on the toy text of `draw_step.py`; nothing in the picture is drawn by hand. On the left
what one of its cells sees, in the middle what the pass yields, on the right the window of the next step. The SVG
suits light and dark pages.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from draw_step import COLOURS, ON_COLOUR, text_and_followers
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from lade.decoding.drafting.lookahead import Window
from lade_lab.report.theme import LIGHT, RC, as_svg

COLUMNS, NGRAM = 4, 4
LOOKED_AT = (2, 2)  # row and column of the cell whose sight is shown
NEW = "#2da44e"


@dataclass(frozen=True)
class Iteration:
    """One step of the window, in words.

    Attributes:
        before, after: `[N-1][W]`, its rows.
        new: `[W]`, what the model chose at the last row.
        shed: the n-grams that the columns spelled.
    """

    before: list[list[str]]
    new: list[str]
    shed: list[list[str]]
    after: list[list[str]]


def iteration() -> Iteration:
    """The step that leads to the tree of `draw_step.py`; the model knows nothing but which word follows which."""
    names, ids, follow = text_and_followers()
    window = Window(COLUMNS, NGRAM, ids[0], ids, random.Random(7))
    while not window.full:
        window.advance(ids[0], [follow.get(token, ids[0]) for token in window.rows[-1]])
    before = worded(window.rows, names)
    new = [follow.get(token, ids[0]) for token in window.rows[-1]]
    shed = window.advance(ids[0], new)
    return Iteration(before, worded([new], names)[0], worded(shed, names), worded(window.rows, names))


def worded(rows: list[list[int]] | list[tuple[int, ...]], names: list[str]) -> list[list[str]]:
    return [[names[token] for token in row] for row in rows]


def draw_rows(axes: Axes, rows: list[list[str]], sight: bool = False) -> None:
    """Rows of cells, each under the position it is a guess for."""
    for row, words in enumerate(rows):
        axes.text(-0.55, -row, f"row {row}", ha="right", va="center", fontsize=8, color=LIGHT.ink)
        for column, word in enumerate(words):
            current = row == column == 0
            seen = (row == 0 and column <= LOOKED_AT[1]) or (column == LOOKED_AT[1] and row <= LOOKED_AT[0])
            face = COLOURS["root" if current else "window"]
            cell(axes, column + row, -row, word, face, 1.0 if seen or not sight else 0.3)
            if sight and (row, column) == LOOKED_AT:
                frame = {"fill": False, "edgecolor": LIGHT.ink, "linewidth": 1.6}
                axes.add_patch(Rectangle((column + row - 0.46, -row - 0.36), 0.92, 0.72, **frame))


def cell(axes: Axes, x: float, y: float, word: str, face: str, alpha: float = 1.0) -> None:
    axes.add_patch(Rectangle((x - 0.44, y - 0.34), 0.88, 0.68, facecolor=face, alpha=alpha, linewidth=0))
    axes.text(x, y, word, ha="center", va="center", fontsize=8, color=ON_COLOUR)


def frame(axes: Axes, title: str) -> None:
    """The positions above, the title above them; all panels to one scale."""
    last = COLUMNS + NGRAM - 2
    for position in range(last + 1):
        axes.text(position, 0.62, f"P+{position}" if position else "P", ha="center", fontsize=7.5, color=LIGHT.ink)
    axes.set_xlim(-1.6, last + 0.6)
    axes.set_ylim(-NGRAM - 1.35, 1.0)
    axes.set_axis_off()
    axes.set_title(title, color=LIGHT.ink, fontsize=10)


def draw(figure_axes: list[Axes], step: Iteration) -> None:
    left, middle, right = figure_axes
    draw_rows(left, step.before, sight=True)
    frame(left, "what a cell sees: row 0, then its own column")

    draw_rows(middle, step.before)
    last = len(step.before)
    for column, word in enumerate(step.new):
        x = column + last
        cell(middle, x, -last, word, NEW)
        arrow = {"arrowstyle": "-|>", "mutation_scale": 8, "color": LIGHT.ink, "linewidth": 0.8}
        middle.add_patch(FancyArrowPatch((x - 1 + 0.2, 0.66 - last), (x - 0.2, 0.36 - last), **arrow))
    middle.text(-0.55, -last, "new", ha="right", va="center", fontsize=8, color=LIGHT.ink)
    middle.text(-1.3, -last - 0.75, "n-grams that the columns spelled:", fontsize=8, color=LIGHT.ink, va="center")
    for column, words in enumerate(step.shed):
        x, y = (-1.3, 2.6)[column % 2], -last - 1.2 - 0.45 * (column // 2)
        middle.text(x, y, " ".join(words), fontsize=8, color=NEW, va="center")
    frame(middle, "the model's choices at the last row")

    draw_rows(right, step.after)
    frame(right, "the next step: rows move up by one")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(RC):
        figure = Figure(figsize=(13.5, 3.4))
        draw(list(figure.subplots(1, 3)), iteration())
        figure.tight_layout()
        (folder / "window.svg").write_text(as_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
