"""Plain decoding as an iterator, which `model.generate` has none of: a thread generates, and its reader waits."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lade.errors import LadeError
from lade.hf.one_call import clean_up
from lade.hf.original import original_generate
from lade.hf.pass_meter import metered
from lade.model.support.supports import unwrap
from lade.model.user_cache import begin_plainly, cache_in
from lade.stats import Stats, Step


class _Closed(BaseException):
    """Ends a generation whose reader has stopped; not an `Exception`, so that no handler on the way catches it."""


class _Channel(BaseStreamer):
    """Carries tokens from the thread that generates to the one that reads, which requests each of them.

    The generating thread waits between two tokens. Running ahead, it would leave text in a user's cache, and draws from
    torch's generator, that the reader has never seen.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[list[int] | BaseException | None] = queue.SimpleQueue()
        self._requested = threading.Semaphore(0)
        self._closed = self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.items.put(value.flatten().tolist())
            self._requested.acquire()
            if self._closed:
                raise _Closed
        self._prompt_seen = True

    def end(self) -> None:
        """No-op: the reader stops when the thread ends, so that an error after the last token is not lost."""

    def request(self) -> None:
        """For the reader: generate the next token."""
        self._requested.release()

    def close(self) -> None:
        """For the reader: end the generation where it is."""
        self._closed = True
        self._requested.release()


def plain_steps(model: Any, stats: Stats | None, arguments: dict[str, Any]) -> Iterator[Step]:
    """`model.generate` as an iterator: one `Step` a token. Stopping early ends the generation.

    Raises:
        LadeError: it is read in a process that was forked meanwhile, which has no thread that generates.
    """
    channel, casting = _Channel(), _autocasts(unwrap(model))
    begin_plainly(cache_in(arguments), unwrap(model))

    def work() -> None:
        try:
            with ExitStack() as stack, metered(model, stats), suppress(_Closed):
                for autocast in casting:
                    stack.enter_context(autocast)
                generate = stack.enter_context(original_generate(model))
                generate(streamer=channel, **arguments)
        except BaseException as problem:  # noqa: BLE001 - passed to the reader, which raises it
            clean_up(model, problem, arguments.get("generation_config"))
            channel.items.put(problem)
        channel.items.put(None)

    thread = threading.Thread(target=work, name="lade-plain", daemon=True)
    lap = perf_counter()
    thread.start()
    index, home = 0, os.getpid()
    try:
        while (item := _next(channel, home)) is not None:
            if isinstance(item, BaseException):
                raise item
            source = "bonus" if index else "prefill"
            yield Step(index, item, [source] * len(item), 1, perf_counter() - lap)
            index, lap = index + 1, perf_counter()
            channel.request()
    finally:
        if os.getpid() == home:
            channel.close()
            thread.join()


def _next(channel: _Channel, home: int) -> list[int] | BaseException | None:
    """The next item; `home` is the process whose thread generates."""
    if os.getpid() != home:
        raise LadeError(
            f"this stream is generated in process {home}, and process {os.getpid()}, which was forked from it, has no "
            "thread for that: begin it again in this process"
        )
    return channel.items.get()


def _autocasts(model: PreTrainedModel) -> list[torch.autocast]:
    """Contexts in which another thread casts as this one does: autocast is a setting of each thread."""
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        for kind in sorted({"cpu", model.device.type})
    ]
