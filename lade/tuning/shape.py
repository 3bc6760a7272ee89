"""What shape a curve of costs must have: it never decreases, and has a lower convex hull."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_WEIGHT = 0.01


def slope_beyond(sizes: Sequence[int], heights: Sequence[float]) -> float:
    """Seconds per token to assume after the last size measured."""
    slopes = [heights[-1] / (4 * sizes[-1])]
    if len(sizes) > 1:
        slopes += [(heights[-1] - heights[i]) / (sizes[-1] - sizes[i]) for i in (0, -2)]
    return max(slopes)


def ascending(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest curve that never decreases: neighbours in the wrong order get their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, knots
    for value, weight in zip(values, weights, strict=True):
        pool = (value, max(weight, LEAST_WEIGHT), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


def hull(sizes: Sequence[int], curve: Sequence[float]) -> list[int]:
    """Indices of the sizes on the lower convex hull of the curve."""

    def slope(left: int, right: int) -> float:
        return (curve[right] - curve[left]) / (sizes[right] - sizes[left])

    corners: list[int] = []
    for new in range(len(sizes)):
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], new):
            corners.pop()
        corners.append(new)
    return corners
