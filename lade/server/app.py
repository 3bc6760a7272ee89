"""The ASGI application, the static files of the chat page, and requests without a network."""

from __future__ import annotations

import asyncio
import json
import mimetypes
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message

from lade.server.errors import ApiError, error_response
from lade.server.middleware import AuthMiddleware
from lade.server.request_context import RequestContextMiddleware
from lade.server.routes import router
from lade.server.service import Service
from lade.version import __version__

for _suffix, _type in {".js": "text/javascript", ".mjs": "text/javascript", ".license": "text/plain"}.items():
    mimetypes.add_type(_type, _suffix)  # the system's own table varies

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated, so that an update never mixes old scripts with a new page
}


class Page(StaticFiles):
    """The chat page: `index.html` at `/`, and all its files below `/page/`.

    It needs no key, since it holds no user data; hosts and origins are checked by the app.
    """

    def __init__(self) -> None:
        super().__init__(packages=[("lade.server", "page")])

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file, or 304 if the browser has it."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response

    async def index(self, request: Request) -> Response:
        """Return the page itself."""
        return await self.get_response("index.html", request.scope)


def mount_page(app: Starlette) -> None:
    """Serve the chat page."""
    page = Page()
    app.router.routes += [Route("/", page.index, include_in_schema=False), Mount("/page", page)]


def build_app(service: Service) -> FastAPI:
    """Return the application of a server; its model begins to load on startup."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    # /docs and /redoc would load scripts from other origins; FastAPI's telemetry reports exceptions, and so maybe texts
    off: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    app = FastAPI(title="lade", version=__version__, docs_url=None, redoc_url=None, lifespan=life, telemetry=off)
    app.state.service = service
    app.include_router(router)
    for kind in (HTTPException, ApiError):
        app.add_exception_handler(kind, error_response)
    settings = service.settings
    if settings.page:
        mount_page(app)
    # the middleware added last runs first
    app.add_middleware(AuthMiddleware, settings=settings, keys=lambda: service.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-lade-ignored"],
        )
    app.add_middleware(RequestContextMiddleware, ended=lambda context: service.ended(context, _known(context.path)))
    return app


def _known(path: str) -> str:
    """Return the route's path, which bounds the number of metric labels."""
    scope = {"type": "http", "path": path, "root_path": "", "method": "GET", "headers": []}
    for route in router.routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", "other"))
    return "other"


@dataclass
class Reply:
    """The app's response, with its body as bytes, and its id in the log."""

    status: int = 0
    request_id: str = ""
    raw: bytes = field(default=b"", repr=False)

    @property
    def body(self) -> Any:
        """The decoded body."""
        return json.loads(self.raw)


async def post(app: ASGIApp, path: str, body: Mapping[str, Any]) -> Reply:
    """Send a request to an application whose service has been started; cancelling it disconnects the client."""
    content = json.dumps(dict(body)).encode()  # with NaN and lone surrogates, which the handlers refuse
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    reply = Reply()

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # until cancelled: this client never disconnects by itself
        return messages.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.request_id = Headers(raw=message["headers"]).get("x-request-id", "")
        else:
            reply.raw += message.get("body", b"")

    await app(scope, receive, send)
    return reply
