"""A fair worker thread: one task at a time, round robin over clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Runs tasks in one thread, round robin over clients. Belongs to one event loop.

    A client with many tasks delays another one by the running task only.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # none empty; the first client is next

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run a task and return its result; a task cancelled before its turn never starts.

        The next task starts once the thread is free, even if the caller of this one is cancelled.

        Args:
            client: the client in whose turn the task runs.
            work: function to run in the thread.
        """
        if self._busy:
            await self._wait(client)
        self._busy = True
        loop, done = asyncio.get_running_loop(), self._pool.submit(work)
        done.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(self._pass_on))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Start no further tasks."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it had been given the turn
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next client with a task that is still awaited."""
        self._busy = False
        while self._waiting and not self._busy:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            turn = line.popleft()
            if not turn.done():
                self._busy = True
                turn.set_result(None)
            if line:
                self._waiting[client] = line
