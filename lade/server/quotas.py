"""Refusals by what came before: quotas of API keys, and requests that have failed their passes."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from lade.server.errors import RATE_LIMIT, ApiError, invalid, kills_pass
from lade.server.settings import KeyLimits

_MINUTE_S = 60.0


def _exceeded(what: str, wait_s: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, RATE_LIMIT, f"{what}: retry later", code="rate_limit_exceeded", headers=headers)


@dataclass
class _Bucket:
    """The rest of an allowance per minute, which comes back evenly.

    Attributes:
        per_minute: the allowance.
        level: what was left at `time_s`; below 0 if more was used than there was.
        time_s: time of the last refill in seconds.
    """

    per_minute: int
    level: float
    time_s: float

    def refill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.time_s) * self.per_minute / _MINUTE_S)
        self.time_s = now


class Quotas:
    """Counts what the keys use. Not thread-safe: it belongs to the event loop.

    Tokens are counted when an answer has ended, prompts and cached tokens included: a key may use more than its limit
    once, and waits until that has come back.

    Args:
        clock: function that returns the time in seconds since any moment.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def take(self, owner: str, limits: KeyLimits, choices: int, running: int) -> None:
        """Count a request.

        Args:
            owner: tenant of the key, see `Key.owner`.
            limits: limits of the key, from the file that it was read from.
            choices: number of choices that the request asks for, those of all its prompts together.
            running: number of choices of this owner that are queued or decoded at the moment.

        Raises:
            ApiError: a limit is exceeded; status 429 unless the request alone exceeds it.
        """
        now, most = self._clock(), limits.rows
        if most is not None and choices > most:
            raise invalid(
                None, f"{choices} choices, and this key may have {most}: ask for fewer", "too_large_for_server"
            )
        if most is not None and running + choices > most:
            raise _exceeded(f"this key may have {most} choices at a time", 1)
        if (allowed := limits.tokens_per_minute) is not None:
            tokens = self._bucket(self._tokens, owner, allowed, now)
            if tokens.level <= 0:
                raise _exceeded(
                    f"this key may use {allowed} tokens per minute", _MINUTE_S * (1 - tokens.level) / allowed
                )
        if (allowed := limits.requests_per_minute) is not None:
            requests = self._bucket(self._requests, owner, allowed, now)
            if requests.level < 1:
                wait_s = _MINUTE_S * (1 - requests.level) / allowed
                raise _exceeded(f"this key may send {allowed} requests per minute", wait_s)
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


class FailedRequests:
    """Remembers requests whose passes failed, so that clients' retries do not make all others' texts be fed again.

    Attributes:
        TRIES: failures after which a request is refused.
        SECONDS: time for which failures are remembered: lack of memory may pass.
        MOST: number of requests that are remembered; the oldest are forgotten first.
        known: time of the last failure and number of failures by digest. Digesting a large body takes milliseconds, so
            nothing is checked while there are none.
    """

    TRIES, SECONDS, MOST = 2, 600.0, 256

    def __init__(self) -> None:
        self.known: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    def check(self, owner: str, body: object) -> None:
        """Raise `ApiError` for a request that has failed too often."""
        last, failures = self.known.get(_digest_of(owner, body), (0.0, 0))
        if failures >= self.TRIES and perf_counter() - last < self.SECONDS:
            raise kills_pass()

    def add(self, owner: str, body: object) -> None:
        """Count a failure of a request; of one key, so that no other learns of it."""
        name, now = _digest_of(owner, body), perf_counter()
        last, failures = self.known.pop(name, (now, 0))
        self.known[name] = now, 1 + (failures if now - last < self.SECONDS else 0)
        while len(self.known) > self.MOST:
            self.known.popitem(last=False)


def _digest_of(owner: str, body: object) -> bytes:
    """Return a digest of a validated body, which is its messages or ids and all of its parameters."""
    return hashlib.sha256(f"{owner}\0{body!r}".encode(errors="replace")).digest()
