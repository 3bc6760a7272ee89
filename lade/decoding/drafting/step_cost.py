"""Online latency curve of a forward pass by tokens fed: a measured curve, and medians of what passes took since.

    t(S) = pace * shape(S)                o  knots: measured, corrected online, interpolated between
     |                         o          -  lower convex hull: `marginals` are its slopes, `corners` where it touches
     |               o     _--
     |        o    __--
     |o-------o--~~        S

Where passes are padded to a few sizes, 9 tokens cost what 16 cost, and only these sizes count: the curve is a
staircase, and the hull touches the ends of its steps.

The estimator is two medians:

- The **pace** is what one token takes now: the median of the last passes, each divided by the shape at its size. Texts
  get longer and machines busier; that moves all sizes alike.
- The **shape** is relative to one token. Two consecutive passes of different sizes saw the same machine, so their
  ratio is evidence on the shape at the larger one, given that at the smaller one: the median of the last such ratios
  corrects the measured curve there. Nothing else bends it. A machine whose pace goes up and down cannot, and a burst of
  another process or garbage collection is an outlier in a ratio or two.

A knot without ratios of its own follows the corrections at its neighbours. Passes that did one-time work (a captured
graph, a kernel that was chosen) are no evidence: the caller knows them, see `observe`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from lade.decoding.drafting.controller import LARGEST_SHARED, RECENT, ControllerState
from lade.decoding.kernels.layout import TINY

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes at which the curve is measured and corrected; straight between them."""
MEASURED = 3
"""Ratios that a measured knot counts for, of `RECENT`: as many contradict it before it moves. At 1 one hiccup does,
at 7 a machine whose pace jumps is followed too late (tests/tuning/test_never_slower.py)."""
BASELINE_INTERVAL, FIRST_INTERVAL = 128, 8
"""Passes over several tokens after which one over a single token is due: 8 at first and after surprises, then
twice as many each time, or 128 at once where passes are padded to what was captured. If the first come late, a
machine that was measured wrongly, or gets slower, takes longer than plain decoding (9 is too late for one of those in
tests/tuning/test_never_slower.py); one in 128 passes costs less than 0.8 %, and without any the pace of one token is
never known again."""
SURPRISE = 0.2
"""Log of a factor too large for noise, if it shows in two ratios in a row or in the pace. At 0.8 a machine that was
measured as steep, or gets slower, is not found out; at 0.05 noise of 6 % would be news."""
REFRESH_S = 0.05
"""Seconds of passes observed between two refreshes of some 40 us: less than a thousandth of the time."""
FAST_QUANTILE = 5
"""A measurement counts by the end of its fastest fifth: what else the machine did then is not to be remembered."""
FLATTEST = 0.25
"""Beyond the last size measured, the least growth for each time that size, as a share of the curve's height there:
what was not measured is not believed to be free."""

_SIZES = np.arange(KNOTS[-1] + 1)
_MIDDLES = [(low + high) / 2 for low, high in pairwise(KNOTS)]


class StepCost:
    """Seconds of one forward pass by its size S, the tokens it feeds.

    What is read (`table`, `marginals`, `corners`, `seconds`) is computed from the knots every now and then, so reading
    costs a list access. Generations on several threads may share one: a lost observation is the worst.

    Args:
        knots: seconds at each of `KNOTS`.
        measured_at: Unix time of the measurement; 0.0 if there was none.

    Attributes:
        table: seconds by size, 0 to `LARGEST_SHARED`; never decreasing (entry 0 repeats entry 1).
        marginals: by size, seconds that one more token adds on the lower convex hull; never decreasing, >= 0.
        corners: sizes at which the curve touches its hull, ascending. Between two of them it lies above, and a tree
            that stops there costs more than the marginals say: it had better have one of these sizes.
        wants_baseline: whether a pass over one token is due, to compare others with.

    Raises:
        ValueError: the list differs from `KNOTS` in length, or has an entry that is not a time.
    """

    def __init__(self, knots: Sequence[float], *, measured_at: float = 0.0) -> None:
        if not isinstance(knots, Sequence) or len(knots) != len(KNOTS) or not all(map(_is_time, knots)):
            raise ValueError(f"knots={knots!r} is not valid: give seconds >= {TINY} for each of {KNOTS}")
        self._shape = [float(seconds) / knots[0] for seconds in knots]
        self._pace = deque([float(knots[0])], RECENT)
        self._ratios = [deque([0.0] * MEASURED, RECENT) for _ in KNOTS]
        self._compared = [0] * len(KNOTS)  # ratios observed
        self._corrections = [0.0] * len(KNOTS)  # logarithms of factors, by knot
        self._last: tuple[int, float] | None = None  # knot and seconds of the last pass over its measured shape
        self._states: dict[str, ControllerState] = {}
        self._padded_to: tuple[int, ...] = ()
        self._unread_s = 0.0
        self._interval, self._since_plain, self._plain_pace = FIRST_INTERVAL, 0, float(knots[0])
        self.wants_baseline = False
        self.measured_at = measured_at
        self.table: list[float] = []
        self.marginals: list[float] = []
        self.corners: list[int] = []
        self.refresh()

    @classmethod
    def of(cls, samples: Mapping[int, Sequence[float]], *, measured_at: float = 0.0) -> StepCost:
        """Return the curve through measured passes, by size; straight between them and beyond the last one.

        Raises:
            ValueError: no samples, or a size that is not one of `KNOTS`.
        """
        sizes = sorted(size for size, seconds in samples.items() if seconds)
        foreign = sorted(set(sizes) - set(KNOTS))
        if not sizes or foreign:
            raise ValueError(f"samples of the sizes {foreign or sizes} are not valid: give some, of sizes in {KNOTS}")
        heights = [max(TINY, fast_quantile(samples[size])) for size in sizes]
        last, slope = sizes[-1], extrapolation_slope(sizes, heights)
        straight = np.interp(KNOTS, sizes, heights).tolist()
        knots = [t + slope * max(0, knot - last) for knot, t in zip(KNOTS, straight, strict=True)]
        return cls(knots, measured_at=measured_at)

    @classmethod
    def unmeasured(cls, free_tokens: float) -> StepCost:
        """Return a curve for passes that are only observed: 0.0 seconds at first.

        The fixed cost of a pass is assumed to be what `free_tokens` tokens take.
        """
        cost = cls([free_tokens + knot for knot in KNOTS])
        cost._pace.clear()
        cost.refresh()
        return cost

    def pad_to(self, sizes: Sequence[int]) -> None:
        """Passes are padded to the next of these sizes from now on: the curve is a staircase, with corners there only.

        No sizes mean no padding.

        Raises:
            ValueError: others than some of `KNOTS`, ascending from 1 on.
        """
        if tuple(sizes) == self._padded_to:
            return
        if sizes and [*sizes] != sorted({1, *sizes} & {*KNOTS}):
            raise ValueError(f"sizes={list(sizes)!r} is not valid: give some of {KNOTS}, ascending, from 1 on")
        self._padded_to = tuple(sizes)
        self.refresh()

    def state(self, kind: str) -> ControllerState:
        """Return what generations that go by this curve have learned about a kind of text."""
        return self._states.setdefault(kind, ControllerState())

    def take_over_texts(self, other: StepCost) -> None:
        """Share, from now on, what texts have taught another measurement of the same passes."""
        self._states = other._states

    def forget_texts(self) -> None:
        """Forget what all kinds of text have taught, as after a warm-up; what passes take stays known."""
        for state in self._states.values():
            state.__init__()  # type: ignore[misc]  # controllers hold it

    def seconds(self, size: int) -> float:
        """Return t(S) for a size >= 1; beyond `LARGEST_SHARED` it goes on with the steepest slope of the hull."""
        if size < 1:
            raise ValueError(f"size={size!r} is not valid: a pass feeds at least 1 token")
        beyond = max(0, size - LARGEST_SHARED)
        return self.table[size - beyond] + beyond * self.marginals[-1]

    def observe(self, size: int, seconds: float, *, prepared: bool = False) -> None:
        """Learn from one pass.

        Args:
            size: tokens fed, >= 1 (in a batch, by the largest tree).
            seconds: time of the pass; one of 0 (a coarse clock) is passed over.
            prepared: whether it did work that is done once, such as capturing a graph; it is passed over.
        """
        if prepared or not 0.0 < seconds < math.inf:
            self._last = None
            if size == 1:  # no evidence, yet not due again at once
                self._since_plain, self.wants_baseline = 0, False
            return
        size = next((end for end in self._padded_to if end >= size), size)
        knot, measured = bisect_left(_MIDDLES, size), self._measured(size)  # the nearest knot
        self._pace.append(seconds / (measured * math.exp(self._corrections[knot])))
        if self._last is not None and self._last[0] != knot:
            self._compare(self._last, (knot, seconds / measured))
        self._last = knot, seconds / measured
        self._count(size)
        self._unread_s += seconds
        if self._unread_s >= REFRESH_S:
            self.refresh()

    def _count(self, size: int) -> None:
        """Count passes until the next baseline is due."""
        pace = median(self._pace)
        surprising = abs(math.log(pace / self._plain_pace)) > SURPRISE
        if surprising:
            self._interval = FIRST_INTERVAL
            self._ratios = [deque(list(ratios)[-MEASURED:], RECENT) for ratios in self._ratios]
        if size == 1:
            self._since_plain, self._plain_pace = 0, pace
            # captured passes take what they took before
            self._interval = BASELINE_INTERVAL if self._padded_to else min(2 * self._interval, BASELINE_INTERVAL)
        else:
            self._since_plain += 1
        self.wants_baseline = self._since_plain >= (1 if surprising else self._interval)

    def _compare(self, one: tuple[int, float], other: tuple[int, float]) -> None:
        """Learn from the ratio of two consecutive passes, each a knot and its seconds over the measured shape."""
        (low, low_s), (high, high_s) = sorted((one, other))
        ratios, ratio = self._ratios[high], self._corrections[low] + math.log(high_s / low_s)
        ratios.append(ratio)
        if min(abs(each - self._corrections[high]) for each in list(ratios)[-2:]) > SURPRISE:
            self._interval = FIRST_INTERVAL
        self._compared[high] += 1
        known = [0, *self._visited]
        found = [0.0, *(median(self._ratios[knot]) for knot in known[1:])]
        self._corrections = np.interp(range(len(KNOTS)), known, found).tolist()

    def _measured(self, size: int) -> float:
        """Return the measured shape at a size, straight beyond the knots."""
        shape = self._shape
        place = min(bisect_left(KNOTS, size), len(KNOTS) - 1)
        if not place:
            return 1.0
        slope = (shape[place] - shape[place - 1]) / (KNOTS[place] - KNOTS[place - 1])
        return max(TINY, shape[place] + slope * (size - KNOTS[place]))

    @property
    def _visited(self) -> list[int]:
        """Knots that go by ratios of their own: more than the measurement counts for."""
        return [knot for knot, count in enumerate(self._compared) if count > MEASURED]

    @property
    def _knots(self) -> list[float]:
        """Seconds at each knot, as they are known now."""
        pace = median(self._pace) if self._pace else 0.0
        shape = [height * math.exp(more) for height, more in zip(self._shape, self._corrections, strict=True)]
        last = max(self._visited, default=0)
        if self._corrections[last] < -SURPRISE and (above := self._shape[last] - 1.0) > 0.0:
            share = max(0.0, shape[last] - 1.0) / above  # much cheaper than measured: so is what lies beyond
            beyond = [1.0 + share * (height - 1.0) for height in self._shape[last + 1 :]]
            shape[last + 1 :] = [min(pair) for pair in zip(shape[last + 1 :], beyond, strict=True)]
        return [max(TINY, pace * height) for height in shape]

    def refresh(self) -> None:
        """Compute what is read from what was observed; `observe` calls it when due."""
        self._unread_s = 0.0
        ends = list(self._padded_to) + [KNOTS[-1]] * (KNOTS[-1] not in self._padded_to) if self._padded_to else KNOTS
        knots = self._knots
        curve = isotonic_fit([knots[KNOTS.index(end)] for end in ends])
        corners = lower_hull(ends, curve)
        rises = ((curve[b] - curve[a]) / (ends[b] - ends[a]) for a, b in pairwise(corners))
        slopes = list(accumulate(rises, max, initial=0.0))[1:]  # rounding may turn them
        within = np.array(curve)[np.searchsorted(ends, _SIZES)] if self._padded_to else np.interp(_SIZES, ends, curve)
        beyond = curve[-1] + slopes[-1] * np.arange(1, LARGEST_SHARED - KNOTS[-1] + 1)
        self.table = [*within.tolist(), *beyond.tolist()]
        self.corners = [*(ends[i] for i in corners[:-1]), LARGEST_SHARED]
        ends_of_slopes = [0, *self.corners[1:-1], LARGEST_SHARED + 1]  # the first slope serves sizes 0 and 1 as well
        self.marginals = np.repeat(slopes, np.diff(ends_of_slopes)).tolist()

    def change_since(self, table: Sequence[float]) -> float:
        """Return the greatest relative change against an earlier `table`: 0.1 where a size got a tenth slower."""
        return max(abs(math.log(self.table[knot] / table[knot])) for knot in KNOTS)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads: sizes, seconds, and the time of the measurement."""
        return {"sizes": list(KNOTS), "seconds": isotonic_fit(self._knots), "measured_at": self.measured_at}

    @classmethod
    def from_json(cls, value: Any) -> StepCost:
        """Return the curve that `to_json` wrote.

        Raises:
            ValueError: anything else; the message names what is wrong.
        """
        if not isinstance(value, dict) or value.get("sizes") != list(KNOTS):
            raise ValueError(f"the sizes are not {list(KNOTS)}: measure again")
        measured_at = value.get("measured_at")
        if not _is_number(measured_at):
            raise ValueError(f"measured_at={measured_at!r} is not valid: give a Unix time")
        return cls(value.get("seconds") or (), measured_at=measured_at)


def fast_quantile(samples: Sequence[float]) -> float:
    """Return the 20th percentile: of up to four passes the fastest, of nine the second."""
    return sorted(samples)[len(samples) // FAST_QUANTILE]


def extrapolation_slope(sizes: Sequence[int], heights: Sequence[float]) -> float:
    """Return the seconds per token to assume after the last size measured."""
    slopes = [FLATTEST * heights[-1] / sizes[-1]]
    if len(sizes) > 1:
        slopes += [(heights[-1] - heights[i]) / (sizes[-1] - sizes[i]) for i in (0, -2)]
    return max(slopes)


def isotonic_fit(values: Sequence[float]) -> list[float]:
    """Return the nearest curve that never decreases: neighbours in the wrong order get their mean."""
    pools: list[tuple[float, int]] = []  # mean, knots
    for value in values:
        pool = (value, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, count = pools.pop()
            total = count + pool[1]
            pool = ((mean * count + pool[0] * pool[1]) / total, total)
        pools.append(pool)
    return [mean for mean, count in pools for _ in range(count)]


def lower_hull(sizes: Sequence[int], curve: Sequence[float]) -> list[int]:
    """Return the indices of the sizes on the lower convex hull of the curve."""

    def slope(left: int, right: int) -> float:
        return (curve[right] - curve[left]) / (sizes[right] - sizes[left])

    corners: list[int] = []
    for new in range(len(sizes)):
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], new):
            corners.pop()
        corners.append(new)
    return corners


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= TINY
