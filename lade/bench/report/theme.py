"""Colours of pictures, for light and for dark backgrounds."""

from __future__ import annotations

from dataclasses import dataclass

from lade.bench.analysis.acceptance import SOURCES


@dataclass(frozen=True)
class Theme:
    """Colours that those who confuse some of them can tell apart (Okabe and Ito's), for one background.

    Attributes:
        name: of the theme.
        paper, ink, soft: background, text, and what is to stay behind it.
        gain, loss, even: of methods.
        lines: of curves.
        sources: of tokens, by who proposed them.
    """

    name: str
    paper: str
    ink: str
    soft: str
    gain: str
    loss: str
    even: str
    lines: tuple[str, ...]
    sources: dict[str, str]

    def of(self, kind: str) -> str:
        """Of a gain, a loss, or neither."""
        return {"gain": self.gain, "loss": self.loss}.get(kind, self.even)


LIGHT = Theme(
    "light", "#ffffff", "#1f2328", "#d1d9e0", "#0072b2", "#b84300", "#6e7781",
    ("#0072b2", "#009e73", "#cc79a7", "#e69f00"),
    dict(zip(SOURCES, ("#cc79a7", "#56b4e9", "#009e73", "#e69f00", "#0072b2", "#8c959f"), strict=True)),
)  # fmt: skip
DARK = Theme(
    "dark", "#0d1117", "#e6edf3", "#30363d", "#56b4e9", "#ff9a5c", "#9aa4af",
    ("#3f8fe0", "#2fc998", "#e296c0", "#f2b632"),
    dict(zip(SOURCES, ("#e296c0", "#6cc4f5", "#2fc998", "#f2b632", "#3f8fe0", "#8b949e"), strict=True)),
)  # fmt: skip
