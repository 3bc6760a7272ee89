"""The room that the rows of an engine have in its cache."""

from __future__ import annotations

from dataclasses import replace

from lade.model.kv_cache import RowCache
from lade.serving.seats import Seats


class Room:
    """Reserves slots before the cache grows by itself, which knows no limits.

    How much room rows need is looked at anew when anyone has come or gone, or when rows have outgrown what was found
    then. It takes as long as a good part of a small model's pass, so it is not done at every step.

    Args:
        cache: holds the rows.
        seats: whose they are.

    Attributes:
        found: changes of the seats, and the cache's buffers, when it was last looked at; another object each time.
    """

    def __init__(self, cache: RowCache, seats: Seats) -> None:
        self._cache, self._seats = cache, seats
        self.found = -1, (0, 0)
        self._enough_for = -1  # tokens of the longest row, with these

    @property
    def is_enough(self) -> bool:
        """Whether it is known that nobody has to make room for the next step, and that buffers are large enough."""
        cache = self._cache
        return self.found == (self._seats.changes, cache.room) and max(cache.lengths) <= self._enough_for

    def reserve(self, joining: int = 0) -> None:
        """Have room for the next step; a row of `joining` tokens is about to join."""
        if self.is_enough:
            return
        cache, longest, needs = self._cache, max(joining, *self._cache.lengths), self._seats.needs()
        capacity = replace(self._seats.capacity, sizing=cache)  # of the buffers that hold the rows now
        if not capacity.suffices(cache.room, needs, longest):
            cache.reserve(*capacity.room(needs, longest))
        self.found = self._seats.changes, cache.room
        self._enough_for = min(longest + self._seats.growth(), capacity.longest(cache.room[1], needs))
