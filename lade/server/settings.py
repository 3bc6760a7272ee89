"""Settings of a server: limits, and the socket it listens on."""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, convert
from msgspec.structs import asdict

from lade.errors import InputError
from lade.server.keys import NO_KEYS, Keys

MAX_CHOICES, MAX_PROMPTS, MAX_MESSAGES, MAX_TOOLS = 16, 64, 4096, 512
MAX_STOPS, LONGEST_STOP, MAX_BIASES, MAX_TOP_LOGPROBS = 16, 256, 1024, 20
MAX_OBJECTS, MAX_VALUES = 2**16, 2**20  # lists and objects, and values, of a whole body
MAX_IMAGES, MAX_PIXELS = 64, 32 * 2**20  # limits per request
MAX_PARTS, MAX_WORDS, MAX_MEMBERS, MAX_IDS = 4096, 16384, 1024, 2**20
"""Parts of a message, words of a choice, members of an object, token ids of a text."""
MAX_DETOKENIZED = 2**17
"""Token ids per request: tokenizers hold the interpreter lock while they convert them."""
MAX_ECHOED = 2**18  # log-probabilities of prompts per request with `echo`
LONGEST_TIMEOUT_S = 1e6  # seconds that a request may give as its timeout
PROBES = frozenset(["/live", "/ready", "/health", "/v1/health", "/metrics"])
"""Paths that monitoring polls every few seconds."""
LONGEST_SCHEMA = 32 * 2**10  # characters of JSON without annotations
LONGEST_TOOLS = 2 * LONGEST_SCHEMA  # total of all tools of one request
SLOWEST_TOOLS = 1.0  # CPU time in seconds for compiling the schemas of one request
MASK_SECONDS, MASK_TOKEN_SECONDS = 0.5, 1e-3
"""CPU time in seconds for grammar masks per request, and in addition per token; other requests wait meanwhile."""


AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, lt=1e6)]


class Changes(Struct, forbid_unknown_fields=True, rename="kebab"):
    """Settings that may change while a server runs, in a file that SIGHUP reads again; None for the options' own."""

    max_waiting: AtLeastOne | None = None
    answer_tokens: AtLeastOne | None = None
    queue_timeout: Seconds | None = None
    request_timeout: Annotated[float, Meta(gt=0, lt=1e6)] | None = None
    pass_timeout: Seconds | None = None
    shutdown_timeout: Seconds | None = None


@dataclass(frozen=True)
class Settings:
    """Configuration and limits of a server."""

    host: str = "127.0.0.1"
    names: tuple[str, ...] = ("model",)  # of the served model; the first one is reported to clients
    keys: Keys = NO_KEYS  # if empty, requests need none
    read_keys: Callable[[], Keys] | None = None  # reads the keys again; None without a file of keys
    config: Path | None = None  # TOML file of `Changes`
    allowed_hosts: tuple[str, ...] = ()  # accepted `Host` names besides this machine's own; "*" for any
    cors_origins: tuple[str, ...] = ()  # origins whose pages may read answers; "*" for any
    max_rows: int = 16
    max_waiting: int = 64
    max_tokens: int | None = None  # see `lade.Engine`, also for the two before
    context: int | None = None  # most tokens of prompt and answer; None for the model's own limit
    answer_tokens: int = 1024  # most tokens of an answer if the request sets no limit
    prefix_cache: int | None = None  # bytes, see `lade.Engine`
    share: str = "key"  # scope of cached prefixes and draft memories: "key", "all" or "none"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # defaults for the chat template
    max_body: int | None = None  # bytes of a request's body; None: 4 MiB, or 16 MiB if the model takes images
    queue_timeout: float | None = None  # most seconds in the queue; None for no limit
    request_timeout: float | None = None  # most seconds from arrival to the last token; None for no limit
    pass_timeout: float = 120.0  # seconds until a pass counts as hung, and the server as not alive; 0 for no limit
    shutdown_timeout: float = 30.0  # seconds that running answers have after SIGTERM
    ping_s: float = 15.0  # seconds of silence in a stream after which a ping is sent
    metrics: bool = True
    acceptance: str = "none"  # acceptance of drafts in answers: "none" or "summary"
    page: bool = True
    strict: bool = False  # unknown fields are refused
    replica: str = ""  # label of the metrics; "" for a single server
    save_s: float = 180.0  # seconds between saves of draft memories
    otel: bool = False  # OpenTelemetry spans are made
    crash_dump: Path | None = None  # folder for the last requests when the engine fails or hangs; None to keep none

    def current(self) -> Settings:
        """Return these settings with those that the file has at present; raises `InputError` if they are wrong."""
        if self.config is None:
            return self
        try:
            found = convert(tomllib.loads(self.config.read_text(encoding="utf-8")), Changes)
        except (OSError, ValueError) as problem:
            known = ", ".join(Changes.__struct_encode_fields__)
            raise InputError(f"config {str(self.config)!r}: {problem}: it may have {known}") from None
        return replace(self, **{name: value for name, value in asdict(found).items() if value is not None})

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return self.names[0]


_BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket, port 0 for a free one; raise `InputError` if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from problem


def url_of(host: str, listening: socket.socket) -> str:
    """Return the server's URL for a browser on this machine."""
    port = listening.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"
