"""Request bodies: JSON of bounded size, received in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.server.errors import INVALID, NOT_JSON, ApiError, invalid, overloaded, validation_error
from lade.server.request_context import GONE, ClientLeftError, Exchange, unless_gone
from lade.server.serialization import TooManyValuesError, decoded
from lade.server.service import SMALL, Service

T = TypeVar("T")
_SECONDS = 30.0
"""Time that a client has to send a whole body."""
_DISCARDED = 8
"""Multiple of the size limit up to which an oversized body is read and discarded: clients still sending when the
connection is closed would miss the answer.
"""

_MOST_HELD = 16
"""Limit on all bodies in memory, in units of the size limit of one; small bodies are exempt."""


class Body:
    """ASGI middleware that reads the request body before the route sees it.

    Browsers send forms and plain text across origins without a preflight, but not JSON. So a content type is required.

    Args:
        app: the inner application.
        most_bytes: function that returns the maximum size; it may change when the model is loaded.
        wanted: predicate of a scope: True if its route reads a body.
    """

    def __init__(self, app: ASGIApp, most_bytes: Callable[[], int], wanted: Callable[[Scope], bool]) -> None:
        self._app, self._most_bytes, self._wanted = app, most_bytes, wanted
        self._held = 0  # bytes, of all bodies that are here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or refuse it."""
        if scope["type"] != "http" or not self._wanted(scope):
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        try:
            await self._hand_on(exchange, scope, receive, send)
        finally:
            self._held -= exchange.size

    async def _hand_on(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            whole = await asyncio.wait_for(self._whole(exchange, Headers(scope=scope), receive), _SECONDS)
        except TimeoutError:
            whole = ApiError(408, INVALID, "the body did not come in time: send it at once", code="request_timeout")
        if isinstance(whole, ApiError):
            await whole.response()(scope, receive, send)
        elif whole is not None:
            await self._app(scope, _replayed(whole, receive), send)

    async def _whole(self, exchange: Exchange, headers: Headers, receive: Receive) -> bytes | ApiError | None:
        """Return the body; None if the client has disconnected."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            why = f"the body is {kind or 'of no type'}: send JSON with the header  content-type: application/json"
            return ApiError(415, INVALID, why, code="unsupported_media_type")
        coding = headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            why = f"the body is compressed ({coding[:20]}): send it as it is"
            return ApiError(415, INVALID, why, code="unsupported_media_type")
        most = self._most_bytes()
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 18 or int(length) > _DISCARDED * most:
            return _too_large(most)
        parts, size = list[bytes](), 0
        while size <= _DISCARDED * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= most:
                parts.append(part)
                exchange.size += len(part)
                self._held += len(part)
            if exchange.size > SMALL and self._held > _MOST_HELD * most:
                why = "as many large requests are here as there is memory for: send this one again later"
                return overloaded(why, "too_many_bytes", close=True)
            if not message.get("more_body"):
                return b"".join(parts) if size <= most else _too_large(most)
        return _too_large(most)


class BodyRoute(APIRoute):
    """Route that parses and validates the body before FastAPI does, in a worker thread if it is large.

    FastAPI would do both on the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        adapter = TypeAdapter[Any](cast(Any, self.body_field.field_info.annotation))

        async def checked(request: Request) -> Response:
            try:
                found = await beside(request, partial(_checked, adapter, await request.body()))
                return await handle(_Checked(request, found))
            except ClientLeftError:
                return Response(status_code=GONE)

        return checked


async def beside(request: Request, work: Callable[[], T]) -> T:
    """Run work for a request, in a worker thread if its body is large.

    Raises:
        ClientLeftError: the client has disconnected.
    """
    size = Exchange.of(request.scope).size
    if size <= SMALL:
        return work()
    service: Service = request.app.state.service
    return await unless_gone(request, service.prepared(size, work))


class _Checked(Request):
    """A request with its validated body."""

    def __init__(self, request: Request, found: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._found = found

    async def body(self) -> bytes:
        """Return a placeholder, since the body is parsed already."""
        return b"{}"

    async def json(self) -> Any:
        """Return the validated model, which FastAPI accepts as it is."""
        return self._found


def _checked(adapter: TypeAdapter[Any], raw: bytes) -> Any:
    try:
        body = decoded(raw)
    except TooManyValuesError as problem:
        raise invalid(None, f"the body: {problem}") from None
    except (ValueError, RecursionError):
        raise NOT_JSON from None
    try:
        return adapter.validate_python(body)
    except ValidationError as problem:
        raise validation_error(problem.errors(include_url=False), body) from None


def _too_large(most: int) -> ApiError:
    why = f"the body has more than {most} bytes: send less, or start the server with a greater --max-body"
    return ApiError(413, INVALID, why, code="request_too_large", headers={"Connection": "close"})


def _replayed(whole: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays the body, followed by the client's disconnect."""
    first = [{"type": "http.request", "body": whole, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
