"""What a server may take and give, all of it decided before it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lade.server.keys import NO_KEYS, Keys

MOST_CHOICES, MOST_PROMPTS, MOST_MESSAGES, MOST_TOOLS = 16, 64, 4096, 512
MOST_STOPS, LONGEST_STOP, MOST_BIASES, MOST_TOP_LOGPROBS = 16, 256, 1024, 20
MOST_OBJECTS, MOST_VALUES = 2**16, 2**20
"""Lists and objects, and values, of a body together, wherever they are."""
MOST_IMAGES, MOST_PIXELS = 64, 32 * 2**20
"""Of a request."""
MOST_PARTS, MOST_WORDS, MOST_MEMBERS, MOST_IDS = 4096, 16384, 1024, 2**20
"""Parts of a message, words of a choice, members of an object, token ids of a text."""
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
