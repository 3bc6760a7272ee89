"""How fast answers were, and how fast against those of another method.

Two clocks are read. *The call* is what a user waits for: prefill, all steps, and what lies between. *Decoding* is what
comes after the first token, and what a method of decoding can change.

Answers are compared one by one: a sample with the other method's sample of the same workload, prompt, turn, seed and
repeat, by tokens per second. Where both wrote the same tokens that is the ratio of their seconds; where rounding ended
one text sooner, it does not count as faster for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from lade.bench.results import Sample

Key = tuple[str, str, int, int, int]
"""Workload, prompt, turn, seed and repeat of a sample."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Of these values; None if there are none."""
        found = list(values)
        if not found:
            return None
        if len(found) == 1:
            return cls(found[0], found[0], found[0], 1)
        low, _, high = quantiles(found, method="inclusive")
        return cls(median(found), low, high, len(found))


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as another method, over the answers that both wrote.

    Attributes:
        each: of single answers.
        total: of all answers together, so that long ones weigh more.
    """

    each: Spread
    total: float


@dataclass(frozen=True)
class Clock:
    """Which of a sample's seconds bought which of its tokens."""

    seconds: Callable[[Sample], float]
    tokens: Callable[[Sample], int]

    def runs(self, sample: Sample) -> bool:
        """Whether there is something to divide."""
        return self.tokens(sample) > 0 and self.seconds(sample) > 0

    def rate(self, samples: Sequence[Sample]) -> float:
        """Tokens a second, of all of them together."""
        return sum(map(self.tokens, samples)) / sum(map(self.seconds, samples))


CALL = Clock(lambda sample: sample.seconds, lambda sample: sample.new_tokens)
DECODING = Clock(lambda sample: sample.decode_s, lambda sample: sample.new_tokens - 1)


def key_of(sample: Sample) -> Key:
    """What a sample shares with the samples of other methods that it is compared with."""
    return sample.workload, sample.prompt, sample.turn, sample.seed, sample.repeat


def speedup(samples: Iterable[Sample], others: Mapping[Key, Sample], clock: Clock) -> Speedup | None:
    """How many times as fast samples are as those of another method.

    Args:
        samples: of the method.
        others: of the other method, by key.
        clock: what is compared.

    Returns:
        None if no answer can be compared.
    """
    pairs = [(sample, others[key_of(sample)]) for sample in samples if key_of(sample) in others]
    pairs = [(own, other) for own, other in pairs if clock.runs(own) and clock.runs(other)]
    each = Spread.of(clock.rate([own]) / clock.rate([other]) for own, other in pairs)
    if each is None:
        return None
    return Speedup(each, clock.rate([own for own, _ in pairs]) / clock.rate([other for _, other in pairs]))
