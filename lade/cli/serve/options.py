"""Options of `lade serve`, checked before a model is loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from lade.cli.options.decoding import Speed
from lade.cli.options.grouping import in_panel
from lade.cli.options.model import Loading, Template
from lade.cli.prompts import read_utf8
from lade.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from lade.cli.options.decoding import Speed
    from lade.server.settings import Keys


SHARES = ("key", "all", "none")
LOG_FORMATS = ("text", "json")
ACCEPTANCE = ("none", "summary", "detailed")
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_BODY = 2**30

_server = in_panel("Server")
_access = in_panel("Access")
_limits = in_panel("Limits")
_template = in_panel("Chat template")


@dataclass(frozen=True)
class ServedTemplate:
    """Chat template options of the server."""

    chat_template: Annotated[
        Path | None, _template(metavar="FILE", help="Chat template to use instead of the model's.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, _template(metavar="JSON", help='Template variables, such as {"enable_thinking": false}.')
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` for invalid template variables."""
        assert isinstance(self.arguments, dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Template variables; raises `ConfigError` if they are not a JSON object."""
        return Template(chat_template_kwargs=self.chat_template_kwargs).arguments

    def text(self) -> str | None:
        """Return the text of the template file; None without one."""
        return None if self.chat_template is None else read_utf8(self.chat_template, "chat template")


@dataclass(frozen=True)
class Listening:
    """Network options, and the names of the model."""

    host: Annotated[str, _server(metavar="ADDR", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _server(metavar="PORT", help="Port to listen on; 0 for any free one.")] = 8000
    name: Annotated[
        list[str] | None,
        _server("--name", metavar="NAME", help="Model name in requests. Repeatable. Default: from --model."),
    ] = None
    log_format: Annotated[
        str, _server(metavar="KIND", autocompletion=lambda: list(LOG_FORMATS), help="Log format: text or json.")
    ] = "text"
    metrics: Annotated[bool, _server("--metrics/--no-metrics", help="Serve /metrics to Prometheus.")] = True
    acceptance: Annotated[
        str,
        _server(
            "--per-request-spec-decode-metrics",
            metavar="LEVEL",
            autocompletion=lambda: list(ACCEPTANCE),
            help="Acceptance of drafts in answers, as in vLLM: none, summary or detailed.",
        ),
    ] = "none"
    otel: Annotated[bool, _server("--otel", help="Send a span per request to an OpenTelemetry collector.")] = False
    page: Annotated[bool, _server("--page/--no-page", help="Serve the chat page at /.")] = True
    strict: Annotated[bool, _server("--strict", help="Reject requests with unknown fields.")] = False
    crash_dump: Annotated[
        Path | None, _server(metavar="DIR", help="Write the last requests there, with their texts, on a crash.")
    ] = None
    replay: Annotated[
        Path | None, _server(metavar="FILE", help="Send the requests of a crash dump again, and exit.")
    ] = None
    tensor_parallel: Annotated[
        int | None, _server(metavar="N", help="Split the model over N processes, started by torchrun.")
    ] = None
    torchrun: Annotated[str | None, _server(envvar="TORCHELASTIC_RUN_ID", hidden=True, help="Set by torchrun.")] = None

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range; `MissingExtraError` if OpenTelemetry is not installed."""
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise ConfigError("tensor-parallel", self.tensor_parallel, "give a whole number >= 1")
        if not 0 <= self.port < 2**16:
            raise ConfigError("port", self.port, "give a whole number from 0 to 65535")
        if self.otel and find_spec("opentelemetry.sdk") is None:  # FastAPI needs the API alone
            raise MissingExtraError("opentelemetry-sdk", "otel")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError("log-format", self.log_format, f"give one of {', '.join(LOG_FORMATS)}")
        if self.acceptance not in ACCEPTANCE:
            name = "per-request-spec-decode-metrics"
            raise ConfigError(name, self.acceptance, f"give one of {', '.join(ACCEPTANCE)}")
        folder = self.crash_dump
        if folder is not None and folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError("crash-dump", str(folder), "give a folder that this user can write to")
        for name in self.name or ():
            if not name.isprintable() or not 0 < len(name) <= 200:
                raise ConfigError("name", name[:60], "give 1 to 200 characters that can be printed")

    def names(self, loading: Loading) -> tuple[str, ...]:
        """Return the names by which requests may call the model."""
        return served_names(self.name, loading)


def served_names(names: list[str] | None, loading: Loading) -> tuple[str, ...]:
    """Return the names that requests may use: those given, or the last part of the model's name, never a path."""
    return tuple(names or [loading.name.rstrip("/").rpartition("/")[2]])


@dataclass(frozen=True)
class Access:
    """Authentication and access options."""

    api_key_file: Annotated[
        Path | None, _access(metavar="FILE", help="API keys, one per line, or name:key. Default: none required.")
    ] = None
    api_keys: Annotated[
        str | None,
        _access(
            metavar="KEYS",
            envvar="LADE_API_KEYS",
            help="API keys, separated by spaces. The variable keeps them out of process lists.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None, _access(metavar="NAME", help="Host name accepted in requests; * for any. Repeatable.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, _access(metavar="URL", help="Origin of web pages that may send requests, or *. Repeatable.")
    ] = None

    share: Annotated[
        str,
        _access(
            metavar="WHO",
            autocompletion=lambda: list(SHARES),
            help="Who shares draft memory and prefix cache: key (requests of one key), all or none.",
        ),
    ] = "key"

    def keys(self) -> Keys:
        """Return the API keys; raises `InputError` if the file cannot be read or has none."""
        from lade.server.settings import Keys

        return Keys.read(self.api_key_file, self.api_keys)

    def check(self) -> None:
        """Raise `ConfigError` for an invalid origin or scope."""
        if self.share not in SHARES:
            raise ConfigError("share", self.share, f"give one of {', '.join(SHARES)}")
        for origin in self.cors_origin or ():
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError("cors-origin", origin, "give scheme and host, such as https://example.org, or *")


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine, of `lade batch` too."""

    max_rows: Annotated[int, _limits(metavar="N", help="Maximum number of requests decoded together.")] = 16
    max_tokens: Annotated[
        int | None, _limits(metavar="N", help="KV cache slots: rows times the longest text. Default: as many as fit.")
    ] = None
    answer_tokens: Annotated[
        int, _limits(metavar="N", help="Maximum tokens of an answer, if the request sets no limit.")
    ] = 1024

    def check(self) -> None:
        """Raise `ConfigError` for a limit out of range."""
        self._check_counts("max_rows", "max_tokens", "answer_tokens")

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name.replace("_", "-"), value, "give a whole number >= 1")


@dataclass(frozen=True)
class Limits(EngineLimits):
    """Limits of the server."""

    max_waiting: Annotated[
        int, _limits(metavar="N", help="Maximum number of queued requests; further ones get status 503.")
    ] = 64
    context: Annotated[
        int | None, _limits(metavar="N", help="Maximum tokens of prompt and answer together. Default: the model's.")
    ] = None
    prefix_cache: Annotated[
        str | None, _limits(metavar="SIZE", help="Size of the prefix cache; 0: none. Default: a tenth of the KV cache.")
    ] = None
    max_body: Annotated[
        str | None,
        _limits(
            metavar="SIZE", help="Maximum size of a request body. Default: 4MiB, or 16MiB for models that take images."
        ),
    ] = None
    queue_timeout: Annotated[
        float | None, _limits(metavar="S", help="Seconds a request may wait in the queue. Default: no limit.")
    ] = None
    request_timeout: Annotated[
        float | None, _limits(metavar="S", help="Seconds a request may take in all. Default: no limit.")
    ] = None
    pass_timeout: Annotated[
        float, _limits(metavar="S", help="Seconds after which a pass counts as hung: /live is 503. 0: never.")
    ] = 120.0
    shutdown_timeout: Annotated[
        float, _limits(metavar="S", help="Seconds that running requests may take after SIGTERM.")
    ] = 30.0
    config: Annotated[
        Path | None, _limits(metavar="FILE", help="TOML file of limits, such as queue-timeout = 5; SIGHUP rereads it.")
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` for a limit out of range."""
        super().check()
        self._check_counts("max_waiting", "context")
        for name in ("queue_timeout", "pass_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e6:
                raise ConfigError(name.replace("_", "-"), value, "give seconds >= 0")
        if self.request_timeout is not None and not 0 < self.request_timeout < 1e6:
            raise ConfigError("request-timeout", self.request_timeout, "give seconds > 0")
        assert self.prefix_bytes is None or self.prefix_bytes >= 0  # raises `ConfigError` for an invalid size
        if self.body_bytes is not None and not 1 <= self.body_bytes <= _MAX_BODY:
            raise ConfigError("max-body", self.max_body, "give 1 to 1GiB")

    @property
    def prefix_bytes(self) -> int | None:
        """Size of the prefix cache in bytes; None for the default."""
        return None if self.prefix_cache is None else size_in_bytes("prefix-cache", self.prefix_cache)

    @property
    def body_bytes(self) -> int | None:
        """Largest request body in bytes; None for the default."""
        return None if self.max_body is None else size_in_bytes("max-body", self.max_body)


def size_in_bytes(name: str, text: str) -> int:
    """Return a size such as `4MiB` in bytes; `k`, `m`, `g` are powers of 1024.

    Raises:
        ConfigError: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(name, text[:40], "give bytes, or a size such as 4MiB or 2GiB")
    return int(float(found[1]) * 1024 ** _UNITS[found[2].lower()])


_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


class Group(Protocol):
    """A group of options with a check of its own."""

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range."""


def check_all(
    *groups: Group, loading: Loading, speed: Speed, template: ServedTemplate, new_memory: bool = False
) -> None:
    """Check all options before the model is loaded.

    Args:
        groups: further groups, checked first, in this order.
        loading: options of the model.
        speed: options of drafting and packing.
        template: options of the chat template.
        new_memory: accept a `--memory` file that does not exist, since it is written.

    Raises:
        MissingExtraError: a package of the `serve` extra is not installed.
        ConfigError, InputError: an option is wrong.
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
    template.check()
