"""The ASGI application, the static files of the chat page, and requests without a network."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Scope

from lade.server import errors
from lade.server.failures import LONGEST_BODY
from lade.server.middleware import AnthropicErrors, AuthMiddleware, BodyMiddleware
from lade.server.request_context import RequestContextMiddleware
from lade.server.routes import router
from lade.server.service import Service
from lade.version import __version__

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
"""Content types by file suffix; the system's own table varies."""

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated, so that an update never mixes old scripts with a new page
}


@dataclass(frozen=True)
class PageFile:
    """A file of the chat page.

    Attributes:
        path: URL path, `/` or `/page/...`.
        content: content of the file.
        kind: content type.
        tag: entity tag, quotes included.
    """

    path: str
    content: bytes
    kind: str
    tag: str

    async def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it."""
        headers = {**HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def page_files() -> Iterator[PageFile]:
    """Return all installed files of the page."""
    for name, source in _walk(files("lade.server").joinpath("page"), ""):
        kind = next((kind for end, kind in TYPES.items() if name.endswith(end)), None)
        if kind is None:
            continue  # not part of the page, such as an editor's backup
        content = source.read_bytes()
        path = "/" if name == "index.html" else f"/page/{name}"
        yield PageFile(path, content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def mount_page(app: Starlette) -> frozenset[str]:
    """Serve the chat page at `/` and its files below `/page/`, one route each.

    Files are read once. The routes need no key, since they hold no user data; hosts and origins are checked by the app.

    Returns:
        The paths that are served.
    """
    page = list(page_files())
    app.router.routes.extend(Route(file.path, file.answer, include_in_schema=False) for file in page)
    return frozenset(file.path for file in page)


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


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
    errors.install(app)
    settings = service.settings
    if settings.page:
        mount_page(app)
    kept = 0 if settings.crash_dump is None else LONGEST_BODY
    # the middleware added last runs first
    app.add_middleware(BodyMiddleware, most_bytes=lambda: service.max_body, wanted=_wants_body, longest_kept=kept)
    app.add_middleware(AuthMiddleware, settings=settings, keys=lambda: service.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-lade-ignored"],
        )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(RequestContextMiddleware, ended=lambda context: service.ended(context, _known(context.path)))
    return app


def _wants_body(scope: Scope) -> bool:
    """Return True if a route reads the body: unknown routes get 404 before their body is read."""
    return scope["method"] == "POST" and any(route.matches(scope)[0] is Match.FULL for route in router.routes)


def _known(path: str) -> str:
    """Return the route's path, which bounds the number of metric labels."""
    scope = {"type": "http", "path": path, "root_path": "", "method": "GET", "headers": []}
    for route in router.routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", "other"))
    return "other"


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
    content = json.dumps(dict(body)).encode()  # with NaN and lone surrogates, which the handlers refuse
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
            await asyncio.Event().wait()  # until cancelled: this client never disconnects by itself
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
