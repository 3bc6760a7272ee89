"""Authorization, and request bodies of bounded size."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lade.server import errors
from lade.server.errors import ApiError, invalid, overloaded
from lade.server.failures import LONGEST_BODY
from lade.server.keys import Key, Keys
from lade.server.request_context import CLIENT_CLOSED, ClientDisconnectedError, RequestContext, until_disconnect
from lade.server.serialization import TooManyValuesError, decoded
from lade.server.service import SMALL, Service
from lade.server.settings import PROBES, Settings

T = TypeVar("T")

OPEN = PROBES - {"/metrics"}  # paths that need no key, for orchestrators
PAGE = "/page"
_SAFE = ("GET", "HEAD", "OPTIONS")


class AuthMiddleware:
    """ASGI middleware that rejects unauthorized requests.

    A web page can make a browser send requests to this machine and, under a name that resolves to it (DNS rebinding),
    even read the answers. So names in `Host` must be allowed; IP addresses cannot be rebound.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Callable[[], Keys]) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {"localhost", settings.host.lower(), *(host.lower() for host in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._is_allowed_host(host):
            why = f"host {host[:100]!r} is not allowed: start the server with --allowed-host to allow it"
            raise ApiError(403, errors.PERMISSION, why, code="forbidden_host")
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in _SAFE and not self._is_allowed_origin(origin, host):
            why = f"origin {origin[:100]!r} is not allowed: start the server with --cors-origin to allow it"
            raise ApiError(403, errors.PERMISSION, why, code="forbidden_origin")
        if self._keys().all and not _is_open(scope):
            key, context = self._key(headers), RequestContext.of(scope)
            context.key, context.owner, context.limits = key.name, key.owner, key.limits

    def _is_allowed_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            if name and not self._hosts.isdisjoint(("*", name)):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        allowed = self._settings.cors_origins
        return "*" in allowed or origin in allowed or origin.partition("://")[2] == host

    def _key(self, headers: Headers) -> Key:
        """Return the key that was sent."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = headers.get("x-api-key", "")
        key = self._keys().find(secret.strip())
        if key is None:
            why = "missing or invalid API key: send the header  Authorization: Bearer KEY"
            headers_out = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, errors.AUTHENTICATION, why, code="invalid_api_key", headers=headers_out)
        return key


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    page = path in ("/", PAGE) or path.startswith(f"{PAGE}/")
    return path in OPEN or scope["method"] == "OPTIONS" or (page and scope["method"] in _SAFE)


_SECONDS = 30.0  # time that a client has to send a whole body
_DISCARDED = 8
"""Multiple of the size limit up to which an oversized body is read and discarded: clients still sending when the
connection is closed would miss the answer.
"""

_MAX_HELD = 16
"""Limit on all bodies in memory, in units of the size limit of one; small bodies are exempt."""


async def _read(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: it is not JSON by its headers, too large, or too slow.
        ClientDisconnectedError: the client has disconnected.
    """
    service: Service = request.app.state.service
    most = service.max_body
    _check_headers(request.headers, most)
    try:
        body = await asyncio.wait_for(_received(request, service, most), _SECONDS)
    except TimeoutError:
        why = f"the body was not received within {_SECONDS:g} s"
        headers = {"Connection": "close"}
        raise ApiError(408, errors.INVALID, why, code="request_timeout", headers=headers) from None
    if service.settings.crash_dump is not None and len(body) <= LONGEST_BODY:
        RequestContext.of(request.scope).body = body
    return body


async def _received(request: Request, service: Service, most: int) -> bytes:
    context, parts, size, more = RequestContext.of(request.scope), list[bytes](), 0, True
    while more and size <= _DISCARDED * most:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= most:
            parts.append(part)
            context.size += len(part)
            service.body_bytes += len(part)
        if context.size > SMALL and service.body_bytes > _MAX_HELD * most:
            why = "large requests in progress use all memory for bodies: retry later"
            raise overloaded(why, "too_many_bytes", close=True)
    if size > most:
        raise _too_large(most)
    return b"".join(parts)


def _check_headers(headers: Headers, most: int) -> None:
    """Check type and size of a body. Browsers send other types than JSON across origins without a preflight."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        why = f"content-type is {kind or 'missing'}: send JSON with the header  content-type: application/json"
        raise ApiError(415, errors.INVALID, why, code="unsupported_media_type")
    coding = headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        why = f"content-encoding {coding[:20]} is not supported: send the body uncompressed"
        raise ApiError(415, errors.INVALID, why, code="unsupported_media_type")
    length = headers.get("content-length", "0")
    if not length.isdigit() or len(length) > 18 or int(length) > _DISCARDED * most:
        raise _too_large(most)


class BodyRoute(APIRoute):
    """Route that reads and validates the body before FastAPI does, in a worker thread if it is large.

    FastAPI would read it whatever its size, validate it on the event loop, and go on after a disconnect.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        adapter = TypeAdapter[Any](cast(Any, self.body_field.field_info.annotation))

        async def checked(request: Request, raw: bytes) -> Response:
            found = await in_worker_if_large(request, partial(_checked, adapter, raw))
            return await handle(_Checked(request, found))

        async def until_disconnected(request: Request) -> Response:
            try:
                return await until_disconnect(request, checked(request, await _read(request)))
            except ClientDisconnectedError:
                return Response(status_code=CLIENT_CLOSED)

        return until_disconnected


async def in_worker_if_large(request: Request, work: Callable[[], T]) -> T:
    """Run work for a request, in a worker thread if its body is large."""
    size = RequestContext.of(request.scope).size
    if size <= SMALL:
        return work()
    service: Service = request.app.state.service
    return await service.in_worker(size, work)


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
        raise errors.NOT_JSON from None
    try:
        return adapter.validate_python(body)
    except ValidationError as problem:
        raise errors.validation_error(problem.errors(include_url=False), body) from None


def _too_large(most: int) -> ApiError:
    why = f"the body exceeds {most} bytes: send less, or start the server with a larger --max-body"
    return ApiError(413, errors.INVALID, why, code="request_too_large", headers={"Connection": "close"})
