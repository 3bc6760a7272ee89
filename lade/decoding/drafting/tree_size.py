"""How large a step's tree should be: what decides about it, and what it has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PassCost(Protocol):
    """What a forward pass costs.

    Attributes:
        table: seconds by size, from 0 on; never decreasing.
        plain_s: seconds of a pass over one token on average, hiccups included.
        marginals: seconds that one more token adds, on the lower convex hull of the table; never decreasing.
        corners: sizes where the table touches its hull, ascending.
    """

    table: list[float]
    plain_s: float
    marginals: list[float]
    corners: list[int]

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a pass."""


class Budget(Protocol):
    """Decides how large trees are."""

    @property
    def most(self) -> int:
        """Tokens fed per step at most."""
        ...

    def thresholds(self) -> list[tuple[int, float]]:
        """Sizes up to which to grow, each with the score that a node must exceed to be added on the way there."""
        ...

    @property
    def trust(self) -> float:
        """What guesses of the memory bring of what their scores promise."""
        ...

    def choose(self, scores: Sequence[float], alone: Sequence[float] | None = None) -> int:
        """How many of the candidates to feed.

        Args:
            scores: how likely each is to be accepted, the root's 1.0 first; the memory's times `trust`.
            alone: likewise of those of the memory; empty if it was not searched, None where there are no others.
        """
        ...

    def pays(self, scores: Sequence[float]) -> bool:
        """Whether some tokens of a guess with these scores would be fed, if there were no others."""
        ...

    def fill_to(self, size: int) -> int:
        """The size up to which to fill a tree of `size` with other guesses and the lookahead window."""
        ...

    def skip_drafting(self) -> bool:
        """Whether to feed the root alone in the step that begins, without a search for candidates."""
        ...

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """Learn from a step; at once, or before anything that this may change is decided."""
        ...

    def settle(self) -> None:
        """Learn now from steps that have been observed and only noted, before what they are compared with changes."""
        ...


class FixedBudget:
    """The same number of tokens in each step, as long as there are guesses.

    Args:
        size: tokens fed, the root included.
    """

    def __init__(self, size: int) -> None:
        self.size = self.most = size
        self.trust = 1.0

    def skip_drafting(self) -> bool:
        """See `Budget`."""
        return False

    def thresholds(self) -> list[tuple[int, float]]:
        """See `Budget`."""
        return [(self.size, 0.0)]

    def choose(self, scores: Sequence[float], alone: Sequence[float] | None = None) -> int:
        """See `Budget`."""
        return len(scores)

    def pays(self, scores: Sequence[float]) -> bool:
        """See `Budget`."""
        return True

    def fill_to(self, size: int) -> int:
        """See `Budget`."""
        return self.size

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """See `Budget`."""

    def settle(self) -> None:
        """See `Budget`."""
