"""One size for the trees of all rows of a batch.

A pass takes the time of its largest tree: a row that feeds 8 tokens makes all others wait as if they did, too. So rows
must not decide for themselves. Together they feed the S that maximises the sum of what they are expected to yield, less
what the pass's time would yield elsewhere; per row that is the mean yield less r t_B(S), r being the tokens per second
of a row and t_B(S) the time of a pass with B trees of size S. That is what a `Controller` weighs for a single row, and
here it weighs the mean row. What came of it is counted, too: see `Returns`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lade.decoding.drafting.controller import LARGEST, Controller
from lade.decoding.drafting.habits import Habits
from lade.decoding.drafting.tree_size import PassCost


class BatchBudget:
    """The `Budget` of every row of one batch.

    In each step the candidates of all rows are found first, then `decide` weighs their scores, then the drafts are
    made.

    Args:
        cost: what a forward pass of the batch costs, by the size of each row's tree.
        habits: see `Controller`.
        most: likewise.
    """

    def __init__(self, cost: PassCost, habits: Habits | None = None, most: int = LARGEST) -> None:
        habits = Habits() if habits is None else habits
        self._controller, self._returns = Controller(cost, habits, most), habits.returns
        self._looks = 0  # since the last rest
        self._skipping: bool | None = None
        self._size = 1

    @property
    def most(self) -> int:
        """See `Budget`."""
        return self._controller.most

    @property
    def reads_logits(self) -> bool:
        """Whether it is worth its time to learn from the logits of a prompt that is going to be fed."""
        return not self._returns.rare

    def skip_drafting(self) -> bool:
        """See `Budget`: all rows skip it in the same steps."""
        if self._skipping is None:
            self._skipping = self._controller.skip_drafting()
        return self._skipping

    def thresholds(self) -> list[tuple[int, float]]:
        """See `Budget`."""
        return self._controller.thresholds()

    def decide(self, candidates: Sequence[Sequence[float]]) -> None:
        """Choose the size of this step's trees.

        Args:
            candidates: `[B]`, of each row the scores of all nodes that it could feed; empty where drafting is skipped.
                A row without scores beside others with some drafts by another method, or not at all: it counts one
                token.
        """
        if not any(candidates):
            return
        mean = np.zeros(max(map(len, candidates)))
        for scores in candidates:
            mean[: max(1, len(scores))] += scores or [1.0]
        resting = bool(self._skipping)  # then what is there comes from other sources than the memory, or a grammar
        alone = () if resting else None
        self._size = self._controller.choose((mean / len(candidates)).tolist(), alone, tuition=not resting)

    @property
    def trust(self) -> float:
        """See `Budget`."""
        return self._controller.trust

    def choose(self, scores: Sequence[float], alone: Sequence[float] | None = None) -> int:
        """See `Budget`: as many as in all other rows, if there are as many."""
        return min(self._size, len(scores))

    def pays(self, scores: Sequence[float]) -> bool:
        """See `Budget`: if all rows had such a guess."""
        return self._controller.pays(scores)

    def fill_to(self, size: int) -> int:
        """See `Budget`: a row with fewer candidates than others fills up, which costs nothing."""
        return self._controller.fill_to(max(size, self._size))

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """No-op: `observe_pass` gets the pass as a whole."""

    def observe_pass(self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int) -> None:
        """Learn from a forward pass.

        Args:
            fed: size of its largest tree.
            emitted: tokens that the mean row got.
            seconds: undisturbed seconds that the whole step took; see `lade.clock`.
            forward_s: seconds of those that the model took.
            rows: B, how many took part.
        """
        self._controller.observe(fed, emitted, seconds, forward_s)
        if rows > 1 and self._skipping is False:
            took = self._controller.in_plain_steps(fed, seconds, forward_s)
            self._returns.add(emitted, took)
            self._looks += 1
            if emitted <= max(1.0, took):  # a look that has won is followed by another
                self._controller.rest(self._looks * self._returns.rest)
                self._looks = 0
        self._skipping = None

    def settle(self) -> None:
        """See `Budget`; before the cost becomes that of another number of rows, too."""
        self._controller.settle()
