"""What passes cost that are larger than those a `PassCost` knows, for trees that several processes share."""

from __future__ import annotations

from lade.decoding.drafting.tree_size import PassCost


class LongerCost:
    """A `PassCost` that goes straight on, as steep as it ended; passes of any size are still learned by the given one.

    Args:
        cost: up to a size of its own.
        most: up to which this one goes, at least that size.
    """

    def __init__(self, cost: PassCost, most: int) -> None:
        self._cost, self._most = cost, most
        self._table: list[float] = []
        self._marginals: list[float] = []
        self._corners: list[int] = []
        self._read: list[float] | None = None  # the table that these go on from

    @property
    def table(self) -> list[float]:
        """See `PassCost`."""
        self._go_on()
        return self._table

    @property
    def plain_s(self) -> float:
        """See `PassCost`."""
        return self._cost.plain_s

    @property
    def marginals(self) -> list[float]:
        """See `PassCost`."""
        self._go_on()
        return self._marginals

    @property
    def corners(self) -> list[int]:
        """See `PassCost`."""
        self._go_on()
        return self._corners

    def _go_on(self) -> None:
        """Compute what is read, if the cost has moved since: then it has a new table."""
        table, marginals, corners = self._cost.table, self._cost.marginals, self._cost.corners
        if table is self._read:
            return
        slope, last = marginals[-1], len(table) - 1
        self._table = [*table, *(table[-1] + slope * more for more in range(1, self._most - last + 1))]
        self._marginals = [*marginals, *[slope] * (self._most - last)]
        self._corners = [*corners[:-1], self._most]  # where the given one ends, this one goes on as steep
        self._read = table

    def observe(self, size: int, seconds: float) -> None:
        """See `PassCost`."""
        self._cost.observe(size, seconds)
