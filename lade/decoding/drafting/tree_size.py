"""How large a step's tree should be: as large as is worth its time.

Let t(S) be the seconds of a step that feeds S tokens, E(S) the tokens it is expected to yield, and r the tokens per
second of late. In the long run most tokens per second come from the S that maximises E(S) - r t(S): what a step yields,
less what its time would yield elsewhere (renewal reward theorem). S = 1, plain decoding, is always a candidate.

That counts what a step yields now. What it teaches pays later, most of all while hardly anything is known and E(S)
stays low. So a step feeds no less than steps were worth feeding lately, unless that costs too much, and what the memory
cannot fill is left to the lookahead window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

LARGEST = 128
"""Tokens fed per step at most."""
NEWS = 0.006
"""Tokens that one more node saves later by what its logits tell about the text."""
TUITION = 0.15
"""Tokens that feeding the usual size may cost, for what it teaches, where less would yield more now."""
_GAIN_OF_NEWS = 0.3
_FIRST_SIZE = 2  # what was worth feeding before anything is known
_SPREAD, _LEAP = 2, 8  # a tree has at most _SPREAD times the usual size, and _LEAP nodes more
_STEPS = 24  # that averages are over
_LEAST_NODES = 6  # the library's time of a step is that of the nodes fed and of this many more
_PATIENCE = 3  # steps
_LONGEST_SKIP = 64  # steps
_CHEAP = 0.005  # of a step's time


class PassCost(Protocol):
    """What a forward pass costs."""

    @property
    def table(self) -> list[float]:
        """Seconds by size, from 0 on; never decreasing."""
        ...

    @property
    def marginals(self) -> list[float]:
        """Seconds that one more token adds, on the lower convex hull of the table; never decreasing."""
        ...

    @property
    def corners(self) -> list[int]:
        """Sizes where the table touches its hull, ascending."""
        ...

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a pass."""
        ...


class Budget(Protocol):
    """Decides how large trees are."""

    @property
    def most(self) -> int:
        """Tokens fed per step at most."""
        ...

    def thresholds(self) -> list[tuple[int, float]]:
        """Sizes up to which to grow, each with the score that a node must exceed to be added on the way there."""
        ...

    def choose(self, scores: Sequence[float]) -> int:
        """How many of the candidates to feed, given their scores, the root's 1.0 first."""
        ...

    def fill_to(self, size: int) -> int:
        """The size up to which to fill a tree of `size` with other guesses and the lookahead window."""
        ...

    def skip_drafting(self) -> bool:
        """Whether to feed the root alone in the step that begins, without a search for candidates."""
        ...

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """Learn from a step."""
        ...


class FixedBudget:
    """The same number of tokens in each step, as long as there are guesses.

    Args:
        size: tokens fed, the root included.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def most(self) -> int:
        """See `Budget`."""
        return self.size

    def skip_drafting(self) -> bool:
        """See `Budget`."""
        return False

    def thresholds(self) -> list[tuple[int, float]]:
        """See `Budget`."""
        return [(self.size, 0.0)]

    def choose(self, scores: Sequence[float]) -> int:
        """See `Budget`."""
        return len(scores)

    def fill_to(self, size: int) -> int:
        """See `Budget`."""
        return self.size

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """See `Budget`."""


class Controller:
    """The size that pays best, by what passes cost and what guesses have been worth.

    Args:
        cost: what a forward pass costs; it learns from every step.
    """

    most = LARGEST
    """See `Budget`."""

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._tokens, self._seconds = _STEPS * 1.0, _STEPS * cost.table[1]
        self._gain = _GAIN_OF_NEWS
        self._usual = float(_FIRST_SIZE)
        self._node_s = 0.0  # of the library's own time, per node
        self._idle = 0  # times in a row that plain decoding was chosen
        self._skip = 0  # steps to go

    @property
    def rate(self) -> float:
        """Tokens per second of late, at least those of plain decoding."""
        return max(self._tokens / self._seconds, 1.0 / self._cost.table[1])

    @property
    def _news(self) -> float:
        """What a node is worth beside its score; nothing, if what is learned never helps."""
        return NEWS * min(1.0, self._gain / _GAIN_OF_NEWS)

    def thresholds(self) -> list[tuple[int, float]]:
        """See `Budget`: the usual size, then the corners of the cost's hull, between which all nodes cost the same."""
        rate, news, cost, least = self.rate, self._news, self._cost, int(self._usual)
        most = min(LARGEST, _SPREAD * least + _LEAP)
        corners = [size for size in cost.corners if least < size < most] + [most]
        return [(least, 0.0)] + [
            (size, max(0.0, rate * (cost.marginals[size - 1] + self._node_s) - news)) for size in corners
        ]

    def choose(self, scores: Sequence[float]) -> int:
        """See `Budget`."""
        rate, news, table, node_s = self.rate, self._news, self._cost.table, self._node_s
        worth = [
            yielded + news * size - rate * (table[size] + node_s * (size + _LEAST_NODES))
            for size, yielded in enumerate(accumulate(scores), start=1)
        ]
        worth[0] = 1.0 + news - rate * table[1]  # plain decoding soon skips the search, which costs time, too
        best = worth.index(max(worth)) + 1
        self._idle = self._idle + 1 if best == 1 else 0
        self._usual += (best - self._usual) / _STEPS
        usual = min(int(self._usual), len(scores))
        return usual if usual > best and worth[usual - 1] > worth[best - 1] - TUITION else best

    def fill_to(self, size: int) -> int:
        """See `Budget`: to the usual size, and as far as a node costs less than its news is worth."""
        rate, news, cost = self.rate, self._news, self._cost
        ends = [min(corner, LARGEST) for corner in cost.corners]  # the hull may go straight on beyond the largest
        affordable = [end for end in ends if rate * (cost.marginals[end - 1] + self._node_s) <= news]
        return max([size, int(self._usual), *affordable])

    def skip_drafting(self) -> bool:
        """See `Budget`: for longer and longer, if the search costs time and has found nothing worth feeding."""
        if self._skip == 0 and self._idle > _PATIENCE and self._node_s * _LEAST_NODES > _CHEAP * self._cost.table[1]:
            self._skip = 1 + min(_LONGEST_SKIP, 2 ** (self._idle - _PATIENCE - 1))
        self._skip = max(0, self._skip - 1)
        return self._skip > 0

    def observe(self, fed: int, emitted: float, seconds: float, forward_s: float) -> None:
        """See `Budget`."""
        self._tokens += emitted - self._tokens / _STEPS
        self._seconds += seconds - self._seconds / _STEPS
        self._gain += (emitted - 1 - self._gain) / _STEPS
        if not self._skip:
            self._node_s += ((seconds - forward_s) / (fed + _LEAST_NODES) - self._node_s) / _STEPS
        self._cost.observe(fed, forward_s)
