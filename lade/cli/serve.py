"""`lade serve`, with options that are checked before a model is loaded, and `--replay` of a crash dump's requests."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import typer

import lade
from lade import ConfigError, MissingExtraError, UnsupportedModelError
from lade.cli.options import AT_LEAST_ONE, Checked, Takes, options_in
from lade.cli.options import decoding as options
from lade.cli.prompts import read_utf8
from lade.cli.terminal import Terminal, terminal

if TYPE_CHECKING:
    from lade.cli.loading import LoadedModel
    from lade.server.access_log import AccessLog
    from lade.server.failures import DumpedRequest
    from lade.server.keys import Keys
    from lade.server.request_context import RequestContext
    from lade.server.served_model import ServedModel
    from lade.server.service import Service
    from lade.server.settings import Settings


_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_BODY = 2**30

_server = options_in("Server")
_access = options_in("Access")
_limits = options_in("Limits")
_count = partial(_limits, takes=AT_LEAST_ONE)
_seconds = partial(_limits, takes=(lambda value: 0 <= value < 1e6, "give seconds >= 0"))
_DURATION: Takes = (lambda value: 0 < value < 1e6, "give seconds > 0")
_PORTS: Takes = (lambda value: 0 <= value < 2**16, "give a whole number from 0 to 65535")
_template = options_in("Chat template")


@dataclass(frozen=True)
class ServedTemplate:
    """Chat template options of the server."""

    chat_template: Path | None = _template(None, "FILE", "Chat template to use instead of the model's.")
    chat_template_kwargs: str | None = _template(
        None, "JSON", 'Template variables, such as {"enable_thinking": false}.'
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """Template variables; raises `ConfigError` if they are not a JSON object."""
        return options.Template(chat_template_kwargs=self.chat_template_kwargs).arguments

    def text(self) -> str | None:
        """Return the text of the template file; None without one."""
        return None if self.chat_template is None else read_utf8(self.chat_template, "chat template")


@dataclass(frozen=True)
class Listening(Checked):
    """Network options, and the names of the model."""

    host: str = _server("127.0.0.1", "ADDR", "Address to listen on; 0.0.0.0 for all.")
    port: int = _server(8000, "PORT", "Port to listen on; 0 for any free one.", takes=_PORTS)
    name: list[str] | None = _server(
        None, "NAME", "Model name in requests. Repeatable. Default: from --model.", "--name"
    )
    log_format: str = _server("text", "KIND", "Log format: text or json.", one_of=("text", "json"))
    metrics: bool = _server(True, "", "Serve /metrics to Prometheus.", "--metrics/--no-metrics")
    acceptance: str = _server(
        "none",
        "LEVEL",
        "Acceptance of drafts in answers, as in vLLM: none or summary.",
        "--per-request-spec-decode-metrics",
        one_of=("none", "summary"),
    )
    otel: bool = _server(False, "", "Send a span per request to an OpenTelemetry collector.", "--otel")
    page: bool = _server(True, "", "Serve the chat page at /.", "--page/--no-page")
    strict: bool = _server(False, "", "Reject requests with unknown fields.", "--strict")
    crash_dump: Path | None = _server(None, "DIR", "Write the last requests there, with their texts, on a crash.")
    replay: Path | None = _server(None, "FILE", "Send the requests of a crash dump again, and exit.")
    tensor_parallel: int | None = _server(
        None, "N", "Split the model over N processes, started by torchrun.", takes=AT_LEAST_ONE
    )
    torchrun: str | None = _server(None, "", "Set by torchrun.", envvar="TORCHELASTIC_RUN_ID", hidden=True)

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range; `MissingExtraError` if OpenTelemetry is not installed."""
        super().check()
        if self.otel and find_spec("opentelemetry.sdk") is None:  # FastAPI needs the API alone
            raise MissingExtraError("opentelemetry-sdk", "otel")
        folder = self.crash_dump
        if folder is not None and folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError("crash-dump", str(folder), "give a folder that this user can write to")
        for name in self.name or ():
            if not name.isprintable() or not 0 < len(name) <= 200:
                raise ConfigError("name", name[:60], "give 1 to 200 characters that can be printed")


def served_names(names: list[str] | None, loading: options.Loading) -> tuple[str, ...]:
    """Return the names that requests may use: those given, or the last part of the model's name, never a path."""
    return tuple(names or [loading.name.rstrip("/").rpartition("/")[2]])


@dataclass(frozen=True)
class Access(Checked):
    """Authentication and access options."""

    api_key_file: Path | None = _access(None, "FILE", "API keys, one per line, or name:key. Default: none required.")
    api_keys: str | None = _access(
        None,
        "KEYS",
        "API keys, separated by spaces. The variable keeps them out of process lists.",
        envvar="LADE_API_KEYS",
    )
    allowed_host: list[str] | None = _access(None, "NAME", "Host name accepted in requests; * for any. Repeatable.")
    cors_origin: list[str] | None = _access(
        None, "URL", "Origin of web pages that may send requests, or *. Repeatable."
    )

    share: str = _access(
        "key",
        "WHO",
        "Who shares draft memory and prefix cache: key (requests of one key), all or none.",
        one_of=("key", "all", "none"),
    )

    def keys(self) -> Keys:
        """Return the API keys; raises `InputError` if the file cannot be read or has none."""
        from lade.server.keys import Keys

        return Keys.read(self.api_key_file, self.api_keys)

    def check(self) -> None:
        """Raise `ConfigError` for an invalid origin or scope."""
        super().check()
        for origin in self.cors_origin or ():
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError("cors-origin", origin, "give scheme and host, such as https://example.org, or *")


@dataclass(frozen=True)
class EngineLimits(Checked):
    """Limits of the engine, of `lade batch` too."""

    max_rows: int = _count(16, "N", "Maximum number of requests decoded together.")
    max_tokens: int | None = _count(None, "N", "KV cache slots: rows times the longest text. Default: as many as fit.")
    answer_tokens: int = _count(1024, "N", "Maximum tokens of an answer, if the request sets no limit.")


@dataclass(frozen=True)
class Limits(EngineLimits):
    """Limits of the server."""

    max_waiting: int = _count(64, "N", "Maximum number of queued requests; further ones get status 503.")
    context: int | None = _count(None, "N", "Maximum tokens of prompt and answer together. Default: the model's.")
    prefix_cache: str | None = _limits(
        None, "SIZE", "Size of the prefix cache; 0: none. Default: a tenth of the KV cache."
    )
    max_body: str | None = _limits(
        None, "SIZE", "Maximum size of a request body. Default: 4MiB, or 16MiB for models that take images."
    )
    queue_timeout: float | None = _seconds(None, "S", "Seconds a request may wait in the queue. Default: no limit.")
    request_timeout: float | None = _limits(
        None, "S", "Seconds a request may take in all. Default: no limit.", takes=_DURATION
    )
    pass_timeout: float = _seconds(120.0, "S", "Seconds after which a pass counts as hung: /live is 503. 0: never.")
    shutdown_timeout: float = _seconds(30.0, "S", "Seconds that running requests may take after SIGTERM.")
    config: Path | None = _limits(None, "FILE", "TOML file of limits, such as queue-timeout = 5; SIGHUP rereads it.")

    def check(self) -> None:
        """Raise `ConfigError` for a limit out of range."""
        super().check()
        size_in_bytes("prefix-cache", self.prefix_cache)
        body_bytes = size_in_bytes("max-body", self.max_body)
        if body_bytes is not None and not 1 <= body_bytes <= _MAX_BODY:
            raise ConfigError("max-body", self.max_body, "give 1 to 1GiB")


def size_in_bytes(name: str, text: str | None) -> int | None:
    """Return a size such as `4MiB` in bytes, where `k`, `m`, `g` are powers of 1024; or raise `ConfigError`."""
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(name, text[:40], "give bytes, or a size such as 4MiB or 2GiB")
    return int(float(found[1]) * 1024 ** _UNITS[found[2].lower()])


_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def check_all(
    *groups: Checked, loading: options.Loading, speed: options.Speed, template: ServedTemplate, new_memory: bool = False
) -> None:
    """Check the `serve` extra and all options before the model is loaded, `groups` first.

    With `new_memory` the file of `--memory` need not exist, since it is written.
    """
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise MissingExtraError(name.replace("_", "-"), "serve")
    for group in (*groups, loading):
        group.check()
    speed.lookahead(new_memory=new_memory)
    if new_memory and speed.memory is not None:
        from lade.memory import check

        check(speed.memory)
    loading.check_layout(speed.pack, invariant=speed.invariant)
    assert isinstance(template.arguments, dict)  # else it raises `ConfigError`


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
        url = url_of(listening.host, socket)
        if settings.host not in _LOOPBACK and not settings.keys.all:
            term.say(f"warning: anyone who can reach {settings.host} can send requests: give --api-key-file", "yellow")
        announce = partial(_announce, settings, url, term, json=json)
        log = _log(listening, term)
        with nullcontext() if log is None else log.listening():
            term.show_status(f"listening on {url}, to be ready when the model is loaded")
            term.show_status("importing torch and transformers")
            from lade.server.listen import run
            from lade.server.service import Service

            service = Service(settings, partial(load_served, loading, speed, own, term, processes), announce, log)
            if dumped is not None:
                replay(dumped, service, url, term.write)
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
    from lade.cli.loading import join_processes

    processes = join_processes(term)
    if wanted not in (None, processes):
        raise ConfigError("tensor-parallel", wanted, f"torchrun has started {processes} processes: leave it out")
    return processes


def _leads(loading: options.Loading, speed: options.Speed, processes: int, term: Terminal) -> bool:
    """Return True in the process that serves; in the others, False when they are done."""
    from lade.machine import is_first_process, leading

    if is_first_process():
        return True
    with leading(_loaded(loading, speed, term, processes).model, processes):
        return False


def _loaded(loading: options.Loading, speed: options.Speed, term: Terminal, processes: int) -> LoadedModel:
    """Load the model as each of its processes does."""
    from lade.cli.loading import load

    return load(loading, term=term, pack=speed.pack, images=None, invariant=speed.invariant, processes=processes)


def load_served(
    loading: options.Loading, speed: options.Speed, chat_template: str | None, term: Terminal, processes: int = 1
) -> ServedModel:
    """Load the model, in a thread of a server that listens already, in the first of the processes that share it.

    The file of a draft memory need not exist. A `chat_template` takes the place of the model's own.

    Raises:
        ConfigError, InputError, UnsupportedModelError: an option is wrong, or the model cannot be loaded or served.
    """
    from lade.cli.encoder import encode
    from lade.cli.loading import SAMPLING_FIELDS, with_memory
    from lade.machine import leading
    from lade.server.served_model import ServedModel

    loaded = _loaded(loading, speed, term, processes)
    leads = ExitStack()  # until the server has ended
    leads.enter_context(leading(loaded.model, processes))
    support = lade.supports(loaded.model)
    if not support:
        raise UnsupportedModelError(str(support), "lade generate decodes it plainly, a prompt at a time")
    if chat_template is not None:
        loaded.tokenizer.chat_template = chat_template
    takes_images = getattr(loaded.model.config, "vision_config", None) is not None
    lookahead = with_memory(loaded, speed.lookahead(new_memory=True), speed.memory)
    memory, save = lookahead.memory if isinstance(lookahead, lade.LookaheadConfig) else None, None
    if isinstance(memory, lade.Memory) and speed.memory is not None:
        save = partial(memory.save, speed.memory, loaded.tokenizer)
    return ServedModel(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        sampling={name: value for name, value in loaded.checkpoint_defaults.items() if name in SAMPLING_FIELDS},
        context=loaded.context,
        lookahead=lookahead,
        encode_images=partial(encode, loaded) if takes_images else None,
        save=save,
        close=leads.close,
    )


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
            "prefix_cache": size_in_bytes("prefix-cache", limits.prefix_cache),
            "max_body": size_in_bytes("max-body", limits.max_body),
            "template_arguments": template.arguments,
        }
    )
    settings.current()  # a file that is wrong ends the command before the model is loaded
    return settings


def _announce(settings: Settings, url: str, term: Terminal, model: ServedModel | None, *, json: bool) -> None:
    """Write the line on standard output that says where the server listens."""
    term.show_status("ready")
    term.status.close()  # what is logged from now on is no work that somebody waits for
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
    term.status.hide()
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
