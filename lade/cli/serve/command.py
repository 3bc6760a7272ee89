"""`lade serve`, and the Ray Serve application with the same options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from lade.cli.options import decoding as options
from lade.cli.serve.options import Access, Limits, Listening, Scaling, ServedTemplate, check_all, loader
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError, InputError

if TYPE_CHECKING:
    import socket

    from lade.server.access_log import AccessLog
    from lade.server.served_model import ServedModel
    from lade.server.service import Service
    from lade.server.settings import Settings


EXAMPLE = "Example:  [bold]lade serve --model Qwen/Qwen3-0.6B[/bold]  and  [bold]curl localhost:8000/v1/models[/bold]"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@options.grouped
def serve(
    *,
    listening: Listening,
    access: Access,
    limits: Limits,
    scaling: Scaling,
    template: ServedTemplate,
    speed: options.Speed,
    loading: options.Loading,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Serve a model over HTTP with OpenAI's API, to many users at once, with the same output.

    The port opens at once; requests are answered once the model is loaded. Default: the embedded model.

    Ctrl-C or SIGTERM drains running requests; a second signal stops at once.

    Exit code 1: the engine failed, with --replay again, or the draft memory could not be saved.
    """
    with terminal(output) as term:
        alone = scaling.replicas is None  # replicas read a memory, which has to exist, and write none
        check_all(listening, access, limits, scaling, loading=loading, speed=speed, template=template, new_memory=alone)
        processes = _processes(listening, scaling, term)
        if processes > 1 and not _leads(loading, speed, processes, term):
            return
        settings, own = settings_of(listening, access, limits, loading, template), template.text()
        if scaling.replicas is not None:
            _check_replicas(listening)
        send_again = _replay(listening)
        from lade.server.settings import bound, url_of

        socket = bound(listening.host, listening.port)
        if settings.host not in _LOOPBACK and not settings.keys.all:
            term.say(f"warning: anyone who can reach {settings.host} can send requests: give --api-key-file", "yellow")
        announce = partial(_announce, settings, url_of(listening.host, socket), term, json=json)
        if scaling.replicas is not None:
            _run_replicas(settings, socket, scaling, loading, loader(loading, speed, own), partial(announce, None))
            return
        log = _log(listening, term)
        with nullcontext() if log is None else log.listening():
            term.show_status(f"listening on {url_of(listening.host, socket)}, to be ready when the model is loaded")
            term.show_status("importing torch and transformers")
            from lade.cli.serve.model import load
            from lade.server.listen import run
            from lade.server.service import Service

            loaded = partial(load, loading, speed, own, term, processes)
            service = Service(settings, loaded, announce, log)
            if send_again is not None:
                send_again(service, url_of(listening.host, socket), term.write)
            code = run(service, socket)
    if code:
        raise typer.Exit(code)


def _replay(listening: Listening) -> Callable[[Service, str, Callable[[str], None]], None] | None:
    """Return what begins to send the requests of a dump again; None without one."""
    if listening.replay is None:
        return None
    from lade.cli.serve.replay import replay
    from lade.server.crash_dump import read_dump

    return partial(replay, read_dump(listening.replay))


def _check_replicas(listening: Listening) -> None:
    """Raise `ConfigError` for options that replicas do not support."""
    if listening.log_format != "text":
        raise ConfigError("log-format", listening.log_format, "replicas log to Ray's files: leave it out")
    if listening.replay is not None:
        raise ConfigError("replay", str(listening.replay), "one engine decodes the requests: leave out --replicas")


def _run_replicas(
    settings: Settings,
    socket: socket.socket,
    scaling: Scaling,
    loading: options.Loading,
    load: Callable[[], ServedModel],
    announce: Callable[[], None],
) -> None:
    from lade.server.replicas import application, run

    scale = scaling.scale(loading)
    port = socket.getsockname()[1]
    socket.close()  # the port is free, and Ray's proxy binds it
    run(application(settings, load, scale), settings, port, scale, announce)


def _processes(listening: Listening, scaling: Scaling, term: Terminal) -> int:
    """Return the number of processes of a split model, after joining them; without torchrun, start it."""
    wanted = listening.tensor_parallel
    if scaling.replicas is not None:
        if wanted not in (None, 1):
            raise ConfigError("tensor-parallel", wanted, "a replica is one process: leave out --replicas, or this")
        return 1
    if listening.torchrun is None:
        if wanted not in (None, 1):
            run = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(wanted), "-m", "lade")
            os.execv(sys.executable, [sys.executable, "-m", *run, *sys.argv[1:]])
        return 1
    from lade.cli.loading.load import join_processes

    processes = join_processes(term)
    if wanted not in (None, processes):
        raise ConfigError("tensor-parallel", wanted, f"torchrun has started {processes} processes: leave it out")
    return processes


def _leads(loading: options.Loading, speed: options.Speed, processes: int, term: Terminal) -> bool:
    """Return True in the process that serves; in the others, False when they are done."""
    from lade.cli.loading.load import is_first_process, leading
    from lade.cli.serve.model import load_split

    if is_first_process():
        return True
    with leading(load_split(loading, speed, term, processes).model, processes):
        return False


def settings_of(
    listening: Listening, access: Access, limits: Limits, loading: options.Loading, template: ServedTemplate
) -> Settings:
    """Return the server's settings for these options."""
    from lade.server.settings import Settings

    settings = Settings(
        host=listening.host,
        names=listening.names(loading),
        metrics=listening.metrics,
        acceptance=listening.acceptance,
        page=listening.page,
        otel=listening.otel,
        crash_dump=listening.crash_dump,
        config=limits.config,
        strict=listening.strict,
        keys=access.keys(),
        read_keys=None if access.api_key_file is None else access.keys,
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
        request_timeout=limits.request_timeout,
        pass_timeout=limits.pass_timeout,
        shutdown_timeout=limits.shutdown_timeout,
        template_arguments=template.arguments,
    )
    settings.current()  # a file that is wrong ends the command before the model is loaded
    return settings


def _announce(settings: Settings, url: str, term: Terminal, model: ServedModel | None, *, json: bool) -> None:
    """Write the line on standard output that says where the server listens."""
    term.show_status("ready")
    term.end_status()  # what is logged from now on is no work that somebody waits for
    if json:
        term.write_json({"url": url, "pid": os.getpid(), "model": settings.name})
    else:
        page = " · page /" if settings.page else ""
        term.write(f"lade serve · {settings.name} · {url}{page} · API /v1\n")


def _log(listening: Listening, term: Terminal) -> AccessLog | None:
    """Return the access log on standard error; None with --quiet."""
    if term.quiet:
        return None
    from lade.server.access_log import AccessLog

    log = AccessLog(lambda line: term.say(line, "dim"), as_json=listening.log_format == "json", debug=term.debug)
    term.hide_status()
    term.on_status = log.say
    return log


_USAGE_ERROR: Any = typer.BadParameter.__base__
"""Typer's base class of usage errors, unknown options included."""
_SET_BY_RAY = {
    "host": "serve start --http-host",
    "port": "serve start --http-port",
    "log_format": "the logging_config of a deployment",
    "replay": "lade serve without replicas",
}


def application_of(arguments: Mapping[str, str]) -> Any:
    """Return the application that Ray Serve runs.

    Args:
        arguments: options of `lade serve` without dashes, such as `{"model": "gpt2", "page": "false"}`.

    Raises:
        ConfigError, InputError, MissingExtraError: an option is unknown or wrong.
    """
    for name in sorted(_SET_BY_RAY.keys() & arguments.keys()):
        raise InputError(f"{name} is set by Ray: use {_SET_BY_RAY[name]}")
    words = [_word(name, str(value)) for name, value in arguments.items()]
    shell = typer.Typer()
    shell.command()(_application)
    try:
        return typer.main.get_command(shell).main(words, prog_name="lade.replicas:app", standalone_mode=False)
    except _USAGE_ERROR as problem:
        raise InputError(problem.format_message()) from None


def _word(name: str, value: str) -> str:
    option = name.replace("_", "-")
    if value.lower() in ("true", "false"):
        return f"--{option}" if value.lower() == "true" else f"--no-{option}"
    return f"--{option}={value}"


@options.grouped
def _application(
    *,
    listening: Listening,
    access: Access,
    limits: Limits,
    scaling: Scaling,
    template: ServedTemplate,
    speed: options.Speed,
    loading: options.Loading,
) -> Any:
    check_all(listening, access, limits, scaling, loading=loading, speed=speed, template=template)
    settings = settings_of(listening, access, limits, loading, template)
    load = loader(loading, speed, template.text())
    from lade.server.replicas import application

    return application(settings, load, scaling.scale(loading))
