"""Who is prefilled and decoded at a time, and who makes room for whom."""

from __future__ import annotations

import bisect
import itertools
import sys

from lade.decoding.row import Row
from lade.serving.active import ActiveRequest
from lade.serving.capacity import Capacity, Need
from lade.serving.handle import Handle
from lade.serving.request import Request

HEADROOM = 128
"""Tokens that each row is to have room for beyond its own when another one is seated beside it."""


class Seats:
    """The requests of a batch.

    Rows are seated by the room that they take now, and some more. When they have grown too long for one another, the
    one that was seated last makes room, and goes on when there is room for it, before anyone else is seated. The one
    seated first never makes room, so all come to their end.

    Args:
        capacity: what fits at a time.
        headroom: see `HEADROOM`.

    Attributes:
        capacity: as given.
        prefilling: those whose text is being fed, in this order.
        decoding: those after that, by their rows.
        displaced: those that have made room, in the order in which they were seated first.
        active: all of these.
        changes: how often anyone has come, gone, or taken another place. As long as nobody has, rows only grow.
    """

    def __init__(self, capacity: Capacity, headroom: int) -> None:
        self.capacity, self._headroom = capacity, headroom
        self._spares = [sys.maxsize, *(headroom >> half for half in range(headroom.bit_length() + 1))]
        self.prefilling: list[ActiveRequest] = []
        self.decoding: dict[Row, ActiveRequest] = {}
        self.displaced: list[ActiveRequest] = []
        self.active: list[ActiveRequest] = []
        self.changes = 0
        self._numbers = itertools.count()

    def _note_change(self) -> None:
        self.active = [*self._seated, *self.displaced]
        self.changes += 1

    @property
    def _seated(self) -> list[ActiveRequest]:
        return [*self.prefilling, *self.decoding.values()]

    def has_room(self, request: Request) -> bool:
        """Whether one more request may be seated beside the others."""
        now = request.prompt_tokens + 1
        need = request.need if request.images is not None else request.need.limited(now + self._headroom)
        return not self.displaced and self._fits(need)

    def _fits(self, need: Need) -> bool:
        return self.capacity.fits([need, *(active.need(self._headroom) for active in self._seated)])

    def add(self, request: Request, handle: Handle) -> ActiveRequest:
        """Seat a request; it is prefilled after those before it."""
        active = ActiveRequest(request, handle, next(self._numbers))
        self.prefilling.append(active)
        self._note_change()
        return active

    def join(self, active: ActiveRequest, row: Row) -> None:
        """A request's text has been fed."""
        self.prefilling.remove(active)
        self.decoding[row] = active
        self._note_change()

    def next_to_make_room(self) -> ActiveRequest | None:
        """Who has to make room before the next step, if there is not enough."""
        seated = self._seated
        if not seated or self.capacity.fits([active.need(0) for active in seated]):
            return None
        return max((active for active in seated if not active.pinned), key=lambda active: active.number)

    def displace(self, active: ActiveRequest) -> None:
        """It has made room."""
        self.remove(active)
        bisect.insort(self.displaced, active, key=lambda active: active.number)
        self._note_change()

    def recall(self) -> None:
        """Have those go on that there is room for again; their texts are fed after those before them."""
        while self.displaced and self._fits(self.displaced[0].need(self._headroom)):
            self.prefilling.append(self.displaced.pop(0))
            self._note_change()

    def remove(self, active: ActiveRequest) -> None:
        """It is no longer here."""
        for line in (self.prefilling, self.displaced):
            if active in line:
                line.remove(active)
        if active.row is not None:
            self.decoding.pop(active.row, None)
        self._note_change()

    def clear(self) -> list[ActiveRequest]:
        """Remove all, and return them."""
        everyone, self.prefilling, self.decoding, self.displaced = self.active, [], {}, []
        self._note_change()
        return everyone

    def needs(self) -> list[Need]:
        """What room to make for those that are decoded: for all that they may become, or as far as there is room."""
        rows = self.decoding.values()
        return next(filter(self.capacity.fits, ([row.need(spare) for row in rows] for spare in self._spares)))

    def growth(self) -> int:
        """By how many tokens all may grow before one has to make room, at least; -1 if one has to now."""
        fits, seated = self.capacity.fits, self._seated
        return next((spare for spare in self._spares if fits([active.need(spare) for active in seated])), -1)
