"""Running requests: admission to cache rows, KV allocation, preemption of the latest."""

from __future__ import annotations

import bisect
import itertools
import sys
from dataclasses import dataclass, field, replace

from lade.decoding.row import Row
from lade.model.kv_cache import RowCache, TreeCache
from lade.model.prompt_logits import PromptLogprobs
from lade.serving.capacity import Capacity, Need
from lade.serving.handle import Handle
from lade.serving.request import Request


@dataclass(eq=False)
class ActiveRequest:
    """A request that is being prefilled or decoded, or that had to make room for older ones and goes on later.

    Attributes:
        request: the prompt and its arguments.
        handle: gets the steps and the result.
        number: in the order in which requests were seated.
        row: writes the answer; made when prefill begins.
        cache: keys and values of its text, until the row joins the batch.
        fed: tokens of its text that the cache holds.
        seconds: seconds that prefill has taken.
        cancelled: whether to evict it before the next step.
        pinned: whether it cannot make room for others: an image is not fed again.
    """

    request: Request
    handle: Handle
    number: int
    row: Row | None = None
    cache: TreeCache = field(default_factory=TreeCache)
    fed: int = 0
    seconds: float = 0.0
    cancelled: bool = False
    pinned: bool = field(init=False)

    def __post_init__(self) -> None:
        self.pinned = self.request.images is not None

    @property
    def text(self) -> list[int]:
        """What has to be fed before it can join the batch: the prompt; of an answer that goes on, all but the root."""
        if self.row is None:
            return self.request.ids
        return self.row.tokens[:-1] if self.row.written else self.row.tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """What takes in how likely the tokens of its text are, where that is wanted and not known yet."""
        return None if self.row is not None and self.row.written else self.request.prompt_logprobs

    @property
    def tokens(self) -> int:
        """Of its text, the root included, once it is decoded."""
        return self.request.prompt_tokens + (len(self.row.written) or 1 if self.row is not None else 1)

    def need(self, spare: int) -> Need:
        """The room that it takes if it grows by so many tokens more."""
        return self.request.need if self.pinned else self.request.need.limited(self.tokens + spare)

    def start_over(self) -> None:
        """Have its text fed again, which may have an answer in it."""
        self.cache, self.fed = TreeCache(), 0
        if self.row is not None and not self.row.written:
            self.row, self.handle.cached_tokens = None, 0


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
