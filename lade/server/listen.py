"""Runs the app: a port that is open before the model is loaded, signals, and an end that loses no answer."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

import uvicorn

from lade.server.app import build_app
from lade.server.connection import Connection
from lade.server.service import Service

EXIT_FAILED = 1
KEEP_ALIVE_S = 75
"""That a connection may be silent between two requests; proxies in front wait a minute, and would meet a closed one."""
SWITCH_S = 1e-3
"""Between the threads of Python: at its default of 5 ms the thread that decodes would wait that long for each answer
that is written meanwhile."""
_LAST_WORDS_S = 2.0
"""For answers to say that they were cut."""


def run(service: Service, listening: socket.socket) -> int:
    """Serve until a signal comes, the model cannot be loaded, or the engine breaks down; returns the exit code.

    Raises:
        Exception: what kept the model from being loaded.
    """
    server = Server(service)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with _rereading(service):
            server.run(sockets=[listening])
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()  # what the warm-up has frozen
    if service.problem is not None:
        raise service.problem
    return EXIT_FAILED if service.phase == "dead" or service.unsaved is not None else 0


@contextmanager
def _rereading(service: Service) -> Iterator[None]:
    """A block in which SIGHUP has the keys read again, where there is a file of them; else it ends the process."""
    if service.settings.read_keys is None or not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: setattr(service, "keys_changed", True))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Server(uvicorn.Server):
    """Uvicorn, that goes on while answers are written.

    On the first signal new requests are refused and `/ready` says so, over connections that are open still; uvicorn
    itself would close them. When the last answer has ended, or its time is up, uvicorn ends as it always does.

    Args:
        service: what is served.
    """

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            build_app(service),
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
            proxy_headers=False,
        )
        super().__init__(config)
        self._service = service
        self._ends_at: float | None = None
        self._aborted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers end, the second one does not."""
        if self._ends_at is not None:
            os._exit(128 + sig)
        self._service.drain()
        self._ends_at = perf_counter() + self._service.settings.shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to end."""
        service = self._service
        await asyncio.to_thread(service.watch)
        if service.problem is not None:
            return True
        if service.phase == "dead" and self._ends_at is None:  # its answers have failed, and say so
            self._ends_at = perf_counter() + _LAST_WORDS_S
        if self._ends_at is not None:
            return self._is_over(self._ends_at)
        return await super().on_tick(counter)

    def _is_over(self, ends_at: float) -> bool:
        if not self._service.flights and not (self._service.phase == "dead" and perf_counter() < ends_at):
            return True
        if perf_counter() < ends_at:
            return False
        if not self._aborted:
            self._aborted = True
            self._service.abort()
        return perf_counter() > ends_at + _LAST_WORDS_S
