"""The ASGI app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import Scope

from lade.server import errors
from lade.server.body import Body
from lade.server.exchange import Exchange, Exchanges
from lade.server.guard import Guard
from lade.server.messages.errors import MessagesForm
from lade.server.routes import router
from lade.server.service import Service
from lade.server.static import mount_page
from lade.version import __version__


def build_app(service: Service) -> FastAPI:
    """The app of a server; its model begins to load when the app starts.

    Args:
        service: what its routes share.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    # /docs and /redoc would have a browser load scripts from elsewhere
    app = FastAPI(title="lade", version=__version__, docs_url=None, redoc_url=None, lifespan=life)
    app.state.service = service
    app.include_router(router)
    errors.install(app)
    settings = service.settings
    if settings.page:
        mount_page(app)
    # the last one added comes first
    app.add_middleware(Body, most_bytes=lambda: service.max_body, wanted=_wants_body)
    app.add_middleware(Guard, settings=settings, keys=lambda: service.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-lade-ignored"],
        )
    app.add_middleware(MessagesForm)
    app.add_middleware(Exchanges, ended=partial(_ended, app, service))
    return app


def _ended(app: FastAPI, service: Service, exchange: Exchange) -> None:
    service.ended(exchange, _known(app, exchange.path))


def _wants_body(scope: Scope) -> bool:
    """Whether a route takes it: what is asked in vain is told so, whatever its body is like."""
    return scope["method"] == "POST" and any(route.matches(scope)[0] is Match.FULL for route in router.routes)


def _known(app: FastAPI, path: str) -> str:
    """The path of a route, so that metrics have few labels whatever clients ask for."""
    scope = {"type": "http", "path": path, "root_path": "", "method": "GET", "headers": []}
    for route in router.routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", "other"))
    return "other"
