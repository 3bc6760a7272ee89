"""One size for the trees of all rows of a batch.

A pass takes the time of its largest tree: a row that feeds 8 tokens makes all others wait as if they did, too. So rows
must not decide for themselves. Together they feed the S that maximises the sum of what they are expected to yield, less
what the pass's time would yield elsewhere; per row that is the mean yield less r t_B(S), r being the tokens per second
of a row and t_B(S) the time of a pass with B trees of size S. That is what a `Controller` weighs for a single row, and
here it is asked about the mean row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lade.decoding.drafting.tree_size import Controller, StepCost


class JointBudget:
    """The `Budget` of every row of one batch.

    In each step all rows look first, then `decide` is told what they have found, then they grow.

    Args:
        cost: of a pass of the batch, by the size of each row's tree.
    """

    def __init__(self, cost: StepCost) -> None:
        self._controller = Controller(cost)
        self._resting: bool | None = None
        self._size = 1

    def rest(self) -> bool:
        """See `Budget`: all rows rest in the same steps."""
        if self._resting is None:
            self._resting = self._controller.rest()
        return self._resting

    def stages(self) -> list[tuple[int, float]]:
        """See `Budget`."""
        return self._controller.stages()

    def decide(self, found: Sequence[Sequence[float]]) -> None:
        """Choose the size of this step's trees.

        Args:
            found: `[B]`, of each row the scores of all nodes that it has found; nothing where rows rest. A row without
                scores beside others with some drafts by another method, or not at all: it counts one token.
        """
        if self._resting or not any(found):
            return
        mean = np.zeros(max(map(len, found)))
        for scores in found:
            mean[: max(1, len(scores))] += scores or [1.0]
        self._size = self._controller.choose((mean / len(found)).tolist())

    def choose(self, scores: Sequence[float]) -> int:
        """See `Budget`: as many as all others, as far as there are some."""
        return min(self._size, len(scores))

    def explored(self, size: int) -> int:
        """See `Budget`: whoever found less than others fills up, which costs nothing."""
        return self._controller.explored(max(size, self._size))

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """Nothing: it is told of the pass as a whole."""

    def passed(self, fed: int, emitted: float, seconds: float, forward_s: float) -> None:
        """Learn from a pass: the size of its largest tree, the tokens that the mean row got, and its time."""
        self._controller.observe(fed, emitted, seconds, forward_s)
        self._resting = None
