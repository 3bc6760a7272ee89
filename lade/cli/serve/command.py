"""`lade serve`: a model behind OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lade.cli.options import decoding as options
from lade.cli.options.grouping import in_panel
from lade.cli.serve.options import Access, Limits, Listening
from lade.cli.terminal import Terminal, terminal
from lade.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from lade.server.access_log import AccessLog
    from lade.server.served_model import ServedModel
    from lade.server.settings import Settings

EXAMPLE = "Example:  [bold]lade serve --model Qwen/Qwen3-0.6B[/bold]  and  [bold]curl localhost:8000/v1/models[/bold]"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_template = in_panel("Chat template")


@options.grouped
def serve(
    *,
    listening: Listening,
    access: Access,
    limits: Limits,
    chat_template: Annotated[
        Path | None, _template(metavar="FILE", help="Chat template to use instead of the model's.")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, _template(metavar="JSON", help='For it: {"enable_thinking": false}, ...')
    ] = None,
    speed: options.Speed,
    loading: options.Loading,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Serve a model over HTTP, as OpenAI's API: any client of it, many users at a time, the same tokens.

    Listens at once, and answers when the model is loaded. Without --model: the embedded one.

    SIGTERM and Ctrl-C let answers end; a second one does not. Exit code 1: the engine broke down.
    """
    with terminal(output) as term:
        _require_extra()
        for group in (listening, access, limits, loading):
            group.check()
        replace(speed, memory=None).lookahead()  # raises for what is wrong with it
        template = options.Template(chat_template_kwargs=chat_template_kwargs)
        template.check()
        settings = _settings(listening, access, limits, listening.names(loading), template.arguments)
        own = None if chat_template is None else _read(chat_template)
        from lade.server.sockets import bound, url_of

        socket = bound(listening.host, listening.port)
        if settings.host not in _LOOPBACK and not settings.keys.all:
            term.say(f"warning: anyone who reaches {settings.host} may ask: give --api-key-file", "yellow")
        from lade.cli.serve.model import load
        from lade.server.listen import run
        from lade.server.service import Service

        announce = partial(_announce, settings, url_of(listening.host, socket), term, json=json)
        service = Service(settings, partial(load, loading, speed, own, term), announce, _log(listening, term))
        code = run(service, socket)
    if code:
        raise typer.Exit(code)


def _require_extra() -> None:
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise MissingExtraError(name.replace("_", "-"), "serve")


def _settings(
    listening: Listening, access: Access, limits: Limits, names: tuple[str, ...], template_arguments: Mapping[str, Any]
) -> Settings:
    from lade.server.settings import Settings

    return Settings(
        host=listening.host,
        names=names,
        metrics=listening.metrics,
        page=listening.page,
        strict=listening.strict,
        keys=access.keys(),
        allowed_hosts=tuple(access.allowed_host or ()),
        cors_origins=tuple(access.cors_origin or ()),
        share=access.share,
        max_rows=limits.max_rows,
        max_waiting=limits.max_waiting,
        max_tokens=limits.max_tokens,
        context=limits.context,
        answer_tokens=limits.answer_tokens,
        prefix_cache=limits.prefix_bytes,
        max_body=limits.body_bytes,
        queue_timeout=limits.queue_timeout,
        shutdown_timeout=limits.shutdown_timeout,
        template_arguments=template_arguments,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise InputError(f"chat template {str(path)!r} cannot be read: {reason}; check path and permissions") from None


def _announce(settings: Settings, url: str, term: Terminal, model: ServedModel, *, json: bool) -> None:
    """The one line on standard output: it can be reached."""
    term.resting()
    if json:
        term.write_json({"url": url, "pid": os.getpid(), "model": settings.name})
    else:
        page = " · page /" if settings.page else ""
        term.write(f"lade serve · {settings.name} · {url}{page} · API /v1\n")


def _log(listening: Listening, term: Terminal) -> AccessLog | None:
    """On standard error; none with --quiet."""
    if term.quiet:
        return None
    from lade.server.access_log import AccessLog

    return AccessLog(lambda line: term.say(line, "dim"), as_json=listening.log_format == "json")
