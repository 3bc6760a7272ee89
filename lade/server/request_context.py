"""Request context: id, log data, queue slots, disconnects."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.server.errors import internal, invalid
from lade.server.keys import NO_LIMITS, KeyLimits
from lade.server.settings import LONGEST_TIMEOUT_S
from lade.serving.handle import Handle
from lade.serving.scheduler import QueueSlot

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; raise `ClientDisconnectedError` if the client disconnects first."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


TIMEOUT_HEADER = "x-request-timeout"


def timeout_of(headers: Headers, given: float | None, limit: float | None) -> float | None:
    """Return the seconds that a request has from its arrival to its last token; None for no limit.

    The least counts of what its headers have, what is `given` in its body, and the server's own `limit`.

    Raises:
        ApiError: the header is not a number of seconds.
    """
    sent, of_header = headers.get(TIMEOUT_HEADER), None
    if sent is not None:
        try:
            of_header = float(sent)
        except ValueError:
            of_header = math.nan
        if not 0 < of_header <= LONGEST_TIMEOUT_S:
            why = f"{sent[:20]!r} is not a time: give seconds above 0 and up to {LONGEST_TIMEOUT_S:g}"
            raise invalid(TIMEOUT_HEADER, why)
    return min((each for each in (of_header, given, limit) if each is not None), default=None)


logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # status in logs and metrics of an answer whose client disconnected
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(eq=False)
class RequestContext:
    """A request and its response; if tokens are decoded for it, from its queue slots to its last token."""

    id: str  # the client's, or a new one
    path: str
    method: str = "-"
    key: str = "-"  # name of the API key; "-" without keys
    owner: str = "-"  # tenant of the key, see `Key.owner`
    limits: KeyLimits = NO_LIMITS
    size: int = 0  # of the body, in bytes
    body: bytes = field(default=b"", repr=False)  # if it is kept for crash dumps
    headers: Headers = field(default_factory=Headers, repr=False)
    status: int = 0  # of the response; 0 before it begins
    began: float = field(default_factory=perf_counter)  # when it arrived
    received_ns: int = field(default_factory=time_ns)  # the same, since the epoch
    endpoint: str = ""  # name of the API, such as "chat" or "completions"; "" if nothing is decoded
    slots: list[QueueSlot] = field(default_factory=list)
    outcome: str | None = None  # "stop", "length", "tool_calls", "rejected", "error" or "cancelled"; None before
    aborted: Exception | None = None  # with which the server ended the request
    problem: str = ""  # type and message of the exception that has ended the request
    first_s: float | None = None  # seconds until the first token; None before
    predictions: tuple[int, int] = (0, 0)  # accepted and rejected tokens of the predicted output, set at the end
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """Return the context of a request."""
        context: RequestContext = scope["state"]["context"]
        return context

    @property
    def is_anthropic(self) -> bool:
        """True for a path of Anthropic's API."""
        return self.path == "/v1/messages" or self.path.startswith("/v1/messages/")

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return perf_counter() - self.began

    @property
    def handles(self) -> list[Handle]:
        """Handles of the choices that have been submitted."""
        return [slot.handle for slot in self.slots if slot.handle is not None]

    @property
    def waiting(self) -> bool:
        """True if any choice still waits for a row."""
        return any(slot.handle is None or slot.handle.queue_s is None for slot in self.slots)

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in this event loop after a time, unless the request has ended by then."""
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call, *arguments))

    def abort(self, problem: Exception) -> None:
        """Cancel all choices because of an exception."""
        self.aborted = self.aborted or problem
        self._cancel()

    def close(self) -> None:
        """Release slots and rows; without an outcome so far, the client has disconnected."""
        if self.outcome is None:
            self.outcome = "cancelled"
        for timer in self._timers:  # a client's timeout may be days away
            timer.cancel()
        self._cancel()

    def _cancel(self) -> None:
        for slot in self.slots:
            slot.cancel()


class RequestContextMiddleware:
    """Outermost ASGI middleware: creates request contexts.

    However a request ends, its decoding ends with it: frameworks cancel the handler on a disconnect, not its rows.
    """

    def __init__(self, app: ASGIApp, ended: Callable[[RequestContext], None]) -> None:
        self._app, self._ended = app, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within a new context."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        context = RequestContext(request_id, scope["path"], scope["method"], headers=headers)
        scope.setdefault("state", {})["context"] = context

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = context.id
                if context.is_anthropic:
                    sent["request-id"] = context.id
                sent["x-content-type-options"] = "nosniff"  # keep browsers from rendering JSON as a page
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed", context.id)
            if context.status == 0:
                await internal(context.id).response(scope)(scope, receive, send_with_id)
        finally:
            if context.endpoint:
                context.close()
                if context.outcome == "cancelled":
                    context.status = CLIENT_CLOSED
            self._ended(context)
