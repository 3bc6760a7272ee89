"""The HTTP server: connections with limits, signals, graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from asyncio.events import TimerHandle
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from time import perf_counter
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lade.server.app import build_app
from lade.server.errors import INVALID, ApiError
from lade.server.serialization import encoded
from lade.server.service import Service

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
HEADERS_S = 10.0
"""Time to send the headers of a request, from the connection or their first byte; uvicorn sets no limit."""
MAX_HEADER_BYTES = 64 * 2**10
CONNECTIONS = 2048
"""Most connections, or fewer by `most_connections`; for a further one an idle one is closed, or itself."""
RESERVED_FILES = 192
"""Descriptors left to others: a server with a model has some 60 open, a trial of a grammar and a saved memory more."""


def most_connections() -> int:
    """Return the limit on connections, by the files that this process may open at present."""
    files = -1 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return CONNECTIONS if files < 0 else max(1, min(CONNECTIONS, files - RESERVED_FILES))


def raise_file_limit() -> None:
    """Let this process open files for all connections, if it may: the usual limit of 1,024 is lower."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + RESERVED_FILES
    if 0 <= soft < wanted:
        raised = min(wanted, hard) if hard >= 0 else wanted
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            logger.info("this process may open %d files now, instead of %d", raised, soft)
        if raised < wanted:
            most, needed = most_connections(), f"{CONNECTIONS} take {wanted}"
            logger.warning("the hard limit of open files allows %d connections, and %s: raise it", most, needed)


class Connection(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with the limits above."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: TimerHandle | None = None
        self._header_bytes = 0
        self._begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            others = (each for each in self.connections if isinstance(each, Connection) and each is not self)
            next((each for each in others if each.is_idle), self).transport.abort()
            if transport.is_closing():
                return
        # otherwise a body waits for the client's delayed ACK of the headers, 40 ms; asyncio sets this only on sockets
        # that it has created itself
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; start the timer if headers are incomplete."""
        waiting = self._timer
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._timer is None and not self._is_answering:  # the rest of a refused request
            self._wait()
        elif waiting is not None and self._timer is waiting:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                why = f"the headers exceed {MAX_HEADER_BYTES} bytes: send fewer"
                self._refuse(ApiError(431, INVALID, why, code="headers_too_large"))

    def on_message_begin(self) -> None:
        """Record the first byte of a request."""
        super().on_message_begin()
        self._begun = True
        if self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Stop the timer; the body has a limit of its own."""
        self._cancel_timer()
        self._begun = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP."""
        self._refuse(ApiError(400, INVALID, f"{msg.rstrip('.')}: send HTTP/1.1", code="invalid_http"))

    @property
    def is_idle(self) -> bool:
        """True if the client neither sends a request nor waits for an answer."""
        return not (self._begun or self._is_answering or self.transport.is_closing())

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._header_bytes = 0
        self._timer = self.loop.call_later(HEADERS_S, self._header_timeout)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _header_timeout(self) -> None:
        self._timer = None
        if self._is_answering:  # the headers belong to the next request
            self._wait()
        elif not self._begun:
            self.transport.close()
        else:
            why = f"the headers were not received within {HEADERS_S:g} s"
            self._refuse(ApiError(408, INVALID, why, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless an answer is being sent, and close."""
        if not self._is_answering:
            body = encoded(error.body)
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                "x-content-type-options: nosniff\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


EXIT_FAILED = 1
KEEP_ALIVE_S = 75
"""Keep-alive timeout in seconds; longer than a proxy's usual minute, lest proxies reuse closed connections."""
SWITCH_S = 1e-3
"""Thread switch interval in seconds; at Python's default of 5 ms each answer being written delays decoding by it."""
_ABORT_GRACE_S = 2.0  # time for aborted answers to send their error event


def run(service: Service, listening: socket.socket) -> int:
    """Serve until a signal or a failure of the engine; return the exit code, or raise why no model was loaded."""
    raise_file_limit()
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with _rereading(service):
            Server(service).run(sockets=[listening])
    except Exception as problem:
        service.dump("ended", f"{type(problem).__name__}: {problem}", traceback.format_exc())
        raise
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()  # undo the warm-up's freeze
    if service.problem is not None:
        raise service.problem
    return EXIT_FAILED if service.phase == "dead" or service.unsaved is not None else 0


@contextmanager
def _rereading(service: Service) -> Iterator[None]:
    """Reread the files of keys and limits on SIGHUP within the block; ignore SIGHUP if there are no such files."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    settings = service.settings
    has_file = settings.read_keys is not None or settings.config is not None
    handler = (lambda *_: setattr(service, "reload", True)) if has_file else signal.SIG_IGN
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Server(uvicorn.Server):
    """Uvicorn with a graceful shutdown that finishes running answers.

    After the first signal new requests are refused and `/ready` reports it, over connections that stay open; uvicorn
    would close them. Once the last answer has ended or timed out, uvicorn shuts down as usual.
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
            timeout_graceful_shutdown=int(_ABORT_GRACE_S),
            proxy_headers=False,
        )
        super().__init__(config)
        self._service = service
        self.ends_at: float | None = None  # when running answers have to end; None before a signal
        self._left = 0  # answers in flight when the shutdown began: those refused since are none
        self._aborted = self._told = self._dying = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, exit on the second."""
        if self.ends_at is not None:
            os._exit(128 + sig)
        self._service.drain()
        self._end_within(self._service.settings.shutdown_timeout)

    def _end_within(self, seconds: float) -> None:
        if self.ends_at is None:
            self._left = len(self._service.in_flight)
        self.ends_at = min(self.ends_at or float("inf"), perf_counter() + seconds)

    async def on_tick(self, counter: int) -> bool:
        """Return True to exit; called ten times per second."""
        service, is_idle = self._service, not self._service.in_flight  # before it looks why the last ones failed
        try:
            await asyncio.to_thread(service.watch)
        except Exception as problem:  # noqa: BLE001 - a full disk or lack of memory must not end the answers
            logger.warning("a periodic task failed, and is tried again: %s", problem)
        if service.problem is not None:
            return True
        if service.phase == "dead" and not self._dying:
            self._dying = True  # its answers fail, also those that a shutdown waits for
            self._end_within(_ABORT_GRACE_S)
        if self.ends_at is not None:
            return self._is_over(self.ends_at, is_idle and not service.in_flight)  # one may have come meanwhile
        return await super().on_tick(counter)

    def _is_over(self, ends_at: float, is_idle: bool) -> bool:
        if not self._told:
            self._told = True
            left = f"{self._left} answers have {max(0.0, ends_at - perf_counter()):.0f} s to end"
            logger.info("shutting down: %s", left if self._left else "nothing is left")
        if is_idle and not (self._service.phase == "dead" and perf_counter() < ends_at):
            return True
        if perf_counter() < ends_at:
            return False
        if not self._aborted:
            self._aborted = True
            self._service.abort()
        return perf_counter() > ends_at + _ABORT_GRACE_S
