"""Limits of tree sizes, a fixed size, and what a controller has to know of passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

LARGEST = 128
"""Tokens fed per step at most, by one process: what passes are measured for, and what CUDA graphs are captured for."""
LARGEST_SHARED = 512
"""The same by several processes, each of which feeds a part."""
RECENT = 9
"""Values of late that a median is taken of, of what passes and the library's own work take: it stands four outliers."""


def max_tree_size(processes: int) -> int:
    """Return the tokens per step at most where so many processes feed a part of each tree."""
    return LARGEST if processes == 1 else min(LARGEST * processes, LARGEST_SHARED)


class PassCost(Protocol):
    """What a forward pass costs.

    Attributes:
        table: seconds by size, from 0 on; never decreasing.
        marginals: seconds that one more token adds, on the lower convex hull of the table; never decreasing.
        corners: sizes where the table touches its hull, ascending.
        wants_baseline: whether a pass over one token is due, to compare others with.
    """

    table: list[float]
    marginals: list[float]
    corners: list[int]
    wants_baseline: bool

    def observe(self, size: int, seconds: float, *, prepared: bool = False) -> None:
        """Learn from a pass; `prepared`: it did work that is done once, and its time is no evidence."""


class FixedBudget:
    """Decides how large trees are: the same number of tokens in each step, as long as there are guesses.

    Args:
        size: tokens fed, the root included.

    Attributes:
        most: tokens fed per step at most.
        exhausted: whether drafting rests, since this text has lost all that it may lose by drafts.
    """

    def __init__(self, size: int) -> None:
        self.size = self.most = size
        self.exhausted = False

    def skip_drafting(self) -> bool:
        """Return whether to feed the root alone in the step that begins, without a search for candidates."""
        return False

    def stages(self) -> list[tuple[int, float]]:
        """Return growth stages: (target size, minimum node score)."""
        return [(self.size, 0.0)]

    def choose(self, scores: Sequence[float]) -> int:
        """Return how many of the candidates to feed.

        Args:
            scores: how likely each is to be accepted, likeliest first, the root's 1.0 before them.
        """
        return len(scores)

    def worth_verifying(self, scores: Sequence[float]) -> bool:
        """Return whether some tokens of a guess with these scores would be fed, if there were no others."""
        return True

    def fill_size(self, size: int) -> int:
        """Return the size up to which to fill a tree of `size` with guesses without scores and the window."""
        return self.size

    def learn(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """Learn what the candidates fed in this step have brought.

        Args:
            scores: as in `choose`, of those that were fed.
            accepted: indices into `scores` of those that were accepted, the root left out.
        """
