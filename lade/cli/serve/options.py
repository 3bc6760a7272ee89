"""Options of `lade serve`, checked before a model is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from lade.cli.options.decoding import Speed
from lade.cli.options.grouping import in_panel
from lade.cli.options.model import Loading, Template
from lade.errors import ConfigError, InputError, MissingExtraError

if TYPE_CHECKING:
    from lade.cli.options.decoding import Speed
    from lade.server.replicas import Scale
    from lade.server.served_model import ServedModel
    from lade.server.settings import Keys


SHARES = ("key", "all", "none")
LOG_FORMATS = ("text", "json")
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST_BODY = 2**30

_server = in_panel("Server")
_access = in_panel("Access")
_limits = in_panel("Limits")
_template = in_panel("Chat template")


@dataclass(frozen=True)
class ServedTemplate:
    """How chats become prompts.

    Attributes:
        chat_template: file of a template to use instead of the model's; None for that.
        chat_template_kwargs: JSON, what it is given unless a request says otherwise.
    """

    chat_template: Annotated[
        Path | None, _template(metavar="FILE", help="Chat template to use instead of the model's.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, _template(metavar="JSON", help='For it: {"enable_thinking": false}, ...')
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` for arguments that are none."""
        assert isinstance(self.arguments, dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """For the template; raises `ConfigError` for what is none."""
        return Template(chat_template_kwargs=self.chat_template_kwargs).arguments

    def text(self) -> str | None:
        """Of the file, if there is one; raises `InputError` where it cannot be read."""
        path = self.chat_template
        if path is None:
            return None
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            why = getattr(problem, "strerror", None) or "it is not UTF-8"
            raise InputError(f"chat template {str(path)!r} cannot be read: {why}; check path and permissions") from None


@dataclass(frozen=True)
class Listening:
    """Where the server listens, and what it calls itself.

    Attributes:
        host, port: of the socket; port 0 is any free one.
        name: that the model is served by.
        log_format: of the lines on standard error.
        metrics: whether `/metrics` is served.
        page: whether there is a chat page.
        strict: whether unknown fields are refused.
        tensor_parallel: how many processes the model is split over; None: as many as torchrun has started.
        torchrun: the name of the run, where torchrun has started this process; it says so in the environment.
    """

    host: Annotated[str, _server(metavar="ADDR", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1"
    port: Annotated[int, _server(metavar="PORT", help="Port; 0 is any free one.")] = 8000
    name: Annotated[
        list[str] | None,
        _server("--name", metavar="NAME", help="What clients call the model; more than once for several names."),
    ] = None
    log_format: Annotated[
        str, _server(metavar="KIND", autocompletion=lambda: list(LOG_FORMATS), help="Of the log: text or json.")
    ] = "text"
    metrics: Annotated[bool, _server("--metrics/--no-metrics", metavar="", help="Serve /metrics to Prometheus.")] = True
    page: Annotated[bool, _server("--page/--no-page", metavar="", help="Serve a chat page at /.")] = True
    strict: Annotated[
        bool, _server("--strict", metavar="", help="Refuse requests with unknown fields, which else are ignored.")
    ] = False

    tensor_parallel: Annotated[
        int | None, _server(metavar="N", help="Split the model over N processes, which torchrun starts.")
    ] = None
    torchrun: Annotated[str | None, _server(envvar="TORCHELASTIC_RUN_ID", hidden=True, help="Set by torchrun.")] = None

    def check(self) -> None:
        """Raise `ConfigError` for what no server could do."""
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise ConfigError("tensor-parallel", self.tensor_parallel, "give a whole number >= 1")
        if not 0 <= self.port < 2**16:
            raise ConfigError("port", self.port, "give a whole number from 0 to 65535")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError("log-format", self.log_format, f"give one of {', '.join(LOG_FORMATS)}")
        for name in self.name or ():
            if not name.isprintable() or not 0 < len(name) <= 200:
                raise ConfigError("name", name[:60], "give 1 to 200 characters that can be printed")

    def names(self, loading: Loading) -> tuple[str, ...]:
        """What the model is served by: never a path."""
        return tuple(self.name or [loading.name.rstrip("/").rpartition("/")[2]])


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        api_key_file: keys, one a line; None: anyone, unless there are `api_keys`.
        api_keys: more of them, with spaces between them.
        allowed_host: names of this machine that are served besides its numbers.
        cors_origin: web pages that may ask.
        share: who may profit from what requests leave behind.
    """

    api_key_file: Annotated[
        Path | None, _access(metavar="FILE", help="Keys, one a line (or name:key). Default: none is needed.")
    ] = None
    api_keys: Annotated[
        str | None,
        _access(
            metavar="KEYS",
            envvar="LADE_API_KEYS",
            help="Keys, with spaces between them; in the environment no list of processes shows them.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None, _access(metavar="NAME", help="Name of this machine in requests; * for any.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, _access(metavar="URL", help="Web page that may ask, such as https://example.org; * for any.")
    ] = None

    share: Annotated[
        str,
        _access(
            metavar="WHO",
            autocompletion=lambda: list(SHARES),
            help="Requests that learn from each other: of one key (the default), all, or none.",
        ),
    ] = "key"

    def keys(self) -> Keys:
        """The keys; raises `InputError` where the file has none."""
        from lade.server.settings import Keys

        return Keys.read(self.api_key_file, self.api_keys)

    def check(self) -> None:
        """Raise `ConfigError` for an origin that no browser would send, or nobody to share with."""
        if self.share not in SHARES:
            raise ConfigError("share", self.share, f"give one of {', '.join(SHARES)}")
        for origin in self.cors_origin or ():
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError("cors-origin", origin, "give scheme and host, such as https://example.org, or *")


@dataclass(frozen=True)
class Limits:
    """What the server may take.

    Attributes:
        max_rows, max_waiting, max_tokens: see `lade.Engine`.
        context: tokens of prompt and answer.
        answer_tokens: of an answer, where a request names no limit.
        prefix_cache: for texts that are kept, as a size; None: what seems fit.
        max_body: of a request, as a size; None: 4 MiB, or 16 MiB where the model takes images.
        queue_timeout: seconds that a request may wait for a row.
        shutdown_timeout: seconds that answers have after SIGTERM.
    """

    max_rows: Annotated[int, _limits(metavar="N", help="Requests decoded at a time.")] = 16
    max_waiting: Annotated[int, _limits(metavar="N", help="Requests that may wait; more get 503.")] = 64
    max_tokens: Annotated[
        int | None, _limits(metavar="N", help="Slots of the KV cache: rows times the longest. Default: what fits.")
    ] = None
    context: Annotated[int | None, _limits(metavar="N", help="Tokens of prompt and answer. Default: the model's.")] = (
        None
    )
    answer_tokens: Annotated[int, _limits(metavar="N", help="Tokens of an answer, if a request names no limit.")] = 1024
    prefix_cache: Annotated[
        str | None, _limits(metavar="SIZE", help="For texts that prompts may begin like; 0: none. Default: what fits.")
    ] = None
    max_body: Annotated[
        str | None, _limits(metavar="SIZE", help="Of a request. Default: 4MiB, or 16MiB where the model takes images.")
    ] = None
    queue_timeout: Annotated[
        float | None, _limits(metavar="S", help="Seconds to wait for a row. Default: as long as the client does.")
    ] = None
    shutdown_timeout: Annotated[float, _limits(metavar="S", help="Seconds that answers have to end after SIGTERM.")] = (
        30.0
    )

    def check(self) -> None:
        """Raise `ConfigError` for a limit that is none."""
        for name in ("max_rows", "max_waiting", "max_tokens", "context", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name.replace("_", "-"), value, "give a whole number >= 1")
        for name in ("queue_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e6:
                raise ConfigError(name.replace("_", "-"), value, "give seconds >= 0")
        assert self.prefix_bytes is None or self.prefix_bytes >= 0  # raises for what is no size
        if self.body_bytes is not None and not 1 <= self.body_bytes <= _MOST_BODY:
            raise ConfigError("max-body", self.max_body, "give 1 to 1GiB")

    @property
    def prefix_bytes(self) -> int | None:
        """For texts that are kept."""
        return None if self.prefix_cache is None else size_in_bytes("prefix-cache", self.prefix_cache)

    @property
    def body_bytes(self) -> int | None:
        """Of a request."""
        return None if self.max_body is None else size_in_bytes("max-body", self.max_body)


def size_in_bytes(name: str, text: str) -> int:
    """Of a size such as `4MiB`; `k`, `m`, `g` are powers of 1024.

    Raises:
        ConfigError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(name, text[:40], "give bytes, or a size such as 4MiB or 2GiB")
    return int(float(found[1]) * 1024 ** _UNITS[found[2].lower()])


_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


class Group(Protocol):
    """Options that are checked together."""

    def check(self) -> None:
        """Raise `ConfigError` for what is wrong."""


def check_all(
    *groups: Group, loading: Loading, speed: Speed, template: ServedTemplate, new_memory: bool = False
) -> None:
    """Check what can be checked without a model.

    Args:
        groups: of options, in the order in which errors are told.
        loading: which model, and how.
        speed: how tokens are drafted; its memory has to be there.
        template: for chats.
        new_memory: whether the memory's file is written, and need not be there.

    Raises:
        MissingExtraError: what a server needs is not installed.
        ConfigError, InputError: an option is wrong.
    """
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise MissingExtraError(name.replace("_", "-"), "serve")
    for group in (*groups, loading):
        group.check()
    speed.lookahead(new_memory=new_memory)  # raises for what is wrong with it
    if new_memory and speed.memory is not None:
        from lade.memory import check

        check(speed.memory)
    loading.check_layout(speed.pack, invariant=speed.invariant)
    template.check()


_option = in_panel("Replicas")


@dataclass(frozen=True)
class Scaling:
    """How many servers of the model there are behind the port.

    Attributes:
        replicas: that there are, by Ray Serve; None: this process alone serves.
        max_replicas: that there may be when many requests come.
    """

    replicas: Annotated[
        int | None, _option(metavar="N", help="Servers of the model, each with an engine (Ray Serve).")
    ] = None
    max_replicas: Annotated[
        int | None, _option(metavar="N", help="So many when many requests come. Default: as --replicas.")
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` for numbers that are none; `MissingExtraError` where Ray Serve is not installed."""
        if self.replicas is None and self.max_replicas is not None:
            raise ConfigError("max-replicas", self.max_replicas, "give --replicas, too: how many there are at least")
        if self.replicas is None:
            return
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "give a whole number >= 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError("max-replicas", self.max_replicas, f"give a whole number >= {self.replicas}")
        if find_spec("ray") is None:
            raise MissingExtraError("ray", "scale")

    def scale(self, loading: Loading) -> Scale:
        """The same for `lade.server.replicas`: cores are shared out, a GPU is each replica's own."""
        import torch

        from lade.server.replicas import Scale

        replicas = self.replicas or 1
        most = self.max_replicas or replicas
        on_gpu = loading.device in ("auto", "cuda") and torch.cuda.is_available()
        return Scale(replicas, most, cpus=max(1, (os.cpu_count() or 1) // most), gpus=int(on_gpu))


def loader(loading: Loading, speed: Speed, chat_template: str | None) -> Callable[[], ServedModel]:
    """What a replica loads the model with; see `model.load`. All begin with one memory, and none writes it."""
    return partial(_load, loading, speed, chat_template)


def _load(loading: Loading, speed: Speed, chat_template: str | None) -> ServedModel:
    from lade.cli.options.grouping import Output
    from lade.cli.serve.model import load
    from lade.cli.terminal import Terminal

    served = load(loading, speed, chat_template, Terminal(Output(quiet=True)))
    return replace(served, save=None, close=_nothing)


def _nothing() -> None:
    """What a replica leaves behind."""
