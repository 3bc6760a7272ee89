"""What a controller has learned of a model that outlasts a text: the next one begins with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lade.decoding.drafting.copy_drafting import Agreement
from lade.decoding.drafting.returns import Returns

_PASSES = 128  # that a mean is over
_SUPPOSED = 4.0  # passes that are supposed to have taken what was expected
_SUPPOSED_SPREAD = 0.1  # of their ratios: their standard deviation
_MOST = 6.0  # a pass that took more than so many times what was expected says no more
_CERTAINTY = 3.0  # standard errors
_TOKENS = 16.0  # that what guesses yield is compared over
_LEAST_TRUST = 0.1


@dataclass
class Toll:
    """Seconds that passes took over those expected of them: a running mean, and how far it may be off.

    The step cost tells what a pass usually takes, whatever happens to a few of them. Time is paid for those too.
    """

    passes: float = _SUPPOSED
    mean: float = 1.0
    variance: float = _SUPPOSED_SPREAD**2

    def add(self, ratio: float) -> None:
        """Of one pass."""
        ratio = min(ratio, _MOST)
        self.passes = min(self.passes + 1.0, _PASSES)
        surprise = ratio - self.mean
        self.mean += surprise / self.passes
        self.variance += (surprise * (ratio - self.mean) - self.variance) / self.passes

    @property
    def relative_error(self) -> float:
        """Standard error of the mean, squared, as a share of it."""
        return self.variance / (self.passes * self.mean**2)


@dataclass
class Habits:
    """Of one model, and one kind of text.

    Generations on several threads may share them: a lost step is the worst.

    Attributes:
        usual: tokens that steps were worth feeding lately.
        gain: tokens that a step yields beyond the first.
        node_s: seconds of the library's own time in steps that look for guesses, per node.
        plain_own_s: seconds of it in steps that do not.
        idle: steps in a row in which nothing was worth feeding.
        since_guesses: steps since guesses were fed, in all texts: those of short ones must add up, or what was measured
            wrongly would stay unnoticed for good.
        promised: tokens that guesses were expected to bring in steps of late.
        brought: what they brought.
        guessing: time of passes over guesses.
        plain: time of passes over one token.
        returns: what looks for guesses have brought batches.
        copies: how likely a text goes on as it did where its last tokens stood before.
    """

    usual: float = 2.0
    gain: float = 0.3
    node_s: float = 0.0
    plain_own_s: float = 0.0
    idle: int = 0
    since_guesses: int = 0
    promised: float = _TOKENS / 4
    brought: float = _TOKENS / 4
    guessing: Toll = field(default_factory=Toll)
    plain: Toll = field(default_factory=Toll)
    returns: Returns = field(default_factory=Returns)
    copies: Agreement = field(default_factory=Agreement, compare=False)

    @property
    def toll(self) -> float:
        """How much more a pass over guesses takes than its size says, next to a plain one; 1.0 unless it is certain."""
        ratio = self.guessing.mean / self.plain.mean
        doubt = math.sqrt(self.guessing.relative_error + self.plain.relative_error)
        return ratio if abs(math.log(ratio)) > _CERTAINTY * doubt else 1.0

    @property
    def trust(self) -> float:
        """What guesses bring of what their scores promise, 1.0 at most."""
        return max(_LEAST_TRUST, min(1.0, self.brought / self.promised))

    def learn_yield(self, promised: float, brought: float) -> None:
        """Guesses of one step that were fed: what was expected of them, and what came of it."""
        self.promised += promised
        self.brought += brought
        if self.promised > _TOKENS:
            fading = _TOKENS / self.promised
            self.promised *= fading
            self.brought *= fading
