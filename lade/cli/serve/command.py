"""`lade serve`: the model behind OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
    from lade.cli.loading.loaded_model import LoadedModel
    from lade.server.served_model import ServedModel
    from lade.server.settings import Settings

EXAMPLE = "Example:  [bold]lade serve --model Qwen/Qwen3-0.6B[/bold]  and  [bold]curl localhost:8000/v1/models[/bold]"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
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
        template = options.Template(chat_template_kwargs=chat_template_kwargs)
        template.check()
        settings = _settings(listening, access, limits, loading, speed, template.arguments)
        _warn(settings, term)
        own = None if chat_template is None else _read(chat_template)
        from lade.server.listen import bound, run

        socket = bound(listening.host, listening.port)
        code = run(_service(settings, loading, speed, own, term, socket, listening.log_format, json), socket)
    if code:
        raise typer.Exit(code)


def _require_extra() -> None:
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise MissingExtraError(name.replace("_", "-"), "serve")


def _settings(
    listening: Listening,
    access: Access,
    limits: Limits,
    loading: options.Loading,
    speed: options.Speed,
    template_arguments: Mapping[str, Any],
) -> Settings:
    from lade.server.settings import Settings

    return Settings(
        host=listening.host,
        port=listening.port,
        names=listening.names(loading),
        metrics=listening.metrics,
        strict=listening.strict,
        keys=access.keys(),
        allowed_hosts=tuple(access.allowed_host or ()),
        cors_origins=tuple(access.cors_origin or ()),
        max_rows=limits.max_rows,
        max_waiting=limits.max_waiting,
        max_tokens=limits.max_tokens,
        context=limits.context,
        answer_tokens=limits.answer_tokens,
        max_body=limits.body_bytes,
        queue_timeout=limits.queue_timeout,
        shutdown_timeout=limits.shutdown_timeout,
        lookahead=speed.lookahead(),
        template_arguments=template_arguments,
    )


def _warn(settings: Settings, term: Terminal) -> None:
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not settings.keys.all:
        term.say(f"warning: anyone who reaches {settings.host} may ask: give --api-key-file", "yellow")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise InputError(f"chat template {str(path)!r} cannot be read: {reason}; check path and permissions") from None


def _service(
    settings: Settings,
    loading: options.Loading,
    speed: options.Speed,
    chat_template: str | None,
    term: Terminal,
    socket: Any,
    log_format: str,
    json: bool,
) -> Any:
    """What is served, once it is loaded."""
    from lade.server.access_log import AccessLog
    from lade.server.listen import url_of
    from lade.server.service import Service

    url = url_of(settings.host, socket)

    def load() -> ServedModel:
        from lade.cli.loading.load import load as load_model

        return _served(load_model(loading, term=term, pack=speed.pack, images=None), chat_template)

    def announce(model: ServedModel) -> None:
        term.resting()
        if json:
            term.write_json({"url": url, "pid": os.getpid(), "model": settings.name})
        else:
            term.write(f"lade serve · {settings.name} · {url} · API /v1\n")

    log = None if term.quiet else AccessLog(lambda line: term.say(line, "dim"), as_json=log_format == "json")
    return Service(settings, load, announce, log)


def _served(loaded: LoadedModel, chat_template: str | None) -> ServedModel:
    from lade.server.served_model import ServedModel

    if chat_template is not None:
        loaded.tokenizer.chat_template = chat_template
    from lade.cli.loading.load import SAMPLING_FIELDS

    sampling = {name: value for name, value in loaded.checkpoint_defaults.items() if name in SAMPLING_FIELDS}
    return ServedModel(loaded.model, loaded.tokenizer, sampling, loaded.context, _image_encoder(loaded))


def _image_encoder(loaded: LoadedModel) -> Callable[..., Any] | None:
    """None for a model that takes no images."""
    if getattr(loaded.model.config, "vision_config", None) is None:
        return None
    from lade.cli.images import encode

    def encoded(messages: Any, arguments: Mapping[str, Any]) -> tuple[list[int], Mapping[str, Any]]:
        made = encode(loaded, messages, arguments)
        return made.ids, made.media

    return encoded
