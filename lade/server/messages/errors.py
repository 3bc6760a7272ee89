"""Errors in Anthropic's form, on the paths that speak it."""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.server.errors import internal
from lade.server.exchange import Exchange
from lade.server.replies import encoded

PATH = "/v1/messages"
_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def as_anthropic(status: int, message: str, request_id: str) -> dict[str, Any]:
    """The object that is sent.

    Args:
        status: what OpenAI's API would answer with.
        message: what is wrong, and the remedy.
        request_id: of the request.
    """
    kind = _TYPES.get(_status(status), "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _status(status: int) -> int:
    return _OVERLOADED if status == 503 else status


class MessagesForm:
    """ASGI middleware that puts refusals below `/v1/messages` into Anthropic's form, wherever they come from.

    Every answer has the id of the request where Anthropic's clients look for it.

    Args:
        app: what comes after; its refusals are OpenAI's, and sent in one piece.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand it on."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
            return
        start: list[Message] = []

        async def send_in_form(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = Exchange.of(scope).id
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start.append(message)
            elif start and message["type"] == "http.response.body":
                await _send_error(start.pop(), message["body"], Exchange.of(scope).id, send)
            else:
                await send(message)

        try:
            await self._app(scope, receive, send_in_form)
        except Exception:
            exchange = Exchange.of(scope)
            if exchange.status == 0:  # nobody else would say so in this form
                await internal(exchange.id).response()(scope, receive, send_in_form)
            raise


async def _send_error(start: Message, body: bytes, request_id: str, send: Send) -> None:
    message = json.loads(body)["error"]["message"] if body else ""
    raw = encoded(as_anthropic(start["status"], message, request_id))
    start = {**start, "status": _status(start["status"])}
    headers = MutableHeaders(scope=start)
    headers["content-length"] = str(len(raw))
    await send(start)
    await send({"type": "http.response.body", "body": raw})
