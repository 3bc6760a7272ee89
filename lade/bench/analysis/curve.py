"""What a forward pass takes by the tokens it feeds, as the run measured it: the price of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lade.bench.analysis.speed import Spread
from lade.bench.results import Results, StepCurve


@dataclass(frozen=True)
class Curve:
    """A measured step curve, straight between the sizes measured.

    Attributes:
        packed: on which weights.
        cached: tokens in the cache meanwhile.
        sizes: tokens fed, ascending; the first is 1.
        spreads: seconds at each.
    """

    packed: bool
    cached: int
    sizes: tuple[int, ...]
    spreads: tuple[Spread, ...]

    @classmethod
    def of(cls, found: StepCurve) -> Curve | None:
        """Without the sizes that have no times; None if nothing, or not the single token, was measured."""
        timed = [(size, Spread.of(seconds)) for size, seconds in zip(found.sizes, found.seconds, strict=True)]
        points = sorted((size, spread) for size, spread in timed if spread is not None)
        if not points or points[0][0] != 1:
            return None
        return cls(found.packed, found.cached, tuple(size for size, _ in points), tuple(each for _, each in points))

    def seconds(self, size: float) -> float:
        """Median seconds of a pass; beyond the last size measured, those of the last."""
        return float(np.interp(size, self.sizes, [spread.median for spread in self.spreads]))

    def relative(self, size: float) -> float:
        """By how much dearer a pass is than one over a single token: t(S) / t(1)."""
        return self.seconds(size) / self.seconds(1)

    @property
    def relative_spreads(self) -> tuple[Spread, ...]:
        """Medians and quartiles at each size, by the median of a single token."""
        one = self.seconds(1)
        return tuple(Spread(s.median / one, s.low / one, s.high / one, s.count) for s in self.spreads)


def curves_of(results: Results) -> list[Curve]:
    """All that can be used, on plain weights first, shorter caches first."""
    found = [curve for curve in map(Curve.of, results.step_curves) if curve is not None]
    return sorted(found, key=lambda curve: (curve.packed, curve.cached))


def curve_of(results: Results, packed: bool) -> Curve | None:
    """The one on these weights whose cache was filled most like those of the run; None if there is none."""
    lengths = [sample.prompt_tokens + sample.new_tokens / 2 for sample in results.samples]
    typical = float(np.median(lengths)) if lengths else 0.0
    own = [curve for curve in curves_of(results) if curve.packed == packed]
    return min(own, key=lambda curve: abs(curve.cached - typical), default=None)
