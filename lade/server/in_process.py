"""Requests to the app without a network, by the same handlers in the same process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from lade.server.serialization import encoded

_ASKED_BY = (b"host", b"localhost")


@dataclass
class Reply:
    """The app's response.

    Attributes:
        status: HTTP status.
        request_id: request id in the log.
        raw: response body.
    """

    status: int = 0
    request_id: str = ""
    raw: bytes = field(default=b"", repr=False)

    @property
    def body(self) -> Any:
        """The decoded body."""
        return json.loads(self.raw)


async def post(app: ASGIApp, path: str, body: Mapping[str, Any]) -> Reply:
    """Send a request and return the whole response; cancelling it disconnects the client.

    Args:
        app: the application from `build_app`, whose service has been started.
        path: URL path, such as `/v1/chat/completions`.
        body: request body.
    """
    content = encoded(dict(body))
    headers = [_ASKED_BY, (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    reply = Reply()

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # until it is cancelled: this client does not leave by itself
        return messages.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.request_id = next(
                (value.decode() for name, value in message["headers"] if name == b"x-request-id"), ""
            )
        else:
            reply.raw += message.get("body", b"")

    await app(scope, receive, send)
    return reply
