"""What whoever adds a request gets in return: its steps as they come, its result, and a way to end it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from lade.hf.session import Output
from lade.stats import Stats, Step


class Handle:
    """A request of `lade.Engine`. All methods may be called from any thread.

    >>> handle = engine.add(ids, max_new_tokens=200)
    >>> for step in handle:
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    >>> ids = handle.result()

    In a coroutine, `async for step in handle` does the same.

    Attributes:
        seed: that its tokens are drawn with; None where nothing is drawn.
        stats: figures of this request. The seconds of a pass are those of all rows that took part.
    """

    def __init__(
        self,
        cancel: Callable[[Handle], bool],
        *,
        stats: Stats,
        seed: int | None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.seed, self.stats = seed, stats
        self._cancel, self._on_step = cancel, on_step
        self._steps: list[Step] = []
        self._future: Future[Output] = Future()
        self._changed = threading.Condition()
        self._watchers: set[Callable[[], None]] = set()

    def __repr__(self) -> str:
        tokens = len(self.tokens)
        return f"Handle({self._state()}, {tokens} token{'' if tokens == 1 else 's'})"

    def _state(self) -> str:
        if not self._future.done():
            return "running" if self._steps else "waiting"
        if self._future.cancelled():
            return "cancelled"
        problem = self._future.exception()
        return "finished" if problem is None else f"failed: {problem!r}"

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return [token for step in list(self._steps) for token in step.tokens]

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._future.done()

    def cancel(self) -> bool:
        """End it: at once if it waits, else before the next step. False if it has ended already."""
        return self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end; what `model.generate` returns for this prompt alone.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            concurrent.futures.CancelledError: it was cancelled, or the engine was closed. `tokens` has what there is.
            Exception: whatever its processors, its criteria, its `on_step` or the model raised.
        """
        return self._future.result(timeout)

    def __iter__(self) -> Iterator[Step]:
        """Its steps from the first one on, each as soon as it is there; ends after the last, or when it is cancelled.

        Raises:
            Exception: the error that ended it, after the steps before.
        """
        place = 0
        while True:
            self._wait_for_step(place)
            if place == len(self._steps):
                self._raise_problem()
                return
            yield self._steps[place]
            place += 1

    async def __aiter__(self) -> AsyncIterator[Step]:
        """The same for coroutines: waiting blocks nobody."""
        loop, woken, place = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed under a reader who never said goodbye
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            self._watchers.add(wake)
        try:
            while True:
                woken.clear()
                ended = self.done()  # asked before looking for steps: none comes after the end
                while place < len(self._steps):
                    yield self._steps[place]
                    place += 1
                if ended:
                    self._raise_problem()
                    return
                await woken.wait()
        finally:
            with self._changed:
                self._watchers.discard(wake)

    def _wait_for_step(self, number: int) -> None:
        """Until it is there, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) > number or self.done())

    def _raise_problem(self) -> None:
        problem = None if self._future.cancelled() else self._future.exception()
        if problem is not None:
            raise problem

    def tell(self, step: Step, forward_s: float) -> None:
        """For the engine: a step, and the seconds it spent in the model. Raises what `on_step` raises."""
        self.stats.add(step, forward_s=forward_s)
        self._steps.append(step)
        try:
            if self._on_step is not None:
                self._on_step(step)
        finally:
            self._wake()

    def end(self, result: Output | BaseException | None) -> None:
        """For the engine: the result, the error that ended it, or None where it was cancelled; the first one counts."""
        with self._changed:
            if self._future.done():  # cancelled by one thread while another closed the engine
                return
            if result is None:
                self._future.cancel()
            elif isinstance(result, BaseException):
                self._future.set_exception(result)
            else:
                self._future.set_result(result)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            for wake in self._watchers:
                wake()
