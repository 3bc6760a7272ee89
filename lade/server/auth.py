"""Auth: host allow-list against DNS rebinding, origins, API keys, connection limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lade.server.errors import AUTHENTICATION, PERMISSION, ApiError, overloaded
from lade.server.request_context import Exchange
from lade.server.settings import PROBES, Key, Keys, Settings

OPEN = PROBES - {"/metrics"}
"""Paths that need no key, for orchestrators."""
PAGE = "/page"
CROWDED = "crowded"
"""Key of the request state that is true while there are too many connections."""
_SAFE = ("GET", "HEAD", "OPTIONS")


class AuthMiddleware:
    """ASGI middleware that rejects unauthorized requests.

    A web page can make a browser send requests to this machine and, under a name that resolves to it (DNS rebinding),
    even read the answers. So names in `Host` must be allowed; IP addresses cannot be rebound.

    Args:
        app: the inner application.
        settings: the server's hosts and origins.
        keys: function that returns the current keys.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Callable[[], Keys]) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {"localhost", settings.host.lower(), *(host.lower() for host in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["state"].get(CROWDED) and scope["path"] not in OPEN:
            raise overloaded(
                "there are too many connections: send this again later", "too_many_connections", close=True
            )
        host = headers.get("host", "")
        if not self._knows(host):
            why = f"host {host[:100]!r} is not served: start the server with --allowed-host to serve it"
            raise ApiError(403, PERMISSION, why, code="forbidden_host")
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in _SAFE and not self._is_known_origin(origin, host):
            why = f"pages of {origin[:100]!r} may not ask: start the server with --cors-origin to allow it"
            raise ApiError(403, PERMISSION, why, code="forbidden_origin")
        if self._keys().all and not _is_open(scope):
            key, exchange = self._key(headers), Exchange.of(scope)
            exchange.key, exchange.owner = key.name, key.owner

    def _knows(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return bool(name) and ("*" in self._hosts or name in self._hosts or _is_number(name))

    def _is_known_origin(self, origin: str, host: str) -> bool:
        allowed = self._settings.cors_origins
        return "*" in allowed or origin in allowed or origin.partition("://")[2] == host

    def _key(self, headers: Headers) -> Key:
        """Return the key that was sent."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = headers.get("x-api-key", "")
        key = self._keys().find(secret.strip())
        if key is None:
            why = "no key, or a wrong one: send the header  Authorization: Bearer KEY"
            headers_out = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, AUTHENTICATION, why, code="invalid_api_key", headers=headers_out)
        return key


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    page = path in ("/", PAGE) or path.startswith(f"{PAGE}/")
    return path in OPEN or scope["method"] == "OPTIONS" or (page and scope["method"] in _SAFE)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
