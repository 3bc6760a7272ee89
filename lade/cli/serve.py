"""`lade serve`, and `--replay`: the requests of a crash dump, sent to the server again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import fields
from functools import partial
from json import dumps
from time import sleep
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import typer

from lade.cli.options import decoding as options
from lade.cli.serve_options import Access, Limits, Listening, ServedTemplate, check_all, served_names
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.server.access_log import AccessLog
    from lade.server.failures import DumpedRequest
    from lade.server.request_context import RequestContext
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
        check_all(listening, access, limits, loading=loading, speed=speed, template=template, new_memory=True)
        processes = _processes(listening, term)
        if processes > 1 and not _leads(loading, speed, processes, term):
            return
        settings, own = settings_of(listening, access, limits, loading, template), template.text()
        dumped = _dumped(listening)
        from lade.server.settings import bound, url_of

        socket = bound(listening.host, listening.port)
        if settings.host not in _LOOPBACK and not settings.keys.all:
            term.say(f"warning: anyone who can reach {settings.host} can send requests: give --api-key-file", "yellow")
        announce = partial(_announce, settings, url_of(listening.host, socket), term, json=json)
        log = _log(listening, term)
        with nullcontext() if log is None else log.listening():
            term.show_status(f"listening on {url_of(listening.host, socket)}, to be ready when the model is loaded")
            term.show_status("importing torch and transformers")
            from lade.cli.serve_model import load
            from lade.server.listen import run
            from lade.server.service import Service

            loaded = partial(load, loading, speed, own, term, processes)
            service = Service(settings, loaded, announce, log)
            if dumped is not None:
                replay(dumped, service, url_of(listening.host, socket), term.write)
            code = run(service, socket)
    if code:
        raise typer.Exit(code)


def _processes(listening: Listening, term: Terminal) -> int:
    """Return the number of processes of a split model, after joining them; without torchrun, start it."""
    wanted = listening.tensor_parallel
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
    from lade.cli.serve_model import load_split

    if is_first_process():
        return True
    with leading(load_split(loading, speed, term, processes).model, processes):
        return False


def settings_of(
    listening: Listening, access: Access, limits: Limits, loading: options.Loading, template: ServedTemplate
) -> Settings:
    """Return the server's settings for these options."""
    from lade.server.settings import Settings

    given = {**vars(listening), **vars(access), **vars(limits)}  # many have the name of the setting
    settings = Settings(
        **{
            **{each.name: given[each.name] for each in fields(Settings) if each.name in given},
            "names": served_names(listening.name, loading),
            "keys": access.keys(),
            "read_keys": None if access.api_key_file is None else access.keys,
            "allowed_hosts": tuple(access.allowed_host or ()),
            "cors_origins": tuple(access.cors_origin or ()),
            "prefix_cache": limits.prefix_bytes,
            "max_body": limits.body_bytes,
            "template_arguments": template.arguments,
        }
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


POLL_S = 0.05


def _dumped(listening: Listening) -> list[DumpedRequest] | None:
    """Return the requests of the dump to send again; None without one."""
    if listening.replay is None:
        return None
    from lade.server.failures import read_dump

    return read_dump(listening.replay)


def replay(requests: Sequence[DumpedRequest], service: Service, url: str, write: Callable[[str], None]) -> None:
    """Begin to send the requests of a dump to a server in this process, which ends with them, or when it fails.

    Those that had ended are sent one by one, and those that had not, together: these met in the engine. One whose body
    was too long for the dump cannot be sent.
    """
    from lade.server.access_log import facts_of

    for each in requests:
        if each.body is None:
            write(f"{each.id} {each.path} is left out: its body was too long for the dump\n")
    requests = [each for each in requests if each.body is not None]
    ids = {each.id for each in requests}

    def ended(context: RequestContext, route: str) -> None:
        if context.id in ids:
            facts = {"answer": 0, **facts_of(context)}
            write("{id} {path} status {status} {ms} ms {answer} tokens\n".format(**facts))

    service.observers.append(ended)
    threading.Thread(target=_send_all, args=[requests, service, url], daemon=True).start()


def _send_all(requests: Sequence[DumpedRequest], service: Service, url: str) -> None:
    while service.phase == "loading" and service.problem is None:
        sleep(POLL_S)
    keys = {key.name: key.secret for key in service.keys.all}
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        sent = list[Future[None]]()
        for each in [*requests, None]:
            if each is not None:
                sent.append(pool.submit(_send, each, url, keys.get(each.key, "")))
            awaited = sent if each is None else sent[-1:] if each.end else []
            while not all(one.done() for one in awaited):
                sleep(POLL_S)
                if service.health["status"] == "stuck":
                    sys.stdout.flush()
                    os._exit(1)  # nothing else ends the engine's thread
    if service.phase == "ready":
        signal.raise_signal(signal.SIGTERM)


def _send(each: DumpedRequest, url: str, key: str) -> None:
    headers = {"content-type": "application/json", "x-request-id": each.id, "x-api-key": key}
    request = Request(url + each.path, dumps(each.body).encode(), headers)
    with suppress(OSError), urlopen(request) as answer:  # raises statuses of errors, which `ended` writes
        answer.read()
