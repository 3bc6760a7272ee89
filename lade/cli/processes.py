"""Processes started by torchrun: one leads, the others share the model or the prompts.

All that they have in common is torch's store: a counter of prompts that were taken, who took which, and the answers. A
process that has died answers nothing and beats no more; when all prompts are taken, others take those that it had.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
from torch import distributed as dist

from lade.backends.processes.channel import connect
from lade.backends.processes.team import dismiss, team_of
from lade.cli.terminal import Terminal
from lade.errors import ConfigError
from lade.hf.distributed import follow_until_dismissed
from lade.model.support.supports import supports

SILENCE_S = 10.0
"""Without a beat for so long a process counts as dead."""
_BEAT_S = 1.0
_PATIENCE = timedelta(hours=2)


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """The value, once there is one."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns what it then is."""

    def check(self, keys: list[str]) -> bool:
        """Whether there are values for all of these, without waiting."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Store a value where another one is; returns what is there then."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait for values."""


class Crew:
    """This process, and those that share the run with it.

    Args:
        store: connects them.
        rank: of this one.
        silence_s: see `SILENCE_S`.

    Attributes:
        first: whether it is the first one, which writes the answers of all.
    """

    def __init__(self, store: Store, rank: int, silence_s: float = SILENCE_S) -> None:
        self._store, self._rank, self._silence_s = store, rank, silence_s
        self.first = rank == 0
        self._lines: Sequence[int] = ()
        self._open: list[int] = []  # as far as this process knows
        self._looked_s = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # the last beat of a process, and when it was heard first

    def agreed(self, name: str, value: Any) -> Any:
        """The first process's value, for all of them."""
        key = f"agreed/{name}"
        if self.first:
            self._store.set(key, json.dumps(value))
        self._store.wait([key], _PATIENCE)
        return json.loads(self._store.get(key))

    @contextmanager
    def sharing(self, lines: Sequence[int]) -> Iterator[None]:
        """A block in which the prompts with these numbers are shared; those of the first process count."""
        self._lines = self.agreed("lines", list(lines))
        self._open = list(self._lines)
        ended = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the store has gone, and with it the run
                while not ended.wait(_BEAT_S):
                    self._store.add(f"beat/{self._rank}", 1)

        self._store.add(f"beat/{self._rank}", 1)
        thread = threading.Thread(target=beat, name="lade-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def take(self) -> int | None:
        """The number of a prompt for this process; None if there is none for it now."""
        place = self._store.add("next", 1) - 1
        if place < len(self._lines):
            line = self._lines[place]
            self._store.compare_set(f"taken/{line}", "", str(self._rank))
            return line
        if monotonic() - self._looked_s < _BEAT_S:
            return None
        self._looked_s = monotonic()
        self._open = [line for line in self._open if not self._store.check([f"answer/{line}"])]
        return next(filter(self._take_over, self._open), None)

    def put(self, line: int, entry: dict[str, Any]) -> None:
        """Hand in what was made of a prompt. Of two answers to the same the first one counts."""
        answer = json.dumps(entry)
        if self._store.compare_set(f"answer/{line}", "", answer).decode() == answer:
            self._store.add("answered", 1)

    def answer(self, line: int) -> dict[str, Any] | None:
        """What some process has handed in for a prompt; None if none has."""
        if not self._store.check([f"answer/{line}"]):
            return None
        answer: dict[str, Any] = json.loads(self._store.get(f"answer/{line}"))
        return answer

    @property
    def complete(self) -> bool:
        """Whether there is an answer for every prompt."""
        return self._store.add("answered", 0) >= len(self._lines)

    def _take_over(self, line: int) -> bool:
        """Whether this process has taken a prompt from one that has died."""
        key, mine, owner = f"taken/{line}", str(self._rank), ""  # nobody's: it died before it said so
        if self._store.check([key]):
            owner = self._store.get(key).decode()
            if owner == mine or not self._is_silent(int(owner)):
                return False
        return self._store.compare_set(key, owner, mine).decode() == mine

    def _is_silent(self, rank: int) -> bool:
        beat, now = self._store.add(f"beat/{rank}", 0), monotonic()
        last, since = self._heard.get(rank, (-1, now))
        if beat != last:
            self._heard[rank] = (beat, now)
            return False
        return now - since > self._silence_s


def shared(
    crew: Crew,
    lines: Sequence[int],
    begin: Callable[[int], Any],
    finish: Callable[[int, Any], dict[str, Any]],
    at_a_time: int,
    pause: Callable[[], bool],
) -> Generator[dict[str, Any]]:
    """The answers to prompts, in their order, made by all processes of a crew; in the others, nothing, until the end.

    Args:
        crew: shares the prompts, these and perhaps more.
        lines: numbers of the prompts.
        begin: makes a request of one.
        finish: makes an answer of a request that is done.
        at_a_time: how many requests may be under way.
        pause: waits a little; whether to end without those that are still under way, which are cancelled.
    """
    held: dict[int, Any] = {}
    ahead = list(lines) if crew.first else []
    try:
        while ahead or not crew.first:
            for line in [line for line, handle in held.items() if handle.done()]:
                crew.put(line, finish(line, held.pop(line)))
            while len(held) < at_a_time and (taken := crew.take()) is not None:
                held[taken] = begin(taken)
            while ahead and (answer := crew.answer(ahead[0])) is not None:
                ahead.pop(0)
                yield answer
            if not crew.first and not held and crew.complete:
                return
            if pause():
                return
    finally:
        for handle in held.values():
            handle.cancel()


def connected(term: Terminal) -> int:
    """How many processes torchrun has started; all but the first write errors alone from now on. 1 without torchrun."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return 1
    connect()
    if dist.get_rank():
        term.mute()
    return dist.get_world_size()


def is_first() -> bool:
    """Whether this is the first of several processes."""
    return dist.get_rank() == 0


def crew_of(term: Terminal) -> Crew:
    """The processes that share the prompts of this run, each on a device of its own where there are several.

    Raises:
        ConfigError: torchrun has not started several.
    """
    if connected(term) == 1:
        raise ConfigError("replicas", True, "it takes processes: torchrun --nproc-per-node 2 -m lade generate ...")
    from torch.distributed.distributed_c10d import PrefixStore  # not in every build of torch

    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return Crew(PrefixStore("lade/crew", dist.distributed_c10d._get_default_store()), rank)


def begin_together(model: Any) -> None:
    """What all processes do with a model that is split over them before the first call."""
    team_of(model)
    supports(model)


@contextmanager
def leading(model: Any, processes: int) -> Iterator[bool]:
    """A block of the first process, which the others help until it ends; they get False, and have nothing to do.

    They do not heed SIGTERM and Ctrl-C, which torchrun sends to all: the first process may have something to finish.
    """
    if processes == 1:
        yield True
        return
    begin_together(model)
    if is_first():
        try:
            yield True
        finally:
            dismiss(model)
        return
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    follow_until_dismissed(model)
    yield False
