"""Draw one real step: its token tree and the mask, as the README shows them.

    python scripts/draw_step.py docs/images

The tree is grown by the library itself on a toy text; nothing in the picture is drawn by hand. The SVG suits light and
dark pages.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lade.decoding.drafting.lookahead import NGramPool, Window
from lade.decoding.tree import ROOT, TokenTree
from lade_lab.report.theme import LIGHT, RC, as_svg

WORDS = "the cat sat on the mat and the cat ran to a dog in the sun with one red hat".split()  # noqa: SIM905
COLOURS = {"root": "#8c8c8c", "window": "#4c8bf5", "pool": "#f29d38"}
LEGEND = {"root": "current token", "window": "lookahead window", "pool": "guesses from the pool"}
ON_COLOUR = "#fefefe"  # text on coloured ground, the same on light and on dark pages


def text_and_followers() -> tuple[list[str], list[int], dict[int, int]]:
    """A label for each id, the ids of the text, and which id follows which."""
    names = sorted(set(WORDS))
    ids = [names.index(word) for word in WORDS]
    return names, ids, dict(itertools.pairwise(ids))


def step_tree() -> tuple[TokenTree, list[str]]:
    """Window 4, 4-grams, two guesses, after the window has filled; returns the tree and a label for each id."""
    names, ids, follow = text_and_followers()
    window = Window(4, 4, ids[0], ids, random.Random(7))
    pool = NGramPool(4, 2)
    pool.learn(zip(ids, ids[1:], ids[2:], ids[3:], strict=False), "prompt")
    for _ in range(3):
        window.advance(ids[0], [follow.get(token, ids[0]) for token in window.rows[-1]])
    tree = TokenTree(ids[0])
    window.plant(tree)
    for guess, source in pool.lookup(ids[0]):
        tree.add_path(guess, source)
    return tree, names


def layout(tree: TokenTree) -> list[tuple[float, float]]:
    """Depth to the right, leaves evenly down the page, parents in the middle of their children."""
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree)):
        children.setdefault(tree.parents[node], []).append(node)
    heights: dict[int, float] = {}

    def place(node: int, free: float) -> float:
        for child in children.get(node, []):
            free = place(child, free)
        own = [heights[child] for child in children.get(node, [])]
        heights[node] = sum(own) / len(own) if own else free
        return free if own else free + 1

    place(ROOT, 0.0)
    return [(float(tree.depths[node]), -heights[node]) for node in range(len(tree))]


def colour(tree: TokenTree, node: int) -> str:
    if node == ROOT:
        return COLOURS["root"]
    return COLOURS["window" if tree.sources[node] == "window" else "pool"]


def draw_tree(axes: Axes, tree: TokenTree, names: list[str]) -> None:
    spots = layout(tree)
    for node in range(1, len(tree)):
        (x0, y0), (x1, y1) = spots[tree.parents[node]], spots[node]
        axes.plot([x0, x1], [y0, y1], color=LIGHT.ink, alpha=0.45, linewidth=1, zorder=1)
    for node, (x, y) in enumerate(spots):
        box = {"boxstyle": "round,pad=0.25", "facecolor": colour(tree, node), "edgecolor": "none"}
        axes.text(
            x, y, names[tree.ids[node]], ha="center", va="center", fontsize=8, color=ON_COLOUR, bbox=box, zorder=2
        )
    depth = max(tree.depths)
    for d in range(depth + 1):
        axes.text(d, 1.2, "P" if d == 0 else f"P+{d}", ha="center", fontsize=8, color=LIGHT.ink)
    axes.set_xlim(-0.5, depth + 0.5)
    axes.set_ylim(min(y for _, y in spots) - 0.8, 1.8)
    axes.set_axis_off()
    axes.set_title(f"one step: a tree of {len(tree)} tokens", color=LIGHT.ink, fontsize=10)


def draw_mask(axes: Axes, tree: TokenTree) -> None:
    size = len(tree)
    for node, row in enumerate(tree.closure()):
        axes.add_patch(Rectangle((-2.2, node + 0.08), 1.8, 0.84, color=COLOURS["root"], alpha=0.5))
        for other, seen in enumerate(row):
            shade = colour(tree, other) if seen else LIGHT.ink
            axes.add_patch(Rectangle((other + 0.08, node + 0.08), 0.84, 0.84, color=shade, alpha=1 if seen else 0.08))
    axes.text(-1.3, -0.5, "cache", ha="center", fontsize=8, color=LIGHT.ink)
    axes.set_xlim(-2.4, size + 0.2)
    axes.set_ylim(size + 0.2, -1.4)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title("its mask: each row sees the cache and its ancestors", color=LIGHT.ink, fontsize=10)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tree, names = step_tree()
    with rc_context(RC):
        figure = Figure(figsize=(11, 4.6))
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
        draw_tree(left, tree, names)
        draw_mask(right, tree)
        for x, (name, text) in zip((0.30, 0.45, 0.62), LEGEND.items(), strict=True):
            figure.text(x, 0.02, f"■ {text}", color=COLOURS[name], fontsize=9)
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        (folder / "step.svg").write_text(as_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
