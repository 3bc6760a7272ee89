"""Request context: id, log line, in-flight generation, disconnect of the client."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.server.errors import internal
from lade.serving.handle import Handle, QueueSlot

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work, unless the client leaves before; nobody else notices that it does.

    Raises:
        ClientLeftError: it has left.
    """
    tasks: Sequence[asyncio.Task[Any]] = (asyncio.create_task(work), asyncio.create_task(_gone(request)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            result: T = tasks[0].result()
            return result
        raise ClientLeftError
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Flight:
    """What one request has the engine do, from the place that it takes in the queue to its last token.

    Attributes:
        endpoint: what was asked, "chat" or "completions".
        places: in the engine's queue, one for each answer.
        outcome: how it ended: "stop", "length", "tool_calls", "rejected", "error"; "cancelled" where its client left.
        aborted: what ended it from this side, if anything did.
        first_s: seconds until its first token; None before.
        predictions: tokens that came as was expected, and those that did not; once it has ended.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.places: list[QueueSlot] = []
        self.outcome: str | None = None
        self.aborted: Exception | None = None
        self.first_s: float | None = None
        self.predictions = (0, 0)
        self.began = perf_counter()

    @property
    def handles(self) -> list[Handle]:
        """Of the answers that are decoded or wait to be."""
        return [place.handle for place in self.places if place.handle is not None]

    @property
    def waiting(self) -> bool:
        """Whether any of its answers still waits for a row."""
        return any(place.handle is None or place.handle.queue_s is None for place in self.places)

    def saw_token(self) -> None:
        """A token has come; the first one is what counts."""
        if self.first_s is None:
            self.first_s = perf_counter() - self.began

    def abort(self, problem: Exception) -> None:
        """End it because of this."""
        self.aborted = self.aborted or problem
        self._cancel()

    def close(self) -> None:
        """Free its places and rows; without an outcome by now, its client has left."""
        if self.outcome is None:
            self.outcome = "cancelled"
        self._cancel()

    def _cancel(self) -> None:
        for place in self.places:
            place.cancel()


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
        owner: whose key that is; see `Key.owner`.
        size: bytes of its body.
        status: of the answer; 0 before it begins.
        flight: what it has decoded, if anything.
        began: when it came.
    """

    id: str
    path: str
    method: str = "-"
    key: str = "-"
    owner: str = "-"
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
