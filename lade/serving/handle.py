"""Client side of a request: queue slot, steps as they come, result, cancellation."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Literal, NoReturn, Protocol

from lade.errors import EngineClosedError
from lade.hf.detokenizer import AnswerText
from lade.hf.job import Output
from lade.hf.processors import StopReason
from lade.model.prompt_logits import PromptLogprobs
from lade.stats import Stats, Step, TokenLogprobs


class Wakeups:
    """Wakes the coroutines that wait for requests: those of one pass together, as each call wakes the whole loop."""

    def __init__(self) -> None:
        self._gathering: int | None = None  # the thread whose calls are gathered
        self._gathered: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}

    def __enter__(self) -> None:
        """Wake whatever this thread wakes in the block at its end."""
        self._gathering = threading.get_ident()

    def __exit__(self, *problem: object) -> None:
        self._gathering = None
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, {}
        for loop, events in gathered.items():
            _set(loop, events)

    def wake(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set an event of a loop that runs in another thread."""
        if threading.get_ident() == self._gathering:
            self._gathered.setdefault(loop, set()).add(event)
        else:
            _set(loop, [event])


def _set(loop: asyncio.AbstractEventLoop, events: Iterable[asyncio.Event]) -> None:
    def set_all() -> None:
        for event in events:
            event.set()

    with suppress(RuntimeError):  # the loop was closed while the reader waited
        loop.call_soon_threadsafe(set_all)


Reason = Literal[StopReason, "cancelled", "error"]
"""Why a request has ended, see `Handle.reason`."""


class Handle:
    """A request of `lade.Engine`. All methods may be called from any thread.

    >>> handle = engine.add(ids, max_new_tokens=200)
    >>> for step in handle:
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    >>> ids = handle.result()

    In a coroutine, `async for step in handle` does the same.

    In a process that was forked nothing decodes: there a handle has what it had when that happened, and waiting for
    more raises `EngineClosedError`.

    Attributes:
        seed: the seed that its tokens are drawn with; None where nothing is drawn.
        stats: figures of this request. The seconds of a pass are those of all rows that took part.
        prompt_tokens: of its prompt, without padding.
        cached_tokens: those of them that were taken from a text that had been kept, see `Engine`.
        queue_s: seconds from `Engine.add` until its prompt was begun; None before.
        prefill_s: seconds from then until its first token, with the passes of other requests between; None before.
        reason: why it has ended, None before: `eos`, an end of sequence that the model's generation_config names;
            `stop_token`, another id of the request's `eos_token_id`; `stop_text`; `length`; `time`, the request's
            `max_time`; `criterion`, another one of its stopping criteria; `cancelled`; or `error`. Where several end it
            with one token, the first of these.
    """

    def __init__(
        self,
        cancel: Callable[[Handle], bool],
        *,
        stats: Stats,
        seed: int | None,
        on_step: Callable[[Step], None] | None = None,
        prompt_tokens: int = 0,
        text: AnswerText | None = None,
        wakeups: Wakeups | None = None,
    ) -> None:
        self.seed, self.stats, self.prompt_tokens = seed, stats, prompt_tokens
        self.cached_tokens = 0
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.reason: Reason | None = None
        self._made = perf_counter()
        self._cancel, self._on_step, self._text = cancel, on_step, text
        self._wakeups = Wakeups() if wakeups is None else wakeups
        self._steps: list[Step] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._result: Output | BaseException | None = None  # None where it was cancelled
        self._ended = False
        self._changed = threading.Condition()
        self._reading = 0  # threads that wait for a step, not for the end alone
        self._process = os.getpid()
        self._watchers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Handle belongs to the process of its Engine, and cannot be copied or pickled")

    def __repr__(self) -> str:
        tokens = len(self.tokens)
        return f"Handle({self._state()}, {tokens} token{'' if tokens == 1 else 's'})"

    def _state(self) -> str:
        if not self._ended:
            return "running" if self._steps else "waiting"
        if self._result is None:
            return "cancelled"
        return f"failed: {self._result!r}" if isinstance(self._result, BaseException) else "finished"

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return [token for step in list(self._steps) for token in step.tokens]

    @property
    def text(self) -> str:
        """The text so far, where `Engine.add` was given `stop_texts`; it ends before the first one of them."""
        return "".join(piece for step in list(self._steps) for piece in step.texts or ())

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """How likely the model found the tokens of the prompt, None for the first one; None before the first step, and
        where `Engine.add` was not asked for them.
        """
        return None if self._prompt_logprobs is None else self._prompt_logprobs.tokens()

    @property
    def stop_text(self) -> str | None:
        """Which of its `stop_texts` the text ends before; None if there is none, or it is not there yet."""
        return None if self._text is None else self._text.stop

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended

    def cancel(self) -> bool:
        """End it: at once if it waits, else before the next step. False if it has ended already.

        Raises:
            EngineClosedError: in a forked process, where it cannot be.
        """
        return self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end; what `model.generate` returns for this prompt alone.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: it has not ended by then; it is not cancelled.
            EngineClosedError: in a forked process, if it had not ended before.
            concurrent.futures.CancelledError: it was cancelled, or the engine was closed. `tokens` has what there is.
            Exception: whatever its processors, its criteria, its `on_step` or the model raised.
        """
        self._wait(math.inf, timeout)
        self._raise_problem()
        if self._result is None:
            raise CancelledError
        assert not isinstance(self._result, BaseException)
        return self._result

    def __iter__(self) -> Iterator[Step]:
        """Its steps from the first one on, each as soon as it is there; ends after the last, or when it is cancelled.

        Raises:
            Exception: the error that ended it, after the steps before.
        """
        place = 0
        while True:
            self._wait(place)
            if place == len(self._steps):
                self._raise_problem()
                return
            yield self._steps[place]
            place += 1

    async def __aiter__(self) -> AsyncIterator[Step]:
        """The same for coroutines; waiting does not block the loop."""
        loop, woken, place = asyncio.get_running_loop(), asyncio.Event(), 0
        with self._watched(loop, woken):
            while True:
                woken.clear()
                ended = self.done()  # read before the steps: none comes after the end
                while place < len(self._steps):
                    yield self._steps[place]
                    place += 1
                if ended:
                    self._raise_problem()
                    return
                await woken.wait()

    @contextmanager
    def _watched(self, loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> Iterator[None]:
        """Set `woken` at every step and at the end, while the context lasts."""
        if self._ended:
            yield
            return
        check_process(self._process)
        with self._changed:
            self._watchers.add((loop, woken))
        try:
            yield
        finally:
            with self._changed:
                self._watchers.discard((loop, woken))

    def _wait(self, steps: float, timeout: float | None = None) -> None:
        """Until there are more steps than that, or the end; raises `TimeoutError`."""

        def there() -> bool:
            return self._ended or len(self._steps) > steps

        if there():  # without the lock, which in a forked process no thread may be there to release
            return
        check_process(self._process)
        reads = steps < math.inf
        with self._changed:
            self._reading += reads  # before looking whether it is there: `tell` looks the other way round, unlocked
            try:
                if not self._changed.wait_for(there, timeout):
                    raise TimeoutError
            finally:
                self._reading -= reads

    def _raise_problem(self) -> None:
        if isinstance(self._result, BaseException):
            raise self._result

    def begin(self) -> None:
        """For the engine: its prompt is begun, perhaps not for the first time."""
        if self.queue_s is None:
            self.queue_s = perf_counter() - self._made

    def tell_prompt(self, logprobs: PromptLogprobs | None) -> None:
        """For the engine: all of the prompt has been fed."""
        self._prompt_logprobs = logprobs

    def tell(self, step: Step, forward_s: float) -> None:
        """For the engine: a step, and the seconds it spent in the model. Raises what `on_step` raises."""
        if self.queue_s is not None and self.prefill_s is None:
            self.prefill_s = perf_counter() - self._made - self.queue_s
        self.stats.add(step, forward_s=forward_s)
        self._steps.append(step)
        try:
            if self._on_step is not None:
                self._on_step(step)
        finally:
            if self._reading or self._watchers:  # waking a thread that waits for the end would take time from a pass
                self._wake()

    def end(self, result: Output | BaseException | None, reason: Reason | None = None) -> bool:
        """For the engine: the result, the error that ended it, or None where it was cancelled; the first one counts.

        Args:
            result: what it ended with.
            reason: why, where that is a result.

        Returns:
            Whether it was the first one.
        """
        with self._changed:
            if self._ended:  # cancelled by one thread while another closed the engine
                return False
            self.reason = "cancelled" if result is None else "error" if isinstance(result, BaseException) else reason
            self._result, self._ended = result, True
        self._wake()
        return True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            for loop, woken in self._watchers:
                self._wakeups.wake(loop, woken)


def check_process(home: int) -> None:
    """Raise `EngineClosedError` in any process but the one with this id: a fork has no thread that decodes."""
    if os.getpid() != home:
        raise EngineClosedError(
            f"this engine decodes in process {home}, and process {os.getpid()}, which was forked from it, has no "
            "thread for that: make a new lade.Engine in this process"
        )


class Queue(Protocol):
    """What places are in."""

    def give_up(self, place: Place) -> Handle | None:
        """Free a place that no request has taken; returns the handle of the request that has, if one has."""
        ...


class Place:
    """One of the places that `Engine.reserve` gives out. All methods may be called from any thread.

    It counts as a waiting request from then on, so that whoever has one need not prepare a request in vain. At the end
    of the block a place that no request has taken is free again.

    >>> with engine.reserve() as place:
    ...     ids = tokenizer("Once upon a time").input_ids
    ...     handle = engine.add(ids, place=place, max_new_tokens=200)

    Attributes:
        handle: of the request that has taken it; None as long as none has.
        engine: the engine's queue, which it is in.
        released: whether it was given up before that: no request can take it any more.
    """

    def __init__(self, engine: Queue) -> None:
        self.engine = engine
        self.handle: Handle | None = None
        self.released = False

    def __repr__(self) -> str:
        state = "taken" if self.handle is not None else "released" if self.released else "free"
        return f"Place({state})"

    def release(self) -> None:
        """Give it up, unless a request has taken it. One that is being prepared then never begins."""
        self.engine.give_up(self)

    def cancel(self) -> None:
        """Give it up, or cancel the request that has taken it: whoever wanted it has left."""
        handle = self.engine.give_up(self)
        if handle is not None:
            handle.cancel()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()
