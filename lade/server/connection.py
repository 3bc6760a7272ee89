"""One connection of a client: uvicorn's, with bounds on what costs a client nothing."""

from __future__ import annotations

import asyncio
import socket
from asyncio.events import TimerHandle
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lade.server.errors import INVALID, ApiError
from lade.server.guard import CROWDED
from lade.server.replies import encoded

HEADERS_S = 10.0
"""That a client has to send the headers of a request, from when it connects, or from their first byte: uvicorn itself
would wait for ever."""
MOST_HEADER_BYTES = 64 * 2**10
CONNECTIONS = 1024
"""While there are more, those that have been idle longest are closed; where none is, requests are refused, and beyond
twice as many connections new ones are closed."""
IDLE_S = 1.0
"""That a connection has before it is idle: what comes with it is not read at once."""


class Connection(HttpToolsProtocol):
    """HTTP as uvicorn speaks it; see above for what it adds."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: TimerHandle | None = None
        self._came = 0
        self._begun = False
        self._idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        if len(self.connections) > CONNECTIONS:
            self._close_idle()
        if len(self.connections) > 2 * CONNECTIONS:
            transport.abort()
            return
        # else the body of an answer waits until the client has acknowledged its head, after 40 ms; asyncio does this
        # for none that was accepted by a socket of `socket.create_server`
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def on_response_complete(self) -> None:
        """Be idle, unless the next request has come already."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request has come, or of the next one."""
        return not (self._begun or self._is_answering or self.transport.is_closing())

    def _close_idle(self) -> None:
        """Close the connection that has been idle longest, if any is but this one."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        since = self.loop.time() - IDLE_S
        idle = [each for each in others if each.is_idle and each._idle_since <= since]
        if idle:
            longest = min(idle, key=lambda each: each._idle_since)
            longest.transport.close()
            self.connections.discard(longest)  # it is counted no more, whenever that is done

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What comes belongs to a request whose headers are whole, or has to become one in time."""
        waiting = self._timer
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._timer is None and not self._is_answering:  # the rest of a request that has been refused
            self._wait()
        elif waiting is not None and self._timer is waiting:
            self._came += len(data)
            if self._came > MOST_HEADER_BYTES:
                why = f"the headers have more than {MOST_HEADER_BYTES} bytes: send less"
                self._refuse(ApiError(431, INVALID, why, code="headers_too_large"))

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        self._begun = True
        self.scope["state"][CROWDED] = len(self.connections) > CONNECTIONS
        if self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """It is a request now; how long its body may take is not decided here."""
        self._stop_waiting()
        self._begun = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        self._refuse(ApiError(400, INVALID, f"{msg.rstrip('.')}: send HTTP/1.1", code="invalid_http"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._came = 0
        self._timer = self.loop.call_later(HEADERS_S, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._is_answering:  # the headers are those of the next request
            self._wait()
        elif not self._begun:
            self.transport.close()
        else:
            why = f"the headers did not come within {HEADERS_S:g} s: send them at once"
            self._refuse(ApiError(408, INVALID, why, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Say why, unless that would stand amid an answer, and close."""
        if not self._is_answering:
            body = encoded(error.body)
            phrase = HTTPStatus(error.status).phrase
            head = (
                f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
                "x-content-type-options: nosniff\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
