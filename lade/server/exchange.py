"""A request and its answer: an id, a line in the log, figures, and the end of whatever it has begun."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.server.errors import internal
from lade.server.flight import Flight

logger = logging.getLogger(__name__)

GONE = 499
"""The status in logs and metrics of an answer that its client did not wait for."""
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        id: the client's, or a new one.
        method: of HTTP.
        path: asked for.
        key: name of the key that it was sent with; "-" where there are none.
        size: bytes of its body.
        status: of the answer; 0 before it begins.
        flight: what it has decoded, if anything.
        began: when it came.
    """

    id: str
    path: str
    method: str = "-"
    key: str = "-"
    size: int = 0
    status: int = 0
    flight: Flight | None = None
    began: float = field(default_factory=perf_counter)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """That of a request."""
        exchange: Exchange = scope["state"]["exchange"]
        return exchange

    @property
    def seconds(self) -> float:
        """Since it came."""
        return perf_counter() - self.began


class Exchanges:
    """ASGI middleware around all others.

    Whatever ends a request, its client's leaving included, ends what it has begun: frameworks cancel what makes an
    answer, and know nothing of rows.

    Args:
        app: what comes after.
        ended: is told each exchange that has ended.
    """

    def __init__(self, app: ASGIApp, ended: Callable[[Exchange], None]) -> None:
        self._app, self._ended = app, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"
        exchange = Exchange(request_id, scope["path"], scope["method"])
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = exchange.id
                headers["x-content-type-options"] = "nosniff"  # else a browser might take JSON for a page
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed", exchange.id)
            if exchange.status == 0:
                await internal(exchange.id).response()(scope, receive, send_with_id)
        finally:
            if exchange.flight is not None:
                exchange.flight.close()
                if exchange.flight.outcome == "cancelled":
                    exchange.status = GONE
            self._ended(exchange)
