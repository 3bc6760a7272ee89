"""Small vector drawings to stand inside a page: its style sheet colours them, for light and dark at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

from markupsafe import Markup, escape

from lade.bench.report.labels import CHARACTER


class Drawing:
    """Shapes on a sheet; coordinates are pixels from the top left corner.

    Args:
        width, height: of the sheet.
        label: says in words what is to be seen, for those who do not see it.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self._label = width, height, label
        self._parts: list[Markup] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """A rectangle."""
        self._add("rect", kind, title, x=x, y=y, width=width, height=height)

    def dot(self, x: float, y: float, kind: str, title: str = "", radius: float = 5) -> None:
        """A filled circle."""
        self._add("circle", kind, title, cx=x, cy=y, r=radius)

    def path(self, points: Iterable[tuple[float, float]], kind: str, title: str = "", close: bool = False) -> None:
        """Straight lines from point to point."""
        steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._add("path", kind, title, d=f"M{steps}{'Z' if close else ''}")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", title: str = "") -> None:
        """One line of text, whose baseline starts, has its middle, or ends at a point."""
        inner = escape(text) + (Markup("<title>{}</title>").format(title) if title else "")
        form = '<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>'
        self._parts.append(Markup(form).format(kind, _short(x), _short(y), anchor, inner))

    def markup(self, name: str) -> Markup:
        """The drawing as an element of a page.

        Args:
            name: its class.
        """
        form = '<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
        inside = Markup("").join(self._parts)
        return Markup(form).format(name, _short(self.width), _short(self.height), self._label, inside)

    def _add(self, tag: str, kind: str, title: str = "", **places: float | str) -> None:
        attributes = Markup(" ").join(Markup('{}="{}"').format(key, _short(place)) for key, place in places.items())
        inner = Markup("<title>{}</title>").format(title) if title else ""
        self._parts.append(Markup('<{} class="{}" {}>{}</{}>').format(tag, kind, attributes, inner, tag))


@dataclass(frozen=True)
class Scale:
    """From values to pixels.

    Attributes:
        first, last: values at the ends.
        start, end: their pixels.
        logarithmic: equal ratios take equal room.
    """

    first: float
    last: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies; what is outside lies at the end."""
        bend: Callable[[float], float] = log2 if self.logarithmic else float
        value = min(max(value, self.first), self.last)
        share = (bend(value) - bend(self.first)) / (bend(self.last) - bend(self.first))
        return self.start + share * (self.end - self.start)

    def ticks(self, candidates: Sequence[float], apart: float, keep: Sequence[float] = ()) -> list[float]:
        """Those of some round values that lie inside and so many pixels apart; those to keep come first."""
        chosen: list[float] = []
        for value in (*keep, *candidates):
            inside = self.first <= value <= self.last
            if inside and all(abs(self(value) - self(other)) >= apart for other in chosen):
                chosen.append(value)
        return sorted(chosen)


def fitted(text: str, room: float, size: float = 12) -> str:
    """A text cut to so many pixels."""
    longest = max(2, int(room / (size * CHARACTER)))
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
