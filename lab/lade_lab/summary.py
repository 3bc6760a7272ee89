"""Summary of a run: speeds, cost curves, all figures of table and report.

Two clocks are read. *The call* is what a user waits for: prefill, all steps, and what lies between. *Decoding* is what
comes after the first token, and what a method of decoding can change.

Answers are compared one by one: a sample with the other method's sample of the same workload, prompt, turn, seed and
repeat, by tokens per second. Where both wrote the same tokens that is the ratio of their seconds; where rounding ended
one text sooner, it does not count as faster for that.

What cannot be computed (no samples yet, answers of one token, nothing to compare with) is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, quantiles
from typing import Any

import numpy as np

from lade_lab.results import Method, Results, Sample, StepCurve

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
        """Return the quartiles of these values; None if there are none."""
        found = list(values)
        if not found:
            return None
        if len(found) == 1:
            return cls(found[0], found[0], found[0], 1)
        low, _, high = quantiles(found, method="inclusive")
        return cls(median(found), low, high, len(found))


@dataclass(frozen=True)
class Speedup:
    """Speed-up over another method, over the answers that both wrote.

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
        """Return whether the sample has tokens and seconds to divide."""
        return self.tokens(sample) > 0 and self.seconds(sample) > 0

    def rate(self, samples: Sequence[Sample]) -> float:
        """Tokens a second, of all of them together."""
        return sum(map(self.tokens, samples)) / sum(map(self.seconds, samples))


CALL = Clock(lambda sample: sample.seconds, lambda sample: sample.new_tokens)
DECODING = Clock(lambda sample: sample.decode_s, lambda sample: sample.new_tokens - 1)


def key_of(sample: Sample) -> Key:
    """Return the key shared with the samples of other methods that a sample is compared with."""
    return sample.workload, sample.prompt, sample.turn, sample.seed, sample.repeat


def speedup(samples: Iterable[Sample], others: Mapping[Key, Sample], clock: Clock) -> Speedup | None:
    """Return the speed-up of samples over those of another method.

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


@dataclass(frozen=True)
class Curve:
    """A measured step curve, straight between the sizes measured.

    Attributes:
        packed: on which weights.
        cached: tokens in the cache meanwhile.
        sizes: tokens fed, ascending; the first is 1.
        spreads: seconds at each.
    """

    packed: bool
    cached: int
    sizes: tuple[int, ...]
    spreads: tuple[Spread, ...]

    @classmethod
    def of(cls, found: StepCurve) -> Curve | None:
        """Without the sizes that have no times; None if nothing, or not the single token, was measured."""
        timed = [(size, Spread.of(seconds)) for size, seconds in zip(found.sizes, found.seconds, strict=True)]
        points = sorted((size, spread) for size, spread in timed if spread is not None)
        if not points or points[0][0] != 1:
            return None
        return cls(found.packed, found.cached, tuple(size for size, _ in points), tuple(each for _, each in points))

    def seconds(self, size: float) -> float:
        """Median seconds of a pass; beyond the last size measured, those of the last."""
        return float(np.interp(size, self.sizes, [spread.median for spread in self.spreads]))

    def relative(self, size: float) -> float:
        """By how much dearer a pass is than one over a single token: t(S) / t(1)."""
        return self.seconds(size) / self.seconds(1)

    @property
    def relative_spreads(self) -> tuple[Spread, ...]:
        """Medians and quartiles at each size, by the median of a single token."""
        one = self.seconds(1)
        return tuple(Spread(s.median / one, s.low / one, s.high / one, s.count) for s in self.spreads)


def curves_of(results: Results) -> list[Curve]:
    """Return the usable step curves, plain weights first, then shorter caches."""
    found = [curve for curve in map(Curve.of, results.step_curves) if curve is not None]
    return sorted(found, key=lambda curve: (curve.packed, curve.cached))


def curve_of(results: Results, packed: bool) -> Curve | None:
    """The one on these weights whose cache was filled most like those of the run; None if there is none."""
    lengths = [sample.prompt_tokens + sample.new_tokens / 2 for sample in results.samples]
    typical = float(np.median(lengths)) if lengths else 0.0
    own = [curve for curve in curves_of(results) if curve.packed == packed]
    return min(own, key=lambda curve: abs(curve.cached - typical), default=None)


@dataclass(frozen=True)
class Identity:
    """Decomposition of a speed: tokens per step over the cost of a step.

    Attributes:
        expected: tokens per step / step cost.
        observed: the speed of decoding against that of the base, all answers together.
        from_curve: tokens per step / what the step curve says that steps of these sizes cost inside the model. Nothing
            of the method's own time is in it, so it lies above `observed`; None without a step curve.
    """

    expected: float
    observed: float
    from_curve: float | None = None

    @property
    def gap(self) -> float:
        """By which share the two sides differ; 0.01 is one percent too much on the left."""
        return self.expected / self.observed - 1


@dataclass(frozen=True)
class Row:
    """One method on one workload, or on all.

    Attributes:
        method: its name.
        samples: how many there are.
        new_tokens: of all of them.
        steps: forward passes after prefill, of all of them.
        decode_rate: tokens a second after the first one, by answer.
        call_rate: tokens a second of the whole call, by answer.
        speedup: of the whole call over the reference method.
        decode_speedup: of decoding alone over the base.
        tokens_per_step: S, the compression ratio.
        fed_per_step: mean number of tokens fed, the root included.
        step_s: mean seconds of a step.
        step_cost: mean seconds of a step by those of the base, which feeds one token.
        library_share: of the time after prefill, what is spent outside the model's forward; None where that was not
            timed.
        distinct_4grams: share of distinct 4-grams, by answer; a text that loops flatters all methods.
        compared: whether its answers are to equal the reference's.
        mismatches: answers that differ from the reference's by more than rounding explains.
        near_ties: answers that differ where rounding decides between two tokens.
        identity: whether the figures fit together; None where one of them is missing.
    """

    method: str
    samples: int
    new_tokens: int
    steps: int
    decode_rate: Spread | None = None
    call_rate: Spread | None = None
    speedup: Speedup | None = None
    decode_speedup: Speedup | None = None
    tokens_per_step: float | None = None
    fed_per_step: float | None = None
    step_s: float | None = None
    step_cost: float | None = None
    library_share: float | None = None
    distinct_4grams: Spread | None = None
    compared: bool = True
    mismatches: int = 0
    near_ties: int = 0
    identity: Identity | None = None


@dataclass(frozen=True)
class Block:
    """All methods on one workload, in the order of the run.

    Attributes:
        workload: its name; None: all workloads together, each answer counting alike.
        answers: how many the method with most of them has.
        rows: one for each method, those without samples included.
    """

    workload: str | None
    answers: int
    rows: tuple[Row, ...]

    def row(self, method: str) -> Row:
        """The row of a method."""
        return next(row for row in self.rows if row.method == method)


@dataclass(frozen=True)
class Summary:
    """All figures of a run.

    Attributes:
        reference: the method that outputs are compared with and speed-ups are relative to.
        base: the method whose steps feed one token, which step costs are relative to: the first of kind `plain` that
            has samples, else the reference if it feeds one token a step, else None.
        complete: whether the run was.
        blocks: one for each workload, and one over all at the end if there are several workloads.
    """

    reference: str
    base: str | None
    complete: bool
    blocks: tuple[Block, ...]

    @property
    def overall(self) -> Block:
        """The block over all workloads."""
        return self.blocks[-1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(results: Results) -> Summary:
    """All figures of a run, complete or not."""
    base = _base(results)
    names: list[str | None] = [workload.name for workload in results.workloads]
    if len(names) != 1:
        names.append(None)
    blocks = tuple(_block(results, name, base) for name in names)
    return Summary(results.reference, base, results.complete, blocks)


def _base(results: Results) -> str | None:
    sampled = {sample.method for sample in results.samples}
    plain = [method.name for method in results.methods if method.kind == "plain" and method.name in sampled]
    hf = [method.name for method in results.methods if method.kind == "hf" and method.name == results.reference]
    return next(iter(plain + hf), None)


def _block(results: Results, workload: str | None, base: str | None) -> Block:
    samples = {method.name: list(results.of(method.name, workload)) for method in results.methods}
    reference = {key_of(sample): sample for sample in samples.get(results.reference, [])}
    plain = {key_of(sample): sample for sample in samples.get(base or "", [])}
    differing = Counter(
        (each.method, each.near_tie) for each in results.mismatches if workload in (None, each.workload)
    )
    one_token_s = _step_s(list(plain.values()))
    rows = []
    for method in results.methods:
        row = _row(method.name, samples[method.name], reference, plain)
        faults, ties = differing[method.name, False], differing[method.name, True]
        row = replace(row, compared=method.compared, mismatches=faults, near_ties=ties)
        cost = row.step_s / one_token_s if row.step_s and one_token_s else None
        curve_cost = _curve_cost(results, method, samples[method.name], base)
        rows.append(replace(row, step_cost=cost, identity=_identity(row, cost, curve_cost)))
    return Block(workload, max((row.samples for row in rows), default=0), tuple(rows))


def _row(method: str, own: list[Sample], reference: Mapping[Key, Sample], plain: Mapping[Key, Sample]) -> Row:
    """Return the part of a row that needs no steps of the base."""
    steps = sum(sample.steps for sample in own)
    fed = [tokens for sample in own for tokens in sample.step_tokens]
    return Row(
        method=method,
        samples=len(own),
        new_tokens=sum(sample.new_tokens for sample in own),
        steps=steps,
        decode_rate=Spread.of(DECODING.rate([sample]) for sample in own if DECODING.runs(sample)),
        call_rate=Spread.of(CALL.rate([sample]) for sample in own if CALL.runs(sample)),
        speedup=speedup(own, reference, CALL),
        decode_speedup=speedup(own, plain, DECODING),
        tokens_per_step=sum(sum(sample.accepted) for sample in own) / steps if steps else None,
        fed_per_step=fmean(fed) if fed else None,
        step_s=_step_s(own),
        library_share=_library_share(own),
        distinct_4grams=Spread.of(sample.distinct_4grams for sample in own),
    )


def _step_s(samples: list[Sample]) -> float | None:
    steps, seconds = sum(sample.steps for sample in samples), sum(sample.decode_s for sample in samples)
    return seconds / steps if steps and seconds else None


def _library_share(samples: list[Sample]) -> float | None:
    timed = [sample for sample in samples if sample.forward_s > 0]
    seconds = sum(sample.decode_s for sample in timed)
    return 1 - sum(sample.forward_s for sample in timed) / seconds if seconds else None


def _curve_cost(results: Results, method: Method, samples: list[Sample], base: str | None) -> float | None:
    """Return the mean model time of a method's steps by the step curve, relative to one token."""
    packed = next((each.packed for each in results.methods if each.name == base), None)
    own, plain = curve_of(results, method.packed), curve_of(results, bool(packed))
    sizes = Counter(tokens for sample in samples for tokens in sample.step_tokens)
    if packed is None or own is None or plain is None or not sizes or max(sizes) > own.sizes[-1]:
        return None
    seconds = sum(count * own.seconds(size) for size, count in sizes.items())
    return seconds / sizes.total() / plain.seconds(1)


def _identity(row: Row, cost: float | None, curve_cost: float | None) -> Identity | None:
    if not (row.tokens_per_step and cost and row.decode_speedup):
        return None
    from_curve = row.tokens_per_step / curve_cost if curve_cost else None
    return Identity(row.tokens_per_step / cost, row.decode_speedup.total, from_curve)
