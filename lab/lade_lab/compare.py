"""Comparison of two runs with confidence intervals.

Answers are paired: the same workload, prompt, turn, method, seed and repeat. What is compared is the logarithm of the
ratio of their speeds, B over A; where both runs have the same reference method, its own ratio for the same answer is
taken off, so that a machine that was slower as a whole says nothing about a method.

The prompt is the unit that is drawn again and again: answers to one prompt share what is special about it. (Of fewer
than eight prompts the single answers are drawn: what is found then holds for these prompts.) Intervals are the
studentized bootstrap's of the mean, which stays honest with few units, where the percentile bootstrap's would be too
narrow. They hold *together*: each is widened (Bonferroni) so that in one comparison in twenty at most any interval of
all misses its true value. So two runs that differ by noise alone are called slower somewhere in about one of forty
comparisons, and seldomer still by more than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lade.errors import ConfigError, InputError
from lade_lab.results import Method, Results, Sample
from lade_lab.summary import DECODING, Clock, Key, key_of

_FREE_SETTINGS = ("seeds", "repeats")  # they say how many samples there are, not what a sample is


def refused(a: Results, b: Results) -> list[str]:
    """Return the reasons why two runs are not comparable, each as "what: this in A, that in B"."""
    found = [f"model {each}" for each in _differing(a.model, b.model)]
    found += [f"settings {each}" for each in _differing(a.settings, b.settings, but=_FREE_SETTINGS)]
    others = {method.name: method for method in b.methods}
    for method in a.methods:
        other: Method | None = others.get(method.name)
        if other is not None:
            found += [f"method {method.name!r} {each}" for each in _differing(method, other)]
    return found


def worth_knowing(a: Results, b: Results) -> list[str]:
    """Return the differences to point out, which may be the ones under test."""
    found = [f"environment {each}" for each in _differing(a.environment, b.environment, but=("versions", "commit"))]
    versions = a.environment.versions, b.environment.versions
    for name in sorted({*versions[0], *versions[1]}):
        if versions[0].get(name) != versions[1].get(name):
            found.append(f"version of {name}: {versions[0].get(name)} in A, {versions[1].get(name)} in B")
    found += [f"settings {each}" for each in _differing(a.settings, b.settings) if each.startswith(_FREE_SETTINGS)]
    found += [f"{name} is not complete" for name, run in (("A", a), ("B", b)) if not run.complete]
    return found


def missing(own: Results, other: Results) -> list[str]:
    """Methods, workloads and prompts that one run has answers of and the other has not."""
    methods, workloads = {s.method for s in other.samples}, {s.workload for s in other.samples}
    found = [f"method {name!r}" for name in dict.fromkeys(s.method for s in own.samples) if name not in methods]
    found += [f"workload {name!r}" for name in dict.fromkeys(s.workload for s in own.samples) if name not in workloads]
    prompts = {(s.workload, s.prompt) for s in other.samples}
    mine = dict.fromkeys((s.workload, s.prompt) for s in own.samples if s.workload in workloads)
    return found + [
        f"prompt {prompt!r} of {workload}" for workload, prompt in mine if (workload, prompt) not in prompts
    ]


def _differing(a: Any, b: Any, but: tuple[str, ...] = ()) -> list[str]:
    """Fields of two records that differ, as "name: this in A, that in B"."""
    pairs = ((each.name, getattr(a, each.name), getattr(b, each.name)) for each in fields(a) if each.name not in but)
    return [f"{name}: {x!r} in A, {y!r} in B" for name, x, y in pairs if x != y]


Verdict = Literal["faster", "slower", "no difference seen"]

_RESAMPLES = 10_000
_BLOCK = 1_000  # resamples at a time, to keep memory small
_EXACT = 1e-9  # ratios that vary less than this do not vary


@dataclass(frozen=True)
class Interval:
    """A ratio and what it may be: B over A, above 1 is faster.

    Attributes:
        ratio: geometric mean over the units.
        low, high: the interval's ends; 0 and infinite where there are too few units to say anything.
        units: how many there are: prompts, or single answers.
    """

    ratio: float
    low: float
    high: float
    units: int

    @property
    def verdict(self) -> Verdict:
        """Slower or faster where the interval excludes 1."""
        return "slower" if self.high < 1.0 else "faster" if self.low > 1.0 else "no difference seen"


def interval_of(logs: Iterable[float], alpha: float, generator: np.random.Generator) -> Interval:
    """The geometric mean of ratios, and its studentized bootstrap interval.

    Args:
        logs: logarithm of the ratio, one for each unit.
        alpha: how often the interval may miss.
        generator: draws the resamples.
    """
    x = np.asarray(list(logs), dtype=float)
    if not len(x):
        return Interval(1.0, 0.0, math.inf, 0)
    mean, count = float(x.mean()), len(x)
    if count < 2:
        return Interval(math.exp(mean), 0.0, math.inf, count)
    error = float(x.std(ddof=1)) / math.sqrt(count)
    if error < _EXACT:
        return Interval(math.exp(mean), math.exp(mean), math.exp(mean), count)
    low, high = np.quantile(_studentized(x, generator), [alpha / 2, 1 - alpha / 2], method="inverted_cdf")
    return Interval(math.exp(mean), _exp(mean - float(high) * error), _exp(mean - float(low) * error), count)


def _studentized(x: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the studentised deviations of the resampled means, [_RESAMPLES].

    Infinite, of either sign, for a resample of a single value: it says nothing about spread.
    """
    found = []
    for _ in range(_RESAMPLES // _BLOCK):
        drawn = x[generator.integers(len(x), size=(_BLOCK, len(x)))]
        distance, error = drawn.mean(axis=1) - x.mean(), drawn.std(axis=1, ddof=1) / math.sqrt(len(x))
        flat = error < _EXACT
        found.append(np.where(flat, np.copysign(np.inf, distance), distance / np.where(flat, 1.0, error)))
    return np.concatenate(found)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


ALARMS = 0.05
"""In this many comparisons of the same thing at most any interval misses, all of them counted together."""

TOLERANCE = 0.03
"""A method may get slower by this share before a comparison fails."""

_FEW_PROMPTS = 8


@dataclass(frozen=True)
class Steps:
    """Noise-free counts: tokens emitted after prefill, and the passes they took."""

    tokens: int
    passes: int

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Steps:
        """Return the total over all samples."""
        found = list(samples)
        return cls(sum(sum(sample.accepted) for sample in found), sum(sample.steps for sample in found))

    @property
    def tokens_per_step(self) -> float | None:
        """S; None without a pass."""
        return self.tokens / self.passes if self.passes else None


@dataclass(frozen=True)
class Change:
    """One method on one workload in both runs.

    Attributes:
        workload, method: their names.
        pairs: answers that both runs have.
        rate: ratio of tokens per second.
        speedup: ratio of the speed-ups over the reference; None where there is none, and for the reference itself.
        judged: whether its verdict is the speed-up's, the rate's, or that nothing is said of it: the reference is
            what others are measured by.
        steps_before, steps_after: of the answers that both runs have.
        paths: answers that took other steps: of another size, or yielding other numbers of tokens.
        texts: answers whose tokens differ.
    """

    workload: str
    method: str
    pairs: int
    rate: Interval
    speedup: Interval | None
    judged: Literal["speedup", "rate", "reference"]
    steps_before: Steps
    steps_after: Steps
    paths: int
    texts: int

    @property
    def interval(self) -> Interval:
        """The one that counts."""
        return self.speedup if self.judged == "speedup" and self.speedup is not None else self.rate

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the method."""
        return self.interval.verdict

    def fails(self, tolerance: float) -> bool:
        """True if it got slower beyond noise and by more than `tolerance`."""
        return self.judged != "reference" and self.verdict == "slower" and self.interval.ratio < 1.0 - tolerance


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs.

    Attributes:
        changes: by workload and method, in the order of A.
        reference: the method that speed-ups are over; None if the runs share none, or rates are compared.
        tolerance: see `Change.fails`.
        forced: differences that would have been refused.
        warnings: other differences that a reader should know.
        only_a, only_b: methods, workloads and prompts of one run alone.
    """

    changes: tuple[Change, ...]
    reference: str | None
    tolerance: float
    forced: tuple[str, ...]
    warnings: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def failures(self) -> list[Change]:
        """Methods that got slower by more than the tolerance."""
        return [change for change in self.changes if change.fails(self.tolerance)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an interval without an end has None there."""
        found = asdict(self)
        for change, entry in zip(self.changes, found["changes"], strict=True):
            entry["verdict"], entry["fails"] = change.verdict, change.fails(self.tolerance)
            entry["steps_before"]["tokens_per_step"] = change.steps_before.tokens_per_step
            entry["steps_after"]["tokens_per_step"] = change.steps_after.tokens_per_step
            for name in ("rate", "speedup"):
                if entry[name] is not None and not math.isfinite(entry[name]["high"]):
                    entry[name] |= {"low": None, "high": None}
        return {**found, "failed": bool(self.failures)}


def compare(
    a: Results,
    b: Results,
    *,
    tolerance: float = TOLERANCE,
    force: bool = False,
    absolute: bool = False,
    clock: Clock = DECODING,
    seed: int = 0,
) -> Comparison:
    """Compare the speed of B with that of A.

    Args:
        a: the run before.
        b: the run after.
        tolerance: share by which a method may get slower, from 0 to 1.
        force: compare runs of different models, settings or methods anyway.
        absolute: judge tokens per second and not speed-ups, the reference's included.
        clock: which seconds and tokens make a speed: those of decoding, or of the whole call.
        seed: of the bootstrap.

    Raises:
        ConfigError: the tolerance is out of range.
        InputError: the runs are of different things, or have no answer in common.

    >>> compare(Results.load("before.json"), Results.load("after.json")).failures
    []
    """
    if not 0.0 <= tolerance < 1.0:
        raise ConfigError("tolerance", tolerance, "give a fraction from 0 to 1, such as 0.03")
    forced = refused(a, b)
    if forced and not force:
        raise InputError(f"these runs cannot be compared: {'; '.join(forced)}; give --force to compare anyway")
    pairs = _Pairs.of(a, b)
    if not pairs.shared:
        raise InputError("the two runs have no answer in common: give runs of the same prompts and methods")
    reference = None if absolute else _reference(a, b, pairs)
    return Comparison(
        changes=tuple(_changes(pairs, _grouped(pairs.shared, a), reference, clock, seed)),
        reference=reference,
        tolerance=tolerance,
        forced=tuple(forced),
        warnings=(*worth_knowing(a, b), *pairs.warnings()),
        only_a=tuple(missing(a, b)),
        only_b=tuple(missing(b, a)),
    )


@dataclass(frozen=True)
class _Pairs:
    """Samples of both runs by what they have in common.

    Attributes:
        a, b: samples by method and key.
        shared: what both have, with the same prompt, in the order of A.
        altered: prompts that have the same name in both runs, and other ids.
    """

    a: Mapping[tuple[str, Key], Sample]
    b: Mapping[tuple[str, Key], Sample]
    shared: list[tuple[str, Key]]
    altered: set[tuple[str, str, int]]

    @classmethod
    def of(cls, a: Results, b: Results) -> _Pairs:
        before, after = ({(s.method, key_of(s)): s for s in run.samples} for run in (a, b))
        both = [each for each in before if each in after]
        altered = {each for each in both if before[each].prompt_sha256 != after[each].prompt_sha256}
        shared = [each for each in both if each not in altered]
        return cls(before, after, shared, {(key[0], key[1], key[2]) for _, key in altered})

    def warnings(self) -> list[str]:
        """Return what is left out though both runs have it."""
        return [
            f"prompt {prompt!r} of {workload}, turn {turn}, has other tokens in B: left out"
            for workload, prompt, turn in sorted(self.altered)
        ]

    def log_ratio(self, method: str, key: Key, clock: Clock) -> float | None:
        """Logarithm of B's speed over A's; None where one of them has none."""
        samples = self.a.get((method, key)), self.b.get((method, key))
        if samples[0] is None or samples[1] is None or not all(clock.runs(s) for s in samples if s is not None):
            return None
        return math.log(clock.rate([samples[1]]) / clock.rate([samples[0]]))


def _grouped(shared: Iterable[tuple[str, Key]], a: Results) -> dict[tuple[str, str], list[Key]]:
    """Keys by workload and method, in the order of A."""
    order = {each.name: i for i, each in enumerate(a.workloads)}, {each.name: i for i, each in enumerate(a.methods)}
    groups: dict[tuple[str, str], list[Key]] = {}
    for method, key in shared:
        groups.setdefault((key[0], method), []).append(key)
    return dict(sorted(groups.items(), key=lambda item: (order[0].get(item[0][0], -1), order[1].get(item[0][1], -1))))


def _changes(
    pairs: _Pairs,
    groups: Mapping[tuple[str, str], list[Key]],
    reference: str | None,
    clock: Clock,
    seed: int,
) -> Iterator[Change]:
    """Yield the changes by workload and method; each has its own generator, so that a new group changes no other."""
    alpha = ALARMS / max(1, sum(method != reference for _, method in groups))
    for number, ((workload, method), keys) in enumerate(groups.items()):
        generator, base = np.random.default_rng((seed, number)), None if method == reference else reference
        change = _change(pairs, workload, method, keys, base, clock, alpha, generator)
        yield replace(change, judged="reference") if method == reference else change


def _change(
    pairs: _Pairs,
    workload: str,
    method: str,
    keys: list[Key],
    reference: str | None,
    clock: Clock,
    alpha: float,
    generator: np.random.Generator,
) -> Change:
    rates = {key: log for key in keys if (log := pairs.log_ratio(method, key, clock)) is not None}
    speedups = None
    if reference is not None:
        drifts = {key: pairs.log_ratio(reference, key, clock) for key in rates}
        speedups = {key: rates[key] - drift for key, drift in drifts.items() if drift is not None}
    before, after = [pairs.a[method, key] for key in keys], [pairs.b[method, key] for key in keys]
    return Change(
        workload=workload,
        method=method,
        pairs=len(keys),
        rate=interval_of(_by_unit(rates), alpha, generator),
        speedup=interval_of(_by_unit(speedups), alpha, generator) if speedups else None,
        judged="speedup" if speedups else "rate",
        steps_before=Steps.of(before),
        steps_after=Steps.of(after),
        paths=sum(
            (x.accepted, x.step_tokens) != (y.accepted, y.step_tokens) for x, y in zip(before, after, strict=True)
        ),
        texts=sum(x.output_sha256 != y.output_sha256 for x, y in zip(before, after, strict=True)),
    )


def _by_unit(logs: Mapping[Key, float]) -> list[float]:
    """One for each prompt, the median over its turns, seeds and repeats, so that one hiccup does not count.

    With few prompts, one for each answer.
    """
    prompts: dict[str, list[float]] = {}
    for key, log in logs.items():
        prompts.setdefault(key[1], []).append(log)
    return list(logs.values()) if len(prompts) < _FEW_PROMPTS else [median(found) for found in prompts.values()]


def _reference(a: Results, b: Results, pairs: _Pairs) -> str | None:
    """A's reference, or B's, or a plain method: the first of them that both runs have answers of."""
    answered = {method for method, _ in pairs.shared}
    plain = [each.name for each in a.methods if each.kind in ("hf", "plain")]
    return next((name for name in (a.reference, b.reference, *plain) if name in answered), None)


def drift(comparison: Comparison) -> float | None:
    """Return the speed-up of the reference itself in B over A, all workloads alike; None if there is none."""
    found = [change.rate.ratio for change in comparison.changes if change.method == comparison.reference]
    return math.exp(fmean(map(math.log, found))) if found else None
