"""Price of one more token in a pass of an engine, from the passes that the engine makes anyway.

An engine's pass over n tokens, of all requests together, takes t(n) seconds. Near the n of the last passes t is taken
to be a straight line, fitted by least squares with exponential forgetting. A drafted token is worth feeding if the
tokens that it is expected to bring exceed those that the engine would emit elsewhere in the time that it takes:

    price = t'(n) * (tokens emitted per second, all requests)

which is the same for every request, since all of them share the pass.
"""

from __future__ import annotations

import math

from lade.errors import ConfigError, InputError

NEWS, FIRST = 0.22, 2.0
"""The logits of a node save `NEWS / (FIRST + n - 1)` tokens later if it is node number n, accepted or not: they become
rows of the memory. The likeliest nodes come first, and their contexts come up again soonest. Where the rows of rejected
nodes were not learned, stories yielded 0.36 tokens a step less with some 15 of them (lab/log/tree-size.md)."""
_KEPT = 0.98  # weight of a pass once the next one has been observed
_FREE_TOKENS = 256.0  # before it is known: tokens in a pass that take as long as its fixed part
_DOUBT = 256.0  # square tokens of spread, by which that assumption counts
_LONGEST = 3.0  # a pass that takes more than so many times as long as expected was delayed


class TokenPrice:
    """The price of one more token, in expected tokens: a fixed one, or None to go by what is observed."""

    def __init__(self, fixed: float | None = None) -> None:
        if fixed is not None and not (isinstance(fixed, int | float) and math.isfinite(fixed) and fixed >= 0.0):
            raise ConfigError("price", fixed, "give the tokens that one more drafted token costs, >= 0, or None")
        self._fixed = fixed
        self._passes = self._fed = self._emitted = self._seconds = self._squares = self._products = 0.0

    @property
    def value(self) -> float:
        """The price, between 0.0 and 1.0 where it is observed."""
        if self._fixed is not None:
            return self._fixed
        if not self._passes:
            return 1.0 / _FREE_TOKENS
        return min(self._slope() * self._emitted / self._seconds, 1.0)

    def observe(self, fed: int, emitted: int, seconds: float) -> None:
        """Learn from a pass; raises `InputError` for what is out of range."""
        for name, number, least in (("fed", fed, 1), ("emitted", emitted, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise InputError(f"{name}={number!r} is not valid: give the tokens of a whole pass, at least {least}")
        if not math.isfinite(seconds) or seconds <= 0.0:
            raise InputError(f"seconds={seconds!r} is not valid: give the time of a whole pass, above 0")
        if self._passes:
            mean = self._seconds / self._passes
            expected = mean + self._slope() * (fed - self._fed / self._passes)
            seconds = min(seconds, _LONGEST * max(expected, mean / _LONGEST))
        sums = self._passes, self._fed, self._emitted, self._seconds, self._squares, self._products
        news = 1.0, fed, emitted, seconds, fed * fed, fed * seconds
        kept = (_KEPT * total + new for total, new in zip(sums, news, strict=True))
        self._passes, self._fed, self._emitted, self._seconds, self._squares, self._products = kept

    def _slope(self) -> float:
        """Return the seconds that one more token takes."""
        fed, seconds = self._fed / self._passes, self._seconds / self._passes
        spread = max(self._squares - self._passes * fed * fed, 0.0)
        together = self._products - self._passes * fed * seconds
        assumed = seconds / (_FREE_TOKENS + fed)
        return max((together + _DOUBT * assumed) / (spread + _DOUBT), 0.0)
