"""Price of one more token in a pass of an engine, from the passes that the engine makes anyway.

An engine's pass over n tokens, of all requests together, takes t(n) seconds; `drafting.step_cost` estimates it. A
drafted token is worth feeding if the tokens that it is expected to bring exceed those that the engine would emit
elsewhere in the time that it takes:

    price = t'(n) * (tokens emitted per second, all requests)

which is the same for every request, since all of them share the pass.
"""

from __future__ import annotations

import math

from lade.decoding.drafting.step_cost import StepCost
from lade.errors import ConfigError, InputError

NEWS, FIRST = 0.22, 2.0
"""The logits of a node save `NEWS / (FIRST + n - 1)` tokens later if it is node number n, accepted or not: they become
rows of the memory. The likeliest nodes come first, and their contexts come up again soonest. Where the rows of rejected
nodes were not learned, stories yielded 0.36 tokens a step less with some 15 of them (lab/log/tree-size.md)."""
FREE_TOKENS = 256.0
"""Before anything is known: tokens in a pass that take as long as its fixed part."""
PASSES = 50.0
"""Passes that size and rate of emission are averaged over."""


class TokenPrice:
    """The price of one more token, in expected tokens.

    Args:
        fixed: a price that is not measured; None to go by what is observed.

    Raises:
        ConfigError: `fixed` is neither None nor a finite number >= 0.
    """

    def __init__(self, fixed: float | None = None) -> None:
        if fixed is not None and not (isinstance(fixed, int | float) and math.isfinite(fixed) and fixed >= 0.0):
            raise ConfigError("price", fixed, "give the tokens that one more drafted token costs, >= 0, or None")
        self._fixed = fixed
        self._cost = StepCost.unmeasured(FREE_TOKENS)
        self._passes = self._fed = self._emitted = self._seconds = 0.0  # fading sums

    @property
    def value(self) -> float:
        """The price, between 0.0 and 1.0 where it is observed."""
        if self._fixed is not None:
            return self._fixed
        if not self._passes:
            return 1.0 / FREE_TOKENS
        usual = self._fed / self._passes
        few, many = max(1, round(0.5 * usual)), max(2, round(1.5 * usual))
        slope = (self._cost.seconds(many) - self._cost.seconds(few)) / (many - few)
        return min(slope * self._emitted / self._seconds, 1.0)

    def observe(self, fed: int, emitted: int, seconds: float) -> None:
        """Learn from a pass.

        Args:
            fed: tokens that the engine fed, of all requests.
            emitted: tokens that all requests together got.
            seconds: time from this pass to the next, drafting included.

        Raises:
            InputError: one of them is out of range.
        """
        for name, number, least in (("fed", fed, 1), ("emitted", emitted, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise InputError(f"{name}={number!r} is not valid: give the tokens of a whole pass, at least {least}")
        if not math.isfinite(seconds) or seconds <= 0.0:
            raise InputError(f"seconds={seconds!r} is not valid: give the time of a whole pass, above 0")
        self._cost.observe(fed, seconds)
        kept, usual_s = 1.0 - 1.0 / PASSES, self._cost.seconds(fed)
        self._passes = kept * self._passes + 1.0
        self._fed = kept * self._fed + fed
        self._emitted = kept * self._emitted + emitted
        self._seconds = kept * self._seconds + usual_s
