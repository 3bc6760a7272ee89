"""The client side of a request: its step stream, result and cancellation."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Literal, NoReturn

import torch

from lade.decoding.loop import PromptLogitsHook
from lade.errors import EngineClosedError, InputError
from lade.hf.detokenizer import AnswerText
from lade.hf.job import Output
from lade.hf.processors import StopReason
from lade.model.prefill import PIECE_LOGITS
from lade.stats import Stats, Step, TokenLogprobs

_MOST_LOGITS = 2**28


class PromptLogprobs:
    """Collects the log-probabilities of a prompt's tokens, and the `top` ids at each position, while it is fed."""

    def __init__(self, ids: Sequence[int], top: int, vocabulary: int) -> None:
        self._ids, self._top = ids, top
        self._most_tokens = _MOST_LOGITS // vocabulary
        self.piece_tokens = max(1, PIECE_LOGITS // vocabulary)  # to feed at a time, as each of them has V logits
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def check_piece(self, tokens: int) -> None:
        """Raise `InputError` if more tokens have to be fed at a time than memory allows."""
        if tokens > self._most_tokens:
            raise InputError(
                f"prompt_logprobs: this model must be fed {tokens} tokens at once, and the logits of more than "
                f"{self._most_tokens} take too much memory: give a shorter prompt"
            )

    def take(self, start: int, logits: torch.Tensor) -> None:
        """Add logits `[T, V]` of tokens from index `start` on; 0 starts over, when a prompt is fed again."""
        if start == 0:
            self._pieces = []
        following = torch.tensor(self._ids[start + 1 : start + 1 + len(logits)], device=logits.device)  # the targets
        logprobs = logits[: len(following)].to(torch.float32).log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._top, logprobs.shape[1]))
        self._pieces.append((logprobs.gather(1, following[:, None])[:, 0].cpu(), ids.cpu(), values.cpu()))

    def chained_with(self, hook: PromptLogitsHook | None) -> PromptLogitsHook:
        """Return a hook that adds the logits here and passes them on to `hook`, if it is not None."""

        def see(same_prompt: Sequence[int], start: int, logits: torch.Tensor) -> None:
            self.take(start, logits)
            if hook is not None:
                hook(same_prompt, start, logits)

        return see

    def tokens(self) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of all tokens fed; None for the first one, which nothing predicts."""
        made: list[TokenLogprobs | None] = [None]
        for own, ids, values in self._pieces:
            for value, top_ids, top_values in zip(own.tolist(), ids.tolist(), values.tolist(), strict=True):
                top = list(zip(top_ids, top_values, strict=True))
                made.append(TokenLogprobs(self._ids[len(made)], value, top))
        return made


class Wakeups:
    """Wakes coroutines that wait for requests, batched per pass: each cross-thread call wakes a whole event loop."""

    def __init__(self) -> None:
        self._gathering: int | None = None  # id of the thread whose wake-ups are collected
        self._gathered: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}

    def __enter__(self) -> None:
        """Collect this thread's wake-ups and send them at the end of the block."""
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


Reason = Literal[StopReason, "cancelled", "error"]  # why a request has ended, see `Handle.reason`


class Handle:
    """A request of `lade.Engine`. All methods are thread-safe.

    >>> handle = engine.add(ids, max_new_tokens=200)
    >>> for step in handle:
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    >>> ids = handle.result()

    In a coroutine, `async for step in handle` does the same.

    A forked process has no decoding thread. There a handle has what it had at the fork, and waiting for more raises
    `EngineClosedError`.

    Attributes:
        seed: seed of the request's draws; None if it does not sample.
        stats: counters of this request; the time of a pass is that of all rows in it.
        prompt_tokens: length of the prompt, without padding.
        cached_tokens: prompt tokens served from the prefix cache, see `Engine`.
        began: time of `Engine.add`, on the `perf_counter` clock.
        ended: time of the end, on the same clock; None before.
        queue_s: seconds from `Engine.add` until prefill began; None before.
        prefill_s: seconds from then until the first token, passes of other requests included; None before.
        failed_alone: True if the request was ended since a pass failed in which no other request was.
        reason: why the request has ended; None before. `eos`: an end of sequence of the model's generation_config;
            `stop_token`: another id of the request's `eos_token_id`; `stop_text`; `length`; `time`: `max_time`;
            `criterion`: another stopping criterion; `cancelled`; `error`. If one token meets several, the first of
            these counts.
    """

    def __init__(
        self,
        cancel: Callable[[Handle], bool],
        *,
        stats: Stats,
        seed: int | None,
        on_step: Callable[[Step], None] | None = None,
        prompt_tokens: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
        text: AnswerText | None = None,
        wakeups: Wakeups | None = None,
    ) -> None:
        self.seed, self.stats, self.prompt_tokens = seed, stats, prompt_tokens
        self.cached_tokens = 0
        self.failed_alone = False
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.reason: Reason | None = None
        self.began = perf_counter()
        self.ended: float | None = None
        self._cancel, self._on_step, self._text, self._prompt_logprobs = cancel, on_step, text, prompt_logprobs
        self._wakeups = Wakeups() if wakeups is None else wakeups
        self._steps: list[Step] = []
        self._result: Output | BaseException | None = None  # None after the end: cancelled
        self._ended = False
        self._changed = threading.Condition()
        self._reading = 0  # threads that wait for a step, not only for the end
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
        """The tokens emitted so far."""
        return [token for step in list(self._steps) for token in step.tokens]

    @property
    def text(self) -> str:
        """The text so far, if `stop_texts` were given to `Engine.add`; it ends before the first stop text."""
        return "".join(piece for step in list(self._steps) for piece in step.texts or ())

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Logprobs of the prompt's tokens, None for the first token.

        None before the first step, and if `Engine.add` was not asked for them.
        """
        return self._prompt_logprobs.tokens() if self._prompt_logprobs is not None and self._steps else None

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the text; None if none has."""
        return None if self._text is None else self._text.stop

    def done(self) -> bool:
        """Return True if the request has ended, for whatever reason."""
        return self._ended

    def cancel(self) -> bool:
        """Cancel the request: at once if it waits, else before the next step. Return False if it has ended already.

        Raises:
            EngineClosedError: called in a forked process.
        """
        return self._cancel(self)

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the end and return what `model.generate` returns for this prompt alone.

        Args:
            timeout: maximum time to wait in seconds; None for no limit.

        Raises:
            TimeoutError: the request has not ended in time; it goes on.
            EngineClosedError: called in a forked process before the request had ended.
            concurrent.futures.CancelledError: the request was cancelled or the engine closed; see `tokens`.
            Exception: the exception raised by a processor, a criterion, `on_step` or the model.
        """
        self._wait(math.inf, timeout)
        self._raise_problem()
        if self._result is None:
            raise CancelledError
        assert not isinstance(self._result, BaseException)
        return self._result

    def __iter__(self) -> Iterator[Step]:
        """Yield all steps from the first one on, as they arrive, until the request ends or is cancelled.

        Raises:
            Exception: the exception that ended the request, after the steps before it.
        """
        index = 0
        while True:
            self._wait(index)
            if index == len(self._steps):
                self._raise_problem()
                return
            yield self._steps[index]
            index += 1

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Yield all steps like `__iter__`, without blocking the event loop."""
        loop, woken, index = asyncio.get_running_loop(), asyncio.Event(), 0
        with self._watched(loop, woken):
            while True:
                woken.clear()
                ended = self.done()  # read before the steps: none is added after the end
                while index < len(self._steps):
                    yield self._steps[index]
                    index += 1
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
        """Wait for more than `steps` steps or the end; raise `TimeoutError` after `timeout` seconds."""

        def there() -> bool:
            return self._ended or len(self._steps) > steps

        if there():  # without the lock, which a forked process may have inherited locked
            return
        check_process(self._process)
        reads = steps < math.inf
        with self._changed:
            self._reading += reads  # set before the check; `add_step` works in the opposite order, unlocked
            try:
                if not self._changed.wait_for(there, timeout):
                    raise TimeoutError
            finally:
                self._reading -= reads

    def _raise_problem(self) -> None:
        if isinstance(self._result, BaseException):
            raise self._result

    def mark_started(self) -> None:
        """Record the start of prefill; later calls, after a preemption, have no effect. For the engine."""
        if self.queue_s is None:
            self.queue_s = perf_counter() - self.began

    def add_step(self, step: Step, forward_s: float) -> None:
        """Add a step, which took `forward_s` seconds in the model; raise what `on_step` raises. For the engine."""
        if self.queue_s is not None and self.prefill_s is None:
            self.prefill_s = perf_counter() - self.began - self.queue_s
        self.stats.add(step, forward_s=forward_s)
        self._steps.append(step)
        try:
            if self._on_step is not None:
                self._on_step(step)
        finally:
            if self._reading or self._watchers:  # waking threads that wait for the end delays the next pass
                self._wake()

    def end(self, result: Output | BaseException | None, reason: Reason | None = None) -> bool:
        """End the request; only the first call has an effect, and returns True. For the engine.

        Args:
            result: the output, the exception that ended the request, or None if it was cancelled.
            reason: the reason, if `result` is an output.
        """
        with self._changed:
            if self._ended:  # cancelled by one thread while another closed the engine
                return False
            self.reason = "cancelled" if result is None else "error" if isinstance(result, BaseException) else reason
            self._result, self._ended, self.ended = result, True, perf_counter()
        self._wake()
        return True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            for loop, woken in self._watchers:
                self._wakeups.wake(loop, woken)


def check_process(home: int) -> None:
    """Raise `EngineClosedError` in another process than `home`, before a lock is taken that no thread there frees."""
    if os.getpid() != home:
        raise EngineClosedError(
            f"this engine decodes in process {home}, and process {os.getpid()}, which was forked from it, has no "
            "thread for that: make a new lade.Engine in this process"
        )
