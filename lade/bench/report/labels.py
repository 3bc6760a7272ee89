"""Puts names beside marks so that they cover neither lines nor each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels from the top left corner."""

CHARACTER = 0.56
"""Width of a character by the size of its font, about."""


@dataclass(frozen=True)
class Spot:
    """Where a name goes: the foot of its start, middle or end, by its distance from the mark."""

    anchor: Literal["start", "middle", "end"]
    dx: float
    dy: float


SPOTS = (
    Spot("start", 10, 4), Spot("end", -10, 4), Spot("middle", 0, -11), Spot("middle", 0, 20), Spot("start", 8, -9),
    Spot("end", -8, -9), Spot("start", 8, 17), Spot("end", -8, 17), Spot("middle", 0, -25), Spot("middle", 0, 34),
)  # fmt: skip
"""The nearest ones first."""


def around(x: float, y: float, reach: float) -> Box:
    """What a mark covers."""
    return x - reach, y - reach, x + reach, y + reach


def place(name: str, x: float, y: float, size: float, taken: list[Box], sheet: Box) -> Spot:
    """The spot beside a mark where a name covers least of what is there, off the sheet included.

    Args:
        name: what is written.
        x: of the mark.
        y: of the mark.
        size: of the font.
        taken: boxes that are covered already; the name's own is added.
        sheet: where names may be.
    """
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
