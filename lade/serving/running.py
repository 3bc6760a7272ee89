"""Running requests: admission to cache rows, KV allocation, preemption of the latest."""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from lade.decoding.row import Row
from lade.model.kv_cache import RowCache, TreeCache
from lade.serving.capacity import Capacity, Need
from lade.serving.handle import Handle, PromptLogprobs
from lade.serving.request import EngineRequest


@dataclass(eq=False)
class ActiveRequest:
    """A request that is being prefilled or decoded, or that was preempted."""

    request: EngineRequest
    handle: Handle
    number: int  # in the order of admission
    row: Row | None = None  # writes the answer; None until prefill begins
    cache: TreeCache = field(default_factory=TreeCache)  # of the text, until the row joins the batch
    fed: int = 0  # tokens of `text` that `cache` holds
    seconds: float = 0.0  # of prefill
    cancelled: bool = False  # to be evicted before the next step
    scope: tuple[str | None, Hashable] = (None, None)  # see `PrefixReuse.scope_of`, when the text was begun
    failures: int = 0  # failed passes that the request was in

    def __post_init__(self) -> None:
        self.pinned = self.request.images is not None  # cannot be preempted: images are not fed again

    @property
    def text(self) -> list[int]:
        """Ids to feed before the row can join: the prompt, or all but the root of a resumed answer."""
        if self.row is None:
            return self.request.ids
        return self.row.tokens[:-1] if self.row.written else self.row.tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Collector of the prompt's logprobs; None if they are not requested or are complete."""
        return None if self.row is not None and self.row.written else self.request.prompt_logprobs

    @property
    def tokens(self) -> int:
        """Length of the text once its row decodes, the root included."""
        return self.request.prompt_tokens + (len(self.row.written) or 1 if self.row is not None else 1)

    def need(self, spare: int) -> Need:
        """Return the request's need if its text grows by at most `spare` tokens."""
        return self.request.need if self.pinned else self.request.need.limited(self.tokens + spare)

    def restart(self) -> None:
        """Reset prefill, so that the text is fed again from its first token."""
        self.cache, self.fed = TreeCache(), 0
        if self.row is not None and not self.row.written:
            self.row, self.handle.cached_tokens = None, 0


HEADROOM = 128  # tokens of growth reserved for each row when another request is admitted


class RunningSet:
    """Running requests: admission and preemption.

    Requests are admitted by the space that they take now, plus headroom. When they have outgrown the cache, the one
    admitted last is preempted. It is resumed as soon as it fits, before any new request is admitted. The request
    admitted first is never preempted, so every request completes.
    """

    def __init__(self, capacity: Capacity, headroom: int) -> None:
        self.capacity, self._headroom = capacity, headroom
        self._spares = [sys.maxsize, *(headroom >> half for half in range(headroom.bit_length() + 1))]
        self.prefilling: list[ActiveRequest] = []  # those whose text is being fed, in this order
        self.decoding: dict[Row, ActiveRequest] = {}  # those in the batch
        self.preempted: list[ActiveRequest] = []  # in the order of admission
        self.active: list[ActiveRequest] = []  # all of these
        self.changes = 0  # of the set: as long as it stays the same, rows only grow
        self.resume_alone = False  # resume preempted requests one after the other, to find the one that fails
        self._numbers = itertools.count()

    def _note_change(self) -> None:
        self.active = [*self._admitted, *self.preempted]
        self.changes += 1

    @property
    def _admitted(self) -> list[ActiveRequest]:
        return [*self.prefilling, *self.decoding.values()]

    def has_room(self, request: EngineRequest) -> bool:
        """Return True if one more request can be admitted."""
        now = request.prompt_tokens + 1
        need = request.need if request.images is not None else request.need.limited(now + self._headroom)
        return not self.preempted and self._fits(need)

    def _fits(self, need: Need) -> bool:
        return self.capacity.fits([need, *(active.need(self._headroom) for active in self._admitted)])

    def add(self, request: EngineRequest, handle: Handle) -> ActiveRequest:
        """Admit a request, to be prefilled after those before it."""
        active = ActiveRequest(request, handle, next(self._numbers))
        self.prefilling.append(active)
        self._note_change()
        return active

    def join(self, active: ActiveRequest, row: Row) -> None:
        """Move a request whose text has been fed to the decoding rows."""
        self.prefilling.remove(active)
        self.decoding[row] = active
        self._note_change()

    def next_preempted(self) -> ActiveRequest | None:
        """Return the request to preempt before the next step; None if all fit."""
        admitted = self._admitted
        if not admitted or self.capacity.fits([active.need(0) for active in admitted]):
            return None
        return max((active for active in admitted if not active.pinned), key=lambda active: active.number)

    def preempt(self, active: ActiveRequest) -> None:
        """Preempt a request."""
        self.remove(active)
        bisect.insort(self.preempted, active, key=lambda active: active.number)
        self._note_change()

    def resume(self) -> None:
        """Resume preempted requests that fit again; their texts are fed after those before them."""
        while self.preempted and self._fits(self.preempted[0].need(self._headroom)):
            if self.resume_alone and self._admitted:
                return
            self.prefilling.append(self.preempted.pop(0))
            self._note_change()
        self.resume_alone = self.resume_alone and bool(self.preempted)

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request, whatever its state."""
        for queue in (self.prefilling, self.preempted):
            if active in queue:
                queue.remove(active)
        if active.row is not None:
            self.decoding.pop(active.row, None)
        self._note_change()

    def clear(self) -> list[ActiveRequest]:
        """Remove and return all requests."""
        everyone, self.prefilling, self.decoding, self.preempted = self.active, [], {}, []
        self._note_change()
        return everyone

    def needs(self) -> list[Need]:
        """Return the decoding rows' needs: at maximum length, or with as much growth as fits."""
        rows = self.decoding.values()
        return next(filter(self.capacity.fits, ([row.need(spare) for row in rows] for spare in self._spares)))

    def growth(self) -> int:
        """Return a lower bound on the tokens all rows may grow before a preemption; -1 if one is due."""
        fits, admitted = self.capacity.fits, self._admitted
        return next((spare for spare in self._spares if fits([active.need(spare) for active in admitted])), -1)


class KvAllocator:
    """Reserves cache slots within the engine's limits before the cache grows by itself, without limits.

    The need is recomputed when the running set has changed or rows have outgrown the last result, not at every step:
    it takes a good part of the time of a small model's pass.
    """

    def __init__(self, cache: RowCache, running: RunningSet) -> None:
        self._cache, self._running = cache, running
        self.checked = -1, (0, 0)  # changes of the running set and size of the buffers, a new tuple at each check
        self._longest_allowed = -1  # length of the longest row up to which the last check holds

    @property
    def is_enough(self) -> bool:
        """True if the last check still covers the next step, without preemption or growth of the buffers."""
        cache = self._cache
        return self.checked == (self._running.changes, cache.room) and max(cache.lengths) <= self._longest_allowed

    def reserve(self, joining: int = 0) -> None:
        """Allocate slots for the next step, in which a row of `joining` tokens joins."""
        if self.is_enough:
            return
        cache, longest, needs = self._cache, max(joining, *self._cache.lengths), self._running.needs()
        capacity = replace(self._running.capacity, sizing=cache)  # round up like the buffers that hold the rows now
        if not capacity.suffices(cache.room, needs, longest):
            cache.reserve(*capacity.room(needs, longest))
        self.checked = self._running.changes, cache.room
        self._longest_allowed = min(longest + self._running.growth(), capacity.longest(cache.room[1], needs))
