"""Continuous batching: requests from any thread, decoded together by one."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError, EngineClosedError, EngineFullError, UnsupportedModelError
from lade.hf.predictions import Prediction, refuse_without_guesses
from lade.hf.refusals import resolve
from lade.model.support.supports import supports, unwrap
from lade.serving.batch import ActiveRequest, Batch
from lade.serving.capacity import Capacity
from lade.serving.handle import Handle, check_process
from lade.serving.request import Request, prepare
from lade.stats import Stats, Step

PLAIN = LookaheadConfig(window=0, ngram=2, guesses=0)
"""The empty tree: one token a step."""


class Engine:
    """Decodes the requests of many threads together: each step is one forward pass for all of them.

    Requests come and go between steps. What is written for one of them does not depend on the others: each gets the
    tokens that `model.generate` gives for its prompt alone, with its own arguments and its own seed.

    >>> with lade.Engine(model) as engine:
    ...     handles = [engine.add(ids, max_new_tokens=200) for ids in prompts]
    ...     texts = [tokenizer.decode(handle.result()[0]) for handle in handles]

    Other threads may call the model while the engine is open, to generate or for anything else that leaves it as it is;
    this takes machine time from its requests. Requests share nothing but the model; give all of them one
    `LookaheadConfig(memory=...)` where they may learn from each other's texts.

    Args:
        model: a transformers causal language model, or one wrapped by PEFT.
        max_rows: requests decoded at a time; more wait.
        max_tokens: slots of the KV cache, which are rows times tokens of the longest one, tree included; more wait.
            With captured passes, on a CUDA device, rows and tokens are rounded up to the sizes of these. None: as many
            as fit in a quarter of the host's memory, or in 29 % of what is free on a CUDA device. Where all layers are
            recurrent, tokens take no memory, and slots are bytes of states.
        max_waiting: requests that may wait.
        prefill_tokens: of new prompts, fed between two steps at most, so that a long one does not hold up the others.
            Models with recurrent layers are fed two at least, and those of Mamba 1 whole prompts.
            A prompt with images is fed at once.

    Attributes:
        max_tokens: as given or found.
        token_bytes: what a slot takes. The cache may take `max_tokens` of them, and while it grows up to 2.75 times as
            much, the prompt that joins included.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly with a token tree, or has an encoder.
        ConfigError: a limit that is no whole number >= 1.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 16,
        max_tokens: int | None = None,
        max_waiting: int = 1024,
        prefill_tokens: int = 512,
    ) -> None:
        limits = {"max_rows": max_rows, "max_waiting": max_waiting, "prefill_tokens": prefill_tokens}
        for name, limit in (limits if max_tokens is None else {**limits, "max_tokens": max_tokens}).items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ConfigError(name, limit, "give a whole number >= 1")
        self._model = model
        plan = supports(model).require()
        _refuse_encoders(unwrap(model))
        batch = Batch(unwrap(model), plan, prefill_tokens=prefill_tokens, max_rows=max_rows, max_tokens=max_tokens)
        self.token_bytes, self.max_tokens = batch.capacity.token_bytes, batch.capacity.max_tokens
        self._scheduler = Scheduler(batch, max_waiting)
        self._finalizer = weakref.finalize(
            self, self._scheduler.close
        )  # also when it is forgotten, and when Python ends

    def add(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        lookahead: Lookahead = "auto",
        on_step: Callable[[Step], None] | None = None,
        seed: int | None = None,
        stats: Stats | None = None,
        prediction: Prediction | None = None,
        **generate_arguments: Any,
    ) -> Handle:
        """Add a prompt to be continued; returns at once.

        Args:
            input_ids: `[L]` or `[1, L]` ids of one prompt.
            lookahead: a `LookaheadConfig`, "auto" for the defaults, or None for plain decoding beside the others.
            on_step: is called with each `Step`, by the thread that decodes: all requests wait for it.
            seed: of this request's draws, where it samples: the tokens are those that `torch.manual_seed(seed)` and
                `model.generate` give. None: one is drawn; the handle has it.
            stats: is added to; None for new ones, which the handle has.
            prediction: a text that the answer is expected to follow: its ids, or text and a `tokenizer=`.
            generate_arguments: anything that `model.generate` takes for one prompt, but beams, streamers and caches.
                The clock of `max_time` starts now.

        Raises:
            InputError: the prompt cannot be decoded, or is with its answer too long for the engine or the model.
            UnsupportedArgumentError: the arguments cannot be served exactly.
            EngineFullError: as many requests wait as may.
            EngineClosedError: the engine was closed, or this process was forked from the engine's.
        """
        self._scheduler.check_process()
        chosen = resolve(lookahead)[0]
        refuse_without_guesses(prediction, chosen)
        config = chosen or PLAIN
        request = prepare(self._model, input_ids, generate_arguments, config=config, seed=seed, prediction=prediction)
        make = functools.partial(Handle, stats=Stats() if stats is None else stats, seed=request.seed, on_step=on_step)
        return self._scheduler.take(request, make)

    def close(self) -> None:
        """End all requests as cancelled and free what they took; returns when that is done. May be called again.

        Called by an `on_step`, it returns at once, and all end before the next step. In a forked process it does
        nothing: there the engine has no thread, and the other process continues its requests.
        """
        self._finalizer.detach()
        self._scheduler.close()

    def __repr__(self) -> str:
        return f"Engine({type(unwrap(self._model)).__name__}, {self._scheduler.state})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def _refuse_encoders(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the rows of an engine share one cache, which has no place for encoders' states",
            "use lade.generate, which decodes batches of encoder-decoder models, too",
        )


class Scheduler:
    """The queue of requests, and the thread that serves them.

    It knows nothing of the `Engine`, so that a forgotten engine can be collected, which closes its scheduler.

    Args:
        batch: decodes; only the thread touches it.
        max_waiting: requests that may wait.
    """

    def __init__(self, batch: Batch, max_waiting: int) -> None:
        self._batch, self._max_waiting = batch, max_waiting
        self._capacity: Capacity = batch.capacity
        self._waiting: deque[tuple[Request, Handle]] = deque()
        self._seats: dict[Handle, ActiveRequest] = {}
        self._changed = threading.Condition()
        self._closed, self._end = False, "was closed"
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="lade.Engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """How many requests are decoded and wait, or that it is closed. Never blocks."""
        if self._closed:
            return "closed"
        return f"{len(self._seats)} of {self._capacity.max_rows} rows, {len(self._waiting)} waiting"

    def take(self, request: Request, make: Callable[[Callable[[Handle], bool]], Handle]) -> Handle:
        """Let a request wait; `make` gets what cancels a handle, and returns the handle."""
        self._capacity.check(request.need)
        handle = make(self.cancel)
        with self._changed:
            if self._closed:
                raise EngineClosedError(f"this engine {self._end}: make a new one")
            if len(self._waiting) >= self._max_waiting:
                raise EngineFullError(
                    f"{len(self._waiting)} requests wait already: add this one later, or give the engine a greater "
                    "max_waiting"
                )
            self._waiting.append((request, handle))
            self._changed.notify_all()
        return handle

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
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not handle)
        handle.end(None)
        return True

    def close(self) -> None:
        """See `Engine.close`."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        problem: BaseException | None = None
        try:
            with torch.no_grad():
                while self._admit():
                    self._batch.advance()
                    self._forget_ended()
        except BaseException as unforeseen:
            problem = unforeseen
            raise
        finally:
            self._end_all(problem)

    def _admit(self) -> bool:
        """Admit requests that fit, waiting for one if there is nothing to do; false to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or not self._batch.idle)
            while self._waiting and not self._closed and self._batch.has_room(self._waiting[0][0]):
                request, handle = self._waiting.popleft()
                self._seats[handle] = self._batch.add(request, handle)
            return not self._closed

    def _forget_ended(self) -> None:
        with self._changed:
            for handle in [handle for handle in self._seats if handle.done()]:
                del self._seats[handle]

    def _end_all(self, problem: BaseException | None) -> None:
        with self._changed:
            self._closed = True
            if problem is not None:
                self._end = f"broke down ({type(problem).__name__}: {problem})"
            waiting, self._waiting = self._waiting, deque()
        for _, handle in waiting:
            handle.end(problem)
        self._batch.close(problem)
        self._forget_ended()
