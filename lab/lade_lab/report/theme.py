"""Colours of figures in light and dark, and SVG files with both."""

from __future__ import annotations

import io
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lade_lab.breakdown import SOURCES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colours that can be told apart with colour blindness (Okabe and Ito's), for one background.

    Attributes:
        paper, ink, soft: background, text, and grid lines.
        gain, loss, even: of methods.
        lines: of curves.
        sources: of tokens, in the order of `SOURCES`.
    """

    paper: str
    ink: str
    soft: str
    gain: str
    loss: str
    even: str
    lines: tuple[str, ...]
    sources: tuple[str, ...]

    def of(self, kind: str) -> str:
        """Colour of a gain, a loss, or neither."""
        return {"gain": self.gain, "loss": self.loss}.get(kind, self.even)

    def by_source(self) -> dict[str, str]:
        """Colours of the sources by name."""
        return dict(zip(SOURCES, self.sources, strict=True))

    def colours(self) -> list[str]:
        """All of them, in the same order in every theme."""
        return list(chain.from_iterable([each] if isinstance(each, str) else each for each in astuple(self)))


LIGHT = Theme(
    "#ffffff", "#1f2328", "#d1d9e0", "#0072b2", "#b84300", "#6e7781",
    ("#0072b2", "#009e73", "#cc79a7", "#e69f00"),
    ("#cc79a7", "#56b4e9", "#009e73", "#e69f00", "#0072b2", "#8c959f"),
)  # fmt: skip
DARK = Theme(
    "#0d1117", "#e6edf3", "#30363d", "#3f8fe0", "#ff9a5c", "#9aa4af",
    ("#3f8fe0", "#2fc998", "#e296c0", "#f2b632"),
    ("#e296c0", "#6cc4f5", "#2fc998", "#f2b632", "#3f8fe0", "#8b949e"),
)  # fmt: skip
"""Equal colours of `LIGHT` are equal here, so a colour of the one names a colour of the other."""

RC: Any = {
    "svg.hashsalt": "lade",  # the same picture gives the same file
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may hold dollar signs
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # the second, of equal widths, where a reader has not the first
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": LIGHT.paper,
    "savefig.facecolor": LIGHT.paper,
    "axes.facecolor": LIGHT.paper,
    "axes.edgecolor": LIGHT.soft,
    "grid.color": LIGHT.soft,
} | dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), LIGHT.ink)
"""Settings of matplotlib that pictures are drawn and saved under."""


def as_svg(figure: Figure) -> str:
    """A picture drawn in `LIGHT`, as the text of an SVG file that turns `DARK` with its reader's preference.

    No date and no version of matplotlib are in it: the same picture gives the same text. To be called under `RC`.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    lines = (line.rstrip() for line in file.getvalue().splitlines())
    return "\n".join([*lines, ""]).replace("</style>", f"{_dark_rules()}</style>", 1)


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a picture as SVG and as PNG, and return the files. To be called under `RC`."""
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    svg.write_text(as_svg(figure), encoding="utf-8")
    figure.savefig(png, dpi=144, metadata={"Software": None})
    return [svg, png]


def _dark_rules() -> str:
    """CSS that exchanges colours by their names in `style` attributes, whose place an `!important` takes."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in dict(zip(LIGHT.colours(), DARK.colours(), strict=True)).items()
        for what in ("fill", "stroke")
    ]
    return "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"
