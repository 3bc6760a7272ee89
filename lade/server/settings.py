"""Settings of a server: limits, API keys, the listening socket."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lade.errors import InputError

logger = logging.getLogger(__name__)

ENVIRONMENT = "LADE_API_KEYS"
_NAMED = re.compile(r"([\w.-]{1,64}):(\S+)")


@dataclass(frozen=True)
class Key:
    """A key.

    Attributes:
        name: what logs call it; its number where the file has none.
        secret: what a client sends.
        named: whether the file or the environment gives the name.
    """

    name: str
    secret: str = field(repr=False)
    named: bool = True

    @property
    def owner(self) -> str:
        """Return who shares what requests leave behind: the name, or a digest of the secret where it has none.

        A number is no owner: once keys are read again, it may be the number of somebody else's key.
        """
        return f"name:{self.name}" if self.named else f"sha256:{hashlib.sha256(self.secret.encode()).hexdigest()}"


@dataclass(frozen=True)
class Keys:
    """Who may ask.

    Attributes:
        all: the keys; without any, everyone may.
    """

    all: tuple[Key, ...] = ()

    @classmethod
    def read(cls, path: Path | None, environment: str | None = None) -> Keys:
        """Those of a file and those of the environment; of a file that all users of the machine can read, a warning.

        Args:
            path: has one key a line, with a name or without: `alice:sk-...`. Empty lines and those that begin with #
                are none.
            environment: some more, with spaces between them.

        Raises:
            InputError: the file cannot be read, or one of them has no key, or something that is none.
        """
        found: list[Key] = []
        if path is not None:
            _gather(found, _lines(path), f"key file {str(path)!r}", "line", "write one a line")
        if environment is not None:
            _gather(found, environment.split(), ENVIRONMENT, "key", "give some with spaces between them, or unset it")
        return cls(tuple(found))

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret. All are compared, in a time that does not tell how far they agree."""
        found = None
        for key in self.all:
            if hmac.compare_digest(key.secret.encode(), secret.encode(errors="replace")):
                found = key
        return found


NO_KEYS = Keys()


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        open_to_all = path.stat().st_mode & stat.S_IROTH
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise InputError(f"key file {str(path)!r} cannot be read: {reason}; check path and permissions") from None
    if open_to_all:
        logger.warning("key file %r can be read by all users of this machine: run  chmod o-r FILE", str(path))
    return lines


def _gather(found: list[Key], lines: Sequence[str], source: str, unit: str, remedy: str) -> None:
    """Add the keys of a source to those that were found."""
    before = len(found)
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        secret = named[2] if named else line
        if re.search(r"\s", secret) or not secret.isascii():
            raise InputError(f"{source}, {unit} {number}: a key has no spaces and only ASCII in it")
        found.append(Key(named[1] if named else f"key-{len(found) + 1}", secret, named=named is not None))
    if len(found) == before:
        raise InputError(f"{source} has no keys: {remedy}")


MOST_CHOICES, MOST_PROMPTS, MOST_MESSAGES, MOST_TOOLS = 16, 64, 4096, 512
MOST_STOPS, LONGEST_STOP, MOST_BIASES, MOST_TOP_LOGPROBS = 16, 256, 1024, 20
MOST_OBJECTS, MOST_VALUES = 2**16, 2**20
"""Lists and objects, and values, of a body together, wherever they are."""
MOST_IMAGES, MOST_PIXELS = 64, 32 * 2**20
"""Of a request."""
MOST_PARTS, MOST_WORDS, MOST_MEMBERS, MOST_IDS = 4096, 16384, 1024, 2**20
"""Parts of a message, words of a choice, members of an object, token ids of a text."""
MOST_DETOKENIZED = 2**17
"""Token ids at a time: a tokenizer holds up all threads while it takes them."""
MOST_ECHOED = 2**18
"""Log-probabilities of prompts that a request may have told with `echo`."""
PROBES = frozenset(["/live", "/ready", "/health", "/v1/health", "/metrics"])
"""Paths that are asked every few seconds, by machines."""
LONGEST_SCHEMA = 32 * 2**10  # characters, of JSON, notes apart
LONGEST_TOOLS = 2 * LONGEST_SCHEMA
"""Of one request."""
SLOWEST_TOOLS = 1.0
"""Seconds of CPU time that compiling them may take, each by itself."""
MASK_SECONDS, MASK_TOKEN_SECONDS = 0.5, 1e-3
"""CPU time that following a grammar may take in all answers to a request, and for each token more: others wait."""


@dataclass(frozen=True)
class Settings:
    """What a server may take and give.

    Attributes:
        host: where it listens.
        names: that the model is served by; the first one is told to clients.
        keys: who may ask; none: anyone.
        read_keys: reads them again, from a file that may have changed; None where there is none.
        allowed_hosts: names in `Host` besides this machine's own; "*" for any.
        cors_origins: web pages that may read answers; "*" for any.
        max_rows, max_waiting, max_tokens: see `lade.Engine`.
        context: tokens of prompt and answer at most; None: what the model was made for.
        answer_tokens: of an answer, where a request names no limit.
        prefix_cache: bytes of texts that are kept for prompts that begin like them; None: a tenth of what the KV cache
            takes by default, or none where the model's states cannot be kept.
        share: who may profit from what whose request left behind: "key", "all" or "none".
        template_arguments: for the chat template, unless a request says otherwise.
        max_body: bytes; None: 4 MiB, or 16 MiB where the model takes images.
        queue_timeout: seconds that a request may wait for a row; None: as long as its client does.
        shutdown_timeout: seconds that running answers have after SIGTERM.
        ping_s: seconds of silence in a stream after which a comment is sent.
        metrics: whether `/metrics` is served.
        page: whether there is a chat page.
        strict: whether unknown fields are refused.
        replica: which of several servers of the model this is, a label of its metrics; "" where it is the only one.
    """

    host: str = "127.0.0.1"
    names: tuple[str, ...] = ("model",)
    keys: Keys = NO_KEYS
    read_keys: Callable[[], Keys] | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_rows: int = 16
    max_waiting: int = 64
    max_tokens: int | None = None
    context: int | None = None
    answer_tokens: int = 1024
    prefix_cache: int | None = None
    share: str = "key"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    max_body: int | None = None
    queue_timeout: float | None = None
    shutdown_timeout: float = 30.0
    ping_s: float = 15.0
    metrics: bool = True
    page: bool = True
    strict: bool = False
    replica: str = ""

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        return self.names[0]


_BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one.

    Raises:
        InputError: the address is taken, or none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from problem


def url_of(host: str, listening: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    port = listening.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"
