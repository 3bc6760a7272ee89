"""What a forward pass costs by the number of tokens it feeds, kept up to date by the passes that are made.

    t(S)                                  o  knots: measured, refreshed, interpolated between
     |                         o          -  lower convex hull: `marginals` are its slopes, `corners` where it touches
     |               o     _--
     |        o    __--
     |o-------o--~~        S

Where passes are padded to a few sizes, 9 tokens cost what 16 cost, and only these sizes count: the curve is a
staircase, and the hull touches the ends of its steps.

The estimator, in the order in which a pass is processed by `observe`:

1. The residual is relative: an error of one tenth counts the same for a pass of a millisecond and for one of a second.
   It is clipped (Winsorised, as by Huber), since a machine's hiccups make single passes many times too slow.
2. One scale factor, shared by all sizes, follows clipped residuals as a first-order low-pass filter: texts get longer,
   machines get busier. This is what moves sizes that are not visited.
3. A run of passes that all surprise in the same way is believed, as far as the least surprising of them goes: their
   size moves at once, others with it or the less the farther they lie. Hiccups come one by one; a machine that got busy
   stays so.
4. Each of the two knots around the size is a running mean, of gain 1 / (passes so far + 1), bounded below by
   1 / `MAX_WEIGHT`: an exponential moving average in the long run. A knot that surprises again and again, or that its
   neighbours contradict, loses weight, so that its gain grows and a wrong start is forgotten.
5. Passes over one token move all sizes alike, by runs and by the mean: they show the machine's pace, and nothing of
   the curve's shape. Else a machine whose pace goes up and down would bend the curve, a little each time, until trees
   of any size seem free (lab/log/step-cost.md, "A cost curve bent by the machine's pace"). Where most passes feed
   guesses, sizes beyond theirs still come to seem cheap that way; when they are fed, it is found out.
6. What is read is the isotonic regression of the knots (pool adjacent violators, by these weights), and its lower
   convex hull.

The constants below are chosen; tests/tuning/test_never_slower.py and test_step_cost.py hold them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import numpy as np

from lade.decoding.drafting.controller import LARGEST_SHARED, OUTLIER, SURPRISE

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# How much is known, in passes; a knot's gain is one over this.
MAX_WEIGHT = 50.0  # at most: then the mean is over the last passes
PASS_WEIGHT = 4.0  # of each pass of a measurement, during which the machine is supposed to do nothing else

# Clipping of relative residuals above `SURPRISE`, and what all sizes share of them.
DISBELIEF = 0.35  # lower bound: by accident a pass is seldom too fast
SCALE_GAIN = 0.06  # gain of the shared scale factor

# Runs of passes that all surprise in the same way, which hiccups do not make.
RUN = 3  # passes; the least surprising of them is believed
RUN_GAIN = 0.7  # part of it that the size moves by
RUN_REACH = 0.88  # of that, for each octave to a smaller size
RUN_REACH_UP = 0.92  # the same to a larger one, where guesses took longer than expected; else it follows all the way

# Forgetting.
DOUBT = 0.1  # part of its weight that a knot loses when it alone is surprised, or when neighbours contradict it

REFRESH_S = 0.05  # of passes observed, between two refreshes of some 25 us: less than a thousandth of the time

_SHORTEST_S = _LEAST_WEIGHT = 1e-9  # more than nothing
_SIZES, _KNOTS = np.arange(KNOTS[-1] + 1), np.array(KNOTS)


def _place(size: int) -> tuple[int, float]:
    low = max(0, bisect_left(KNOTS, size) - 1)
    return low, max(0.0, (size - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low]))


_PLACES = [_place(size) for size in range(KNOTS[-1] + 1)]
"""By size: the knot at or below it, and how far it lies on the way to the next one (0.0 to 1.0)."""


class StepCost:
    """Seconds of one forward pass by its size S, the tokens it feeds.

    What is read (`table`, `marginals`, `corners`, `seconds`, `marginal`) is computed from the knots every now and then,
    so reading costs a list access. Generations on several threads may share one: a lost observation is the worst.

    Args:
        knots: seconds at each of `KNOTS`.
        weights: how many passes each of them stands for, at most `MAX_WEIGHT`; they decide how fast it moves.
        measured_at: Unix time of the measurement; 0.0 if there was none.

    Attributes:
        plain_s: seconds of a pass over one token on average, hiccups included: what time is worth.
        table: seconds by size, 0 to `LARGEST_SHARED`; never decreasing (entry 0 repeats entry 1).
        marginals: by size, seconds that one more token adds on the lower convex hull; never decreasing, >= 0.
        corners: the sizes at which the curve touches its hull, ascending. Between two of them it lies above, and a tree
            that stops there costs more than the marginals say: it had better have one of these sizes.

    Raises:
        ValueError: a list has another length than `KNOTS`, or an entry that is no time or no weight.
    """

    def __init__(self, knots: Sequence[float], weights: Sequence[float], *, measured_at: float = 0.0) -> None:
        _check("knots", knots, least=_SHORTEST_S)
        _check("weights", weights, least=0.0)
        self._knots = [float(seconds) for seconds in knots]
        self._weights = [min(float(weight), MAX_WEIGHT) for weight in weights]
        self._scale = 1.0
        self._surprise = 0.0  # by how much the last pass surprised; 0.0 if it did not
        # Relative errors of the last passes, as long as they surprise in the same way: of one token, and of more.
        self._runs: list[tuple[float, ...]] = [(), ()]
        self._unread_s = 0.0
        self._padded_to: tuple[int, ...] = ()
        self.plain_s, self._plain_passes = self._knots[0], PASS_WEIGHT
        self.measured_at = measured_at
        self.table: list[float] = []
        self.marginals: list[float] = []
        self.corners: list[int] = []
        self.refresh()

    @classmethod
    def of(cls, samples: Mapping[int, Sequence[float]], *, measured_at: float = 0.0) -> StepCost:
        """The curve through measured passes, by size.

        Of each size's passes one of the fastest counts, next to the fastest fifth: what else the machine did meanwhile
        is not to be remembered. Between measured sizes the curve is straight. Beyond the last one it continues as it
        was, yet never flatter than by a quarter of its height for each time the last size: what was not measured is
        not believed to be free.

        Raises:
            ValueError: no samples, or a size that is not one of `KNOTS`.
        """
        sizes = sorted(size for size, seconds in samples.items() if seconds)
        foreign = sorted(set(sizes) - set(KNOTS))
        if not sizes or foreign:
            raise ValueError(f"samples of the sizes {foreign or sizes} are not valid: give some, of sizes in {KNOTS}")
        heights = [max(_SHORTEST_S, typical(samples[size])) for size in sizes]
        last, slope = sizes[-1], slope_beyond(sizes, heights)
        straight = np.interp(KNOTS, sizes, heights).tolist()
        knots = [t + slope * max(0, knot - last) for knot, t in zip(KNOTS, straight, strict=True)]
        weights = [PASS_WEIGHT * len(samples.get(knot, ())) for knot in KNOTS]  # 0.0: a guess
        return cls(knots, weights, measured_at=measured_at)

    def pad_to(self, sizes: Sequence[int]) -> None:
        """Passes are padded to the next of these sizes from now on: the curve is a staircase, with corners there only.

        Args:
            sizes: some of `KNOTS`, ascending, the first one 1; none where passes are not padded.

        Raises:
            ValueError: others.
        """
        if tuple(sizes) == self._padded_to:
            return
        if sizes and [*sizes] != sorted({1, *sizes} & {*KNOTS}):
            raise ValueError(f"sizes={list(sizes)!r} is not valid: give some of {KNOTS}, ascending, from 1 on")
        self._padded_to = tuple(sizes)
        self.refresh()

    def seconds(self, size: int) -> float:
        """t(S) for a size >= 1; beyond `LARGEST_SHARED` it continues straight, with the steepest slope of the hull."""
        if 0 < size <= LARGEST_SHARED:
            return self.table[size]
        if size < 1:
            raise ValueError(f"size={size!r} is not valid: a pass feeds at least 1 token")
        return self.table[-1] + (size - LARGEST_SHARED) * self.marginals[-1]

    def observe(self, size: int, seconds: float) -> None:
        """Learn from one pass, as the module describes.

        Args:
            size: tokens fed, >= 1 (in a batch, by the largest tree).
            seconds: time of the pass; one of 0 (a coarse clock) is passed over.
        """
        if not seconds > 0.0:
            return
        self._unread_s += seconds
        if size == 1:
            self._plain_passes = min(self._plain_passes + 1.0, MAX_WEIGHT)
            self.plain_s += (min(seconds, OUTLIER * self.plain_s) - self.plain_s) / self._plain_passes
        size = next((end for end in self._padded_to if end >= size), size)
        if 0 < size <= KNOTS[-1]:
            self._move_around(size, seconds)
        else:
            self._move_all(seconds / self.seconds(size) - 1.0, self._weights[-1])
        if self._unread_s >= REFRESH_S:
            self.refresh()

    def _move_around(self, size: int, seconds: float) -> None:
        """Move the knots around a size, and all of them a little; one token moves all of them alike."""
        low, part = _PLACES[size]
        knots, weights, surprise = self._knots, self._weights, self._surprise
        known = weights[low] + part * (weights[low + 1] - weights[low])
        expected = self._scale * (knots[low] + part * (knots[low + 1] - knots[low]))
        if run := self._run_with(size, seconds / expected - 1.0):
            self._jump(size, run)
            expected *= 1.0 + RUN_GAIN * run
        error = self._move_all(seconds / expected - 1.0, known)
        doubted = self._surprise * surprise <= 0.0 != self._surprise  # the pass before was as expected
        for knot, share in ((low, 1.0 - part), (low + 1, part)):
            if share:
                weight = weights[knot]
                move = 1.0 + share / (weight + share) * error
                if size == 1:
                    self._scale *= move
                else:
                    knots[knot] *= move
                weight = weight * (1.0 - DOUBT * share) if doubted else weight + share
                weights[knot] = weight if weight < MAX_WEIGHT else MAX_WEIGHT
        self._doubt_neighbours(low + (part == 1.0), low + (part > 0.0))

    def _run_with(self, size: int, error: float) -> float:
        """What all passes of a run that this one continues show at least; 0.0 where it is not long enough."""
        run = self._runs[size > 1]
        if run and (run[-1] > 0.0) != (error > 0.0):
            run = ()
        self._runs[size > 1] = run = (*run, error)[-RUN:] if abs(error) >= SURPRISE else ()
        return min(run, key=abs) if len(run) == RUN else 0.0

    def _jump(self, size: int, error: float) -> None:
        """Move a size by a relative error that is believed; its neighbours follow, and never contradict it."""
        knots, weights = self._knots, self._weights
        low, part = _PLACES[size]
        now = (knots[low] + part * (knots[low + 1] - knots[low])) * (1.0 + RUN_GAIN * error)
        for knot, place in enumerate(KNOTS):
            octaves = abs(math.log2(size / place))
            reach = RUN_REACH**octaves if place < size else RUN_REACH_UP**octaves if size > 1 and error > 0.0 else 1.0
            moved = knots[knot] * (1.0 + RUN_GAIN * error * reach)
            knots[knot] = min(moved, now) if place < size else max(moved, now) if place > size else now
            weights[knot] *= 1.0 - 0.5 ** (1.0 + octaves)
        self._unread_s += REFRESH_S

    def _doubt_neighbours(self, lowest: int, highest: int) -> None:
        """Of knots in the wrong order those that were just observed are right; else old ones would hold them back."""
        knots, weights = self._knots, self._weights
        for knot in range(highest + 1, len(knots)):
            if knots[knot] >= knots[highest]:
                break
            weights[knot] *= 1.0 - DOUBT
        for knot in range(lowest - 1, -1, -1):
            if knots[knot] <= knots[lowest]:
                break
            weights[knot] *= 1.0 - DOUBT

    def _move_all(self, error: float, known: float) -> float:
        """Move all sizes by their share of a relative error; returns the error as far as it is believed.

        `known` is the weight of what it was compared with: an error of a mere guess says little about other sizes.
        """
        limit = SURPRISE + 2.0 / (1.0 + known) ** 2
        believed = limit if error > limit else -DISBELIEF if error < -DISBELIEF else error
        self._surprise = 0.0 if believed == error else believed
        self._scale *= 1.0 + SCALE_GAIN * known / (known + 2.0) * believed
        return believed

    def refresh(self) -> None:
        """Compute what is read from what was observed; `observe` does it in time."""
        self._knots = [max(_SHORTEST_S, self._scale * seconds) for seconds in self._knots]
        self._scale, self._unread_s = 1.0, 0.0
        ends = list(dict.fromkeys((*self._padded_to, KNOTS[-1]))) if self._padded_to else list(KNOTS)
        known = [KNOTS.index(end) for end in ends]
        curve = ascending([self._knots[i] for i in known], [self._weights[i] for i in known])
        corners = hull(ends, curve)
        rises = ((curve[b] - curve[a]) / (ends[b] - ends[a]) for a, b in pairwise(corners))
        slopes = list(accumulate(rises, max))  # rounding may turn them
        within = np.array(curve)[np.searchsorted(ends, _SIZES)] if self._padded_to else np.interp(_SIZES, _KNOTS, curve)
        beyond = curve[-1] + slopes[-1] * np.arange(1, LARGEST_SHARED - KNOTS[-1] + 1)
        self.table = [*within.tolist(), *beyond.tolist()]
        self.corners = [*(ends[i] for i in corners[:-1]), LARGEST_SHARED]
        ends_of_slopes = [0, *self.corners[1:-1], LARGEST_SHARED + 1]  # the first slope serves sizes 0 and 1 as well
        self.marginals = np.repeat(slopes, np.diff(ends_of_slopes)).tolist()

    def change_since(self, table: Sequence[float]) -> float:
        """Greatest relative change against an earlier `table`: 0.1 where a size got a tenth slower or faster."""
        return max(abs(math.log(self.table[knot] / table[knot])) for knot in KNOTS)

    def to_json(self) -> dict[str, Any]:
        """All there is to it, for `from_json`: sizes, seconds, weights, and the time of the measurement."""
        self.refresh()
        return {
            "sizes": list(KNOTS),
            "seconds": list(self._knots),
            "weights": list(self._weights),
            "measured_at": self.measured_at,
        }

    @classmethod
    def from_json(cls, value: Any) -> StepCost:
        """What `to_json` wrote.

        Raises:
            ValueError: anything else; the message names what is wrong.
        """
        if not isinstance(value, dict) or value.get("sizes") != list(KNOTS):
            raise ValueError(f"the sizes are not {list(KNOTS)}: measure again")
        measured_at = value.get("measured_at")
        if not _is_number(measured_at):
            raise ValueError(f"measured_at={measured_at!r} is not valid: give a Unix time")
        return cls(value.get("seconds") or (), value.get("weights") or (), measured_at=measured_at)


def typical(samples: Sequence[float]) -> float:
    """Seconds at the end of the fastest fifth: of up to four passes the fastest, of nine the second."""
    return sorted(samples)[len(samples) // 5]


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
        pool = (value, max(weight, _LEAST_WEIGHT), 1)
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


def _check(name: str, values: Sequence[float], *, least: float) -> None:
    wrong = not isinstance(values, Sequence) or len(values) != len(KNOTS)
    if wrong or not all(_is_number(value) and value >= least for value in values):
        raise ValueError(f"{name}={values!r} is not valid: give a number >= {least} for each of the sizes {KNOTS}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
