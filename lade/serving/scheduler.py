"""Admission: the waiting queue of an engine, and the thread that runs its batches."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError

import torch

from lade.errors import ConfigError, EngineClosedError, EngineFullError
from lade.serving.batch import Batch
from lade.serving.capacity import Capacity
from lade.serving.handle import Handle, Place, Wakeups, check_process
from lade.serving.request import Request
from lade.serving.running import ActiveRequest
from lade.serving.snapshot import Snapshot
from lade.stats import Stats, Step

Entry = tuple[Request, Handle]


class WaitingLine:
    """One line for each client, which are served in turn; of one client's requests the first one is served first.

    So a client with a hundred requests does not hold up another with a single one.
    """

    def __init__(self) -> None:
        self._lines: dict[str | None, deque[Entry]] = {}  # none empty; the first one is next

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))

    @property
    def first(self) -> Request:
        """The one that is served next, of at least one."""
        return next(iter(self._lines.values()))[0][0]

    def add(self, request: Request, handle: Handle) -> None:
        """Append a request to the line of its client; a new line is served after the others."""
        self._lines.setdefault(request.client, deque()).append((request, handle))

    def pop(self) -> Entry:
        """Remove and return the one that is served next."""
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        entry = line.popleft()
        if line:
            self._lines[client] = line
        return entry

    def remove(self, handle: Handle) -> None:
        """Remove a request."""
        for client, line in self._lines.items():
            rest = deque(entry for entry in line if entry[1] is not handle)
            if len(rest) < len(line):
                self._lines[client] = rest
                if not rest:
                    del self._lines[client]
                return

    def clear(self) -> list[Handle]:
        """Remove all, and return their handles."""
        handles = [handle for line in self._lines.values() for _, handle in line]
        self._lines.clear()
        return handles


class Scheduler:
    """The queue of requests, and the thread that serves them.

    It knows nothing of the `Engine`, so that a forgotten engine can be collected, which closes its scheduler.

    Args:
        batch: decodes; only the thread touches it.
        max_waiting: requests that may wait, beside those that there are free rows for.
        ended: is called when the thread has ended, with the error that ended it, if one did.

    Attributes:
        problem: the error that ended the thread, if one did.
        wakeups: wakes those who wait for requests in coroutines.
    """

    def __init__(
        self, batch: Batch, max_waiting: int, ended: Callable[[BaseException | None], None] | None = None
    ) -> None:
        self._batch, self._max_waiting, self._ended = batch, max_waiting, ended
        self._capacity: Capacity = batch.capacity
        self._waiting = WaitingLine()
        self._places: set[Place] = set()  # held for requests that are being prepared
        self._seats: dict[Handle, ActiveRequest] = {}
        self._blocked = False  # whether the first one that waits had no room
        self._stirred = True  # whether there is anything new in the line, or the end
        self._admitted = -1  # changes of the seats when requests were admitted last
        self._changed, self.wakeups = threading.Condition(), Wakeups()
        self._closed = False
        self.problem: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="lade.Engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """How many requests are decoded and wait, or that it is closed. Never blocks."""
        if self._closed:
            return "closed"
        return f"{len(self._seats)} of {self._capacity.max_rows} rows, {len(self._waiting)} waiting"

    def snapshot(self) -> Snapshot:
        """See `Engine.snapshot`."""
        displaced = len(self._batch.seats.displaced)
        return self._batch.tally.snapshot(
            rows=len(self._seats) - displaced,
            max_rows=self._capacity.max_rows,
            waiting=len(self._waiting) + len(self._places),
            displaced=displaced,
            max_waiting=self._max_waiting,
            max_slots=self._capacity.max_tokens,
            max_prefix_bytes=self._batch.prefix_cache,
            closed=self._closed,
        )

    def reserve(self) -> Place:
        """See `Engine.reserve`."""
        self.check_process()
        with self._changed:
            self._check_open()
            held = len(self._waiting) + len(self._places)
            blocked = self._blocked and self._waiting
            if held >= self._max_waiting + (0 if blocked else self._capacity.max_rows - len(self._seats)):
                raise EngineFullError(
                    f"{held} requests wait already: add this one later, or give the engine a greater max_waiting"
                )
            place = Place(self)
            self._places.add(place)
        return place

    def give_up(self, place: Place) -> Handle | None:
        """See `Place.release`; returns the handle of the request that has taken the place, if one has."""
        if place.handle is None:
            self.check_process()
            with self._changed:
                place.released = place.handle is None
                self._places.discard(place)
        return place.handle

    def check_place(self, place: Place) -> None:
        """Raise what `take` raises for a place, before a request is prepared in vain."""
        if place.handle is not None or place.engine is not self:
            raise ConfigError("place", place, "give one of this engine's own reserve() that no request has taken")
        if place.released:
            raise CancelledError("its place was released")

    def take(
        self, request: Request, place: Place, stats: Stats, on_step: Callable[[Step], None] | None = None
    ) -> Handle:
        """Let a request wait; the rest is for its handle."""
        self._capacity.check(request.need)
        handle = Handle(
            self.cancel,
            stats=stats,
            seed=request.seed,
            on_step=on_step,
            prompt_tokens=request.prompt_tokens,
            text=request.text,
            wakeups=self.wakeups,
        )
        with self._changed:
            self._check_open()
            self.check_place(place)
            self._places.remove(place)
            place.handle = handle
            self._waiting.add(request, handle)
            self._stir()
        return handle

    def _check_open(self) -> None:
        if self._closed:
            problem = self.problem
            end = "was closed" if problem is None else f"broke down ({type(problem).__name__}: {problem})"
            raise EngineClosedError(f"this engine {end}: make a new one")

    def check_process(self) -> None:
        """Raise `EngineClosedError` in a forked process, before a lock is taken that no thread there releases."""
        check_process(self._process)

    def cancel(self, handle: Handle) -> bool:
        """See `Handle.cancel`."""
        if handle.done():
            return False
        self.check_process()
        with self._changed:
            if handle.done():
                return False
            if handle in self._seats:
                self._seats[handle].cancelled = True
                return True
            self._waiting.remove(handle)
            self._stir()
        self._end(handle, None)
        return True

    def close(self) -> None:
        """See `Engine.close`."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._stir()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        problem: BaseException | None = None
        try:
            with torch.no_grad():
                while self._admit():
                    with self.wakeups:
                        self._batch.advance()
        except BaseException as unforeseen:
            problem = unforeseen
            raise
        finally:
            self._end_all(problem)
            if self._ended is not None:
                self._ended(problem)

    def _stir(self) -> None:
        """Have the thread look at the line; by one that has the lock."""
        self._stirred = True
        self._changed.notify_all()

    def _admit(self) -> bool:
        """Admit requests that fit, waiting for one if there is nothing to do; false to end."""
        seats = self._batch.seats
        if not self._stirred and seats.changes == self._admitted:
            return True  # rows have only grown: nobody fits who did not
        with self._changed:
            self._forget_ended()
            self._changed.wait_for(lambda: self._closed or self._waiting or not self._batch.idle)
            self._stirred = False
            while self._waiting and not self._closed and seats.has_room(self._waiting.first):
                request, handle = self._waiting.pop()
                self._seats[handle] = seats.add(request, handle)
            self._blocked, self._admitted = bool(self._waiting), seats.changes
            return not self._closed

    def _forget_ended(self) -> None:
        for handle in [handle for handle in self._seats if handle.done()]:
            del self._seats[handle]

    def _end_all(self, problem: BaseException | None) -> None:
        with self._changed:
            self._closed, self.problem = True, problem
            waiting = self._waiting.clear()
        for handle in waiting:
            self._end(handle, problem)
        self._batch.close(problem)
        with self._changed:
            self._forget_ended()

    def _end(self, handle: Handle, problem: BaseException | None) -> None:
        """End a request that waits, as cancelled or with an error."""
        if handle.end(problem):
            self._batch.tally.add_end(str(handle.reason))
