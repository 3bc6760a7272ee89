"""The step cost of a batch that loses rows while it is decoded."""

from __future__ import annotations

from collections.abc import Callable

from lade.model.inputs import batch_bucket
from lade.tuning.step_cost import StepCost


class BatchCost:
    """What a pass over a batch costs, by the size of each row's tree: the curve for as many rows as there are.

    Args:
        cost_of: returns the curve of a number of rows; called again when that has fallen to the next power of two.
        rows: B, rows of the batch at first.
    """

    def __init__(self, cost_of: Callable[[int], StepCost], rows: int) -> None:
        self._cost_of, self._rows = cost_of, rows
        self._current = cost_of(rows)

    @property
    def rows(self) -> int:
        """How many there are."""
        return self._rows

    @property
    def current(self) -> StepCost:
        """The curve of as many rows as there are."""
        return self._current

    @property
    def table(self) -> list[float]:
        """See `StepCost`."""
        return self._current.table

    @property
    def marginals(self) -> list[float]:
        """See `StepCost`."""
        return self._current.marginals

    @property
    def corners(self) -> list[int]:
        """See `StepCost`."""
        return self._current.corners

    def observe(self, size: int, seconds: float) -> None:
        """Learn from one pass of these rows, `size` being that of the largest tree."""
        self._current.observe(size, seconds)

    def resize(self, rows: int) -> None:
        """`rows` are left; 0 when all have ended."""
        if rows and batch_bucket(rows) != batch_bucket(self._rows):
            self._current = self._cost_of(rows)
        self._rows = rows or self._rows
