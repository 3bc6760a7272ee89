"""Admission: the waiting queue of an engine, its slots, and the thread that runs its batch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import torch

from lade.errors import ConfigError, EngineClosedError, EngineFullError
from lade.serving.batch import EngineBatch
from lade.serving.handle import Handle, Wakeups, check_process
from lade.serving.request import EngineRequest
from lade.serving.running import ActiveRequest
from lade.serving.snapshot import CurrentWork, EngineSnapshot


class WaitingQueue:
    """One FIFO queue per client, served round robin.

    A client with a hundred requests does not hold up one with a single request.
    """

    def __init__(self) -> None:
        # no queue is empty; the first is served next
        self._queues: dict[str | None, dict[Handle, EngineRequest]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    @property
    def first(self) -> tuple[Handle, EngineRequest]:
        """The request to be served next; the queue must not be empty."""
        queue = next(iter(self._queues.values()))
        return next(iter(queue.items()))

    def add(self, request: EngineRequest, handle: Handle) -> None:
        """Append a request to its client's queue; a new client is served after the others."""
        self._queues.setdefault(request.client, {})[handle] = request

    def pop(self) -> None:
        """Remove the request to be served next."""
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        del queue[next(iter(queue))]
        if queue:
            self._queues[client] = queue

    def remove(self, handle: Handle) -> None:
        """Remove a request, if it is waiting."""
        for client, queue in self._queues.items():
            if queue.pop(handle, None) is not None:
                if not queue:
                    del self._queues[client]
                return

    def clear(self) -> list[Handle]:
        """Remove all requests and return their handles."""
        handles = [handle for queue in self._queues.values() for handle in queue]
        self._queues.clear()
        return handles


class QueueSlot:
    """A slot in an engine's queue, from `Engine.reserve`. All methods are thread-safe.

    A slot counts as a waiting request, so a full queue is noticed before the request is prepared. At the end of the
    block a slot that no request has taken is free again.

    >>> with engine.reserve() as place:
    ...     ids = tokenizer("Once upon a time").input_ids
    ...     handle = engine.add(ids, place=place, max_new_tokens=200)

    Attributes:
        handle: handle of the request that has taken the slot; None before.
        released: True if the slot was released before a request took it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.handle: Handle | None = None
        self.released = False

    def __repr__(self) -> str:
        state = "taken" if self.handle is not None else "released" if self.released else "free"
        return f"QueueSlot({state})"

    def release(self) -> None:
        """Release the slot unless a request has taken it. A request in preparation for it never starts."""
        if self.handle is None:
            self.scheduler.release_slot(self)

    def cancel(self) -> None:
        """Release the slot, or cancel the request that has taken it."""
        self.release()
        if self.handle is not None:
            self.handle.cancel()

    def __enter__(self) -> QueueSlot:
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()


class Scheduler:
    """The waiting queue and the decoding thread.

    It holds no reference to the `Engine`, so an abandoned engine can be collected, which closes its scheduler.

    Args:
        batch: executes steps; used by the decoding thread only.
        max_waiting: see `Engine`; the attribute may be set at any time.
        ended: called when the thread has ended, with the exception that ended it, or None.
    """

    def __init__(
        self, batch: EngineBatch, max_waiting: int, ended: Callable[[BaseException | None], None] | None = None
    ) -> None:
        self._batch, self.max_waiting, self._ended = batch, max_waiting, ended
        self._capacity = batch.running.capacity
        self._waiting = WaitingQueue()
        self._slots: set[QueueSlot] = set()  # reserved for requests in preparation
        self._running: dict[Handle, ActiveRequest] = {}
        self._blocked = False  # True if the first waiting request did not fit
        self._dirty = True  # True if the queue has changed, or the scheduler is closing
        self._admitted_at = -1  # `RunningSet.changes` at the last admission
        self._changed, self._wakeups = threading.Condition(), Wakeups()
        self._closed = False
        self.problem: BaseException | None = None  # that ended the thread
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="lade.Engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """State as text: "closed", or the numbers of running and waiting requests. Never blocks."""
        if self._closed:
            return "closed"
        return f"{len(self._running)} of {self._capacity.max_rows} rows, {len(self._waiting)} waiting"

    def snapshot(self) -> EngineSnapshot:
        """See `Engine.snapshot`."""
        displaced = len(self._batch.running.preempted)
        return self._batch.tally.snapshot(
            rows=len(self._running) - displaced,
            max_rows=self._capacity.max_rows,
            waiting=len(self._waiting) + len(self._slots),
            displaced=displaced,
            max_waiting=self.max_waiting,
            max_slots=self._capacity.max_tokens,
            max_prefix_bytes=self._batch.prefix_cache,
            closed=self._closed,
        )

    def current_work(self) -> CurrentWork | None:
        """See `Engine.current_work`."""
        work = self._batch.work
        if work is None:
            return None
        rows = tuple((handle.prompt_tokens, handle.stats.new_tokens) for handle in list(self._running))
        return CurrentWork(*work, rows, sys._current_frames().get(self._thread.ident or 0))

    def reserve(self) -> QueueSlot:
        """See `Engine.reserve`."""
        check_process(self._process)
        with self._changed:
            self._check_open()
            held = len(self._waiting) + len(self._slots)
            blocked = self._blocked and self._waiting
            taken = sum(not handle.done() for handle in self._running)  # rows of others are free in the next pass
            if held >= self.max_waiting + (0 if blocked else self._capacity.max_rows - taken):
                raise EngineFullError(
                    f"the queue is full ({held} waiting): add this one later, or give the engine a larger max_waiting"
                )
            place = QueueSlot(self)
            self._slots.add(place)
        return place

    def release_slot(self, place: QueueSlot) -> None:
        """See `QueueSlot.release`."""
        check_process(self._process)
        with self._changed:
            place.released = place.handle is None
            self._slots.discard(place)

    def check_slot(self, place: QueueSlot) -> None:
        """Raise what `submit` would raise for a slot, before the request is prepared."""
        if not isinstance(place, QueueSlot) or place.handle is not None or place.scheduler is not self:
            remedy = "give a slot that reserve() of this engine returned and no request has taken, or None"
            raise ConfigError("place", place, remedy)
        if place.released:
            raise CancelledError("its place was released")

    def submit(self, request: EngineRequest, place: QueueSlot) -> Handle:
        """Queue a prepared request and return its handle."""
        self._capacity.check(request.need)
        handle = Handle(
            self.cancel,
            stats=request.stats,
            seed=request.seed,
            on_step=request.on_step,
            prompt_tokens=request.prompt_tokens,
            prompt_logprobs=request.prompt_logprobs,
            text=request.text,
            wakeups=self._wakeups,
        )
        with self._changed:
            self._check_open()
            self.check_slot(place)
            self._slots.remove(place)
            place.handle = handle
            self._waiting.add(request, handle)
            self._notify()
        return handle

    def _check_open(self) -> None:
        if self._closed:
            problem = self.problem
            end = "was closed" if problem is None else f"broke down ({type(problem).__name__}: {problem})"
            raise EngineClosedError(f"this engine {end}: make a new one")

    def cancel(self, handle: Handle) -> bool:
        """See `Handle.cancel`."""
        if handle.done():
            return False
        check_process(self._process)
        with self._changed:
            if handle.done():
                return False
            if handle in self._running:
                self._running[handle].cancelled = True
                return True
            self._waiting.remove(handle)
            self._notify()
        self._end(handle, None)
        return True

    def close(self) -> None:
        """See `Engine.close`."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        problem: BaseException | None = None
        try:
            with torch.no_grad():
                while self._admit():
                    with self._wakeups:
                        self._batch.advance()
        except BaseException as unforeseen:
            problem = unforeseen
            raise
        finally:
            self._end_all(problem)
            if self._ended is not None:
                self._ended(problem)

    def _notify(self) -> None:
        """Make the thread look at the queue again; the caller holds the lock."""
        self._dirty = True
        self._changed.notify_all()

    def _admit(self) -> bool:
        """Admit requests that fit, waiting for one if the batch is idle; return False to end the thread."""
        running = self._batch.running
        if not self._dirty and running.changes == self._admitted_at:
            return True  # rows have only grown: what did not fit still does not
        with self._changed:
            self._forget_ended()
            self._changed.wait_for(lambda: self._closed or self._waiting or not self._batch.idle)
            self._dirty = False
            failed = list[tuple[Handle, Exception]]()
            while self._waiting and not self._closed:
                handle, request = self._waiting.first
                try:
                    if not running.has_room(request):
                        break
                    self._running[handle] = running.add(request, handle)
                except Exception as problem:  # noqa: BLE001 - forwarded to the request
                    failed.append((handle, problem))
                self._waiting.pop()
            self._blocked, self._admitted_at = bool(self._waiting), running.changes
            closed = self._closed
        for entry in failed:
            self._end(*entry)
        return not closed

    def _forget_ended(self) -> None:
        for handle in [handle for handle in self._running if handle.done()]:
            del self._running[handle]

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
        """End a waiting request, cancelled or with an error."""
        if handle.end(problem):
            self._batch.tally.add_end(str(handle.reason))
