"""Waking coroutines from the thread that decodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress


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
