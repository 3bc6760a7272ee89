"""What tenants may use and share: quotas of API keys, and draft memories of their own."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from lade.config import Lookahead, LookaheadConfig
from lade.memory import Memory
from lade.server.errors import RATE_LIMIT, ApiError, invalid
from lade.server.keys import KeyLimits

_MINUTE_S = 60.0


def _exceeded(what: str, wait_s: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, RATE_LIMIT, f"{what}: retry later", code="rate_limit_exceeded", headers=headers)


@dataclass
class _Bucket:
    """The rest of an allowance per minute, which comes back evenly."""

    per_minute: int
    level: float  # what was left at `time_s`; below 0 if more was used than there was
    time_s: float

    def refill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.time_s) * self.per_minute / _MINUTE_S)
        self.time_s = now

    @property
    def wait_s(self) -> float:
        """Seconds until the level is 1."""
        return _MINUTE_S * (1 - self.level) / self.per_minute


class Quotas:
    """Counts what the keys use. Not thread-safe: it belongs to the event loop.

    Tokens are counted when an answer has ended, prompts and cached tokens included: a key may use more than its limit
    once, and waits until that has come back.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def take(self, owner: str, limits: KeyLimits, choices: int, running: int) -> None:
        """Count a request for so many choices, all prompts together; `running` ones of its owner have not ended.

        Raises:
            ApiError: a limit is exceeded; status 429 unless the request alone exceeds it.
        """
        now, most = self._clock(), limits.rows
        if most is not None and choices > most:
            why = f"{choices} choices, and this key may have {most}: ask for fewer"
            raise invalid(None, why, "too_large_for_server")
        if most is not None and running + choices > most:
            raise _exceeded(f"this key may have {most} choices at a time", 1)
        if (allowed := limits.tokens_per_minute) is not None:
            tokens = self._bucket(self._tokens, owner, allowed, now)
            if tokens.level <= 0:
                raise _exceeded(f"this key may use {allowed} tokens per minute", tokens.wait_s)
        if (allowed := limits.requests_per_minute) is not None:
            requests = self._bucket(self._requests, owner, allowed, now)
            if requests.level < 1:
                raise _exceeded(f"this key may send {allowed} requests per minute", requests.wait_s)
            requests.level -= 1

    def use(self, owner: str, tokens: int) -> None:
        """Count the tokens of an answer that has ended."""
        if (bucket := self._tokens.get(owner)) is not None:
            bucket.refill(self._clock())
            bucket.level -= tokens

    @staticmethod
    def _bucket(buckets: dict[str, _Bucket], owner: str, allowed: int, now: float) -> _Bucket:
        bucket = buckets.setdefault(owner, _Bucket(allowed, allowed, now))
        bucket.per_minute = allowed  # the file of keys may have been read again
        bucket.refill(now)
        return bucket


MAX_SCOPES, _BYTES = 16, 64 * 2**20  # maximum number of memories, and size of each in bytes


class TenantMemories:
    """Per-tenant draft memories, LRU: sharing one speeds up similar texts, which timing could reveal.

    Args:
        lookahead: the server's default method. A memory of its own, which is one file, serves requests without a salt
            if `share` is "all", or "key" and there are no two keys.
        share: "key": shared per key and `cache_salt`; "all": shared by all; "none": not shared.
        several_keys: function that tells whether requests of several keys are served now.
    """

    def __init__(self, lookahead: Lookahead, share: str, several_keys: Callable[[], bool] = lambda: False) -> None:
        config = LookaheadConfig() if lookahead == "auto" else lookahead
        self._file = None if config is None else config.memory
        self._default = config if config is None else replace(config, memory=None)
        self._share, self._several_keys = share, several_keys
        self._kept: OrderedDict[str, Memory] = OrderedDict()
        self._lock = threading.Lock()

    def scope(self, key: str, salt: str | None) -> str | None:
        """Return the tenant scope of a request; None for none. A salt only narrows it."""
        if self._share == "none":
            return None
        return f"{'' if self._share == 'all' else key}\0{salt or ''}"

    def lookahead(self, requested: LookaheadConfig | str | None, scope: str | None) -> LookaheadConfig | None:
        """Return the requested method, the default for a text and plain decoding for None, with its scope's memory."""
        config = self._default if isinstance(requested, str) else requested
        if config is None or scope is None or not config.method.lacks_memory:
            return config
        of_all = self._file if self.serves_file and scope.endswith("\0") else None
        return replace(config, memory=self._of(scope) if of_all is None else of_all)

    @property
    def serves_file(self) -> bool:
        """True unless the memory of the server's default method would be shared by keys that share nothing."""
        return self._share == "all" or (self._share == "key" and not self._several_keys())

    def _of(self, scope: str) -> Memory:
        with self._lock:
            memory = self._kept.setdefault(scope, Memory(_BYTES))
            self._kept.move_to_end(scope)
            if len(self._kept) > MAX_SCOPES:
                del self._kept[self._evicted()]
        return memory

    def _evicted(self) -> str:
        """Return the memory to evict: of the key with most memories, the least recently used salted one.

        Clients choose salts freely; by age alone one client could evict all others' memories.
        """
        keys = {scope: scope.partition("\0")[0] for scope in self._kept}
        several = Counter(keys.values())
        most = max(several.values())
        of_key = [scope for scope in self._kept if several[keys[scope]] == most]
        return next((scope for scope in of_key if most > 1 and not scope.endswith("\0")), of_key[0])
