"""Forecast of methods on other hardware: roofline cost and measured acceptance, and its figure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from lade.errors import InputError
from lade_lab.harness.methods import TRANSFORMERS
from lade_lab.report.theme import LIGHT
from lade_lab.results import Results, Sample
from lade_lab.roofline import Roofline


@dataclass(frozen=True)
class Acceptance:
    """Measured yield of a method's steps.

    Attributes:
        name: of the method.
        workload: of the text.
        family: methods of one family differ in nothing but the tokens they feed; None: it is of none.
        sizes: tokens fed by a step, with the number of steps that fed as many.
        tokens_per_step: S.
        own_s: seconds of a step spent outside the model's forward.
    """

    name: str
    workload: str
    family: str | None
    sizes: tuple[tuple[float, int], ...]
    tokens_per_step: float
    own_s: float

    @property
    def fed(self) -> float:
        """Mean number of tokens fed by a step."""
        return sum(size * steps for size, steps in self.sizes) / sum(steps for _, steps in self.sizes)


@dataclass(frozen=True)
class Measured:
    """Measured acceptance and library time that forecasts start from.

    Attributes:
        acceptances: of the methods that feed more than one token a step.
        plain_own_s: seconds that a step of plain decoding spends outside the model's forward.
        source: where acceptance was measured, for people.
        own_source: where the seconds outside the forward pass were.
        left_out: methods that nothing is predicted for, with the reasons.
    """

    acceptances: tuple[Acceptance, ...]
    plain_own_s: float
    source: str
    own_source: str
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Prediction:
    """Forecast of one method.

    Attributes:
        name, workload: of the method and the text.
        fed: mean number of tokens fed by a step.
        tokens_per_step: as measured, or interpolated.
        step_s: seconds of a step, time outside the forward pass included.
        speedup: tokens per second over plain decoding's.
        tokens_per_s: while decoding, prefill apart.
        break_even: the most tokens that a step yielding as many could feed without being slower than plain decoding.
    """

    name: str
    workload: str
    fed: float
    tokens_per_step: float
    step_s: float
    speedup: float
    tokens_per_s: float
    break_even: float


def _shipped() -> Measured:
    """Load the measurements that ship: `measured.json`, whose figures are those of docs/measurements.md."""
    found = json.loads((resources.files("lade_lab") / "measured.json").read_text(encoding="utf-8"))
    own_s = {int(fed): 1e-3 * library_ms for fed, library_ms in found["library_ms"].items()}
    acceptances = []
    for each in found["methods"]:
        family = f"adaptive {each['memory']}"
        name = f"{family}, budget {each['budget']}"
        figures = (((each["fed"], 1),), each["tokens_per_step"], _usual_own_s(each["fed"], own_s))
        acceptances.append(Acceptance(name, found["workload"], family, *figures))
    return Measured(tuple(acceptances), own_s[1], found["source"], found["library_source"])


def _usual_own_s(fed: float, known: Mapping[int, float]) -> float:
    """Seconds outside the forward pass by tokens fed: straight between the sizes known and on beyond the last."""
    *_, (before, before_s), (last, last_s) = known.items()
    slope = (last_s - before_s) / (last - before)
    return float(np.interp(fed, list(known), list(known.values()))) + slope * max(0.0, fed - last)


SHIPPED = _shipped()
"""For who has no results of their own."""


def measured_in(results: Results) -> Measured:
    """Acceptance by workload and method, from a benchmark run.

    On a GPU it cannot be seen from outside for how long transformers' own methods were in the model: their time outside
    the forward pass is taken to be the usual one.

    Raises:
        InputError: no method in it ever fed more than one token a step.
    """
    acceptances, left_out = [], []
    for method in results.methods:
        if method.kind == "hf-assisted":
            left_out.append((method.name, "what its draft model would cost is not known"))
            continue
        family = method.kind if method.kind.startswith("adaptive") else None
        for workload in results.workloads:
            samples = [s for s in results.of(method.name, workload.name) if s.steps]
            sizes = Counter(size for s in samples for size in s.step_tokens)
            if sum(sizes.values()) == 0 or set(sizes) == {1}:
                continue
            made = sum(sum(s.accepted) for s in samples) / sum(s.steps for s in samples)
            own_s = _own_s(results, method.kind, samples)
            acceptances.append(
                Acceptance(method.name, workload.name, family, tuple(sorted(sizes.items())), made, own_s)
            )
    if not acceptances:
        raise InputError("the results have no method that feeds several tokens a step: run lade bench with others")
    kind = next(method.kind for method in results.methods if method.name == results.reference)
    reference = [s for s in results.of(results.reference) if s.steps and set(s.step_tokens) == {1}]
    device = results.environment.device
    where = f"{results.model.name}, {results.model.dtype}, on {device}"
    return Measured(tuple(acceptances), _own_s(results, kind, reference), where, f"on {device}", tuple(left_out))


def _own_s(results: Results, kind: str, samples: Sequence[Sample]) -> float:
    """Seconds of a step outside the model's forward."""
    steps = sum(s.steps for s in samples)
    if not steps or ("cuda" in results.environment.versions and kind in TRANSFORMERS):
        return SHIPPED.plain_own_s
    return max(0.0, sum(s.decode_s - s.forward_s for s in samples) / steps)


def predict(roofline: Roofline, measured: Measured, own_s: float | None = None) -> list[Prediction]:
    """Predict each method on that hardware at the same acceptance, in the order of `measured`.

    Args:
        roofline: the model on the hardware.
        measured: what was accepted.
        own_s: seconds of a step outside the forward pass, for all methods but plain; None: as measured.
    """
    return [_predicted(roofline, each, measured.plain_own_s, own_s) for each in measured.acceptances]


def best_sizes(
    roofline: Roofline,
    measured: Measured,
    own_s: float | None = None,
    pass_s: Callable[[float], float] | None = None,
    where: str = "",
) -> list[Prediction]:
    """For each family measured at two sizes or more, what its best size would do; see `predict`.

    Tokens per step between measured sizes, and between 1 and the smallest, are taken to lie on straight lines over the
    logarithm of the tokens fed; beyond the largest nothing is assumed. The best may be 1 token: plain decoding.

    Args:
        roofline: see `predict`.
        measured: likewise.
        own_s: likewise.
        pass_s: seconds of a pass by its size, if another hardware decodes than plain decoding is on.
        where: names that.
    """
    found = []
    for family, workload in dict.fromkeys((each.family, each.workload) for each in measured.acceptances):
        members = [a for a in measured.acceptances if (a.family, a.workload) == (family, workload)]
        known = sorted({each.fed: each for each in members if each.fed > 1.0}.items())
        if family is None or len(known) < 2:
            continue
        between = partial(_between, f"{family}, best size{where}", family, [each for _, each in known])
        candidates = map(between, range(2, int(known[-1][0]) + 1))
        found.append(
            max(
                (_predicted(roofline, each, measured.plain_own_s, own_s, pass_s) for each in candidates),
                key=lambda prediction: prediction.speedup,
            )
        )
    plain_s = roofline.seconds(1) + measured.plain_own_s
    return [best if best.speedup > 1.0 else _plain(best, plain_s) for best in found]


def _between(name: str, family: str, known: Sequence[Acceptance], size: int) -> Acceptance:
    """Interpolate the acceptance of a family at this number of tokens fed."""
    places = [0.0, *(math.log2(each.fed) for each in known)]
    made = np.interp(math.log2(size), places, [1.0, *(each.tokens_per_step for each in known)])
    own_s = np.interp(size, [each.fed for each in known], [each.own_s for each in known])
    return Acceptance(name, known[0].workload, family, ((size, 1),), float(made), float(own_s))


def _plain(best: Prediction, plain_s: float) -> Prediction:
    return Prediction(best.name, best.workload, 1.0, 1.0, plain_s, 1.0, 1 / plain_s, 1.0)


def _predicted(
    roofline: Roofline,
    each: Acceptance,
    plain_own_s: float,
    own_s: float | None,
    pass_s: Callable[[float], float] | None = None,
) -> Prediction:
    own = each.own_s if own_s is None else own_s
    plain_s = roofline.seconds(1) + plain_own_s
    left_s = each.tokens_per_step * plain_s - own
    step_s = _mean_seconds(pass_s or roofline.seconds, each.sizes) + own
    return Prediction(
        name=each.name,
        workload=each.workload,
        fed=each.fed,
        tokens_per_step=each.tokens_per_step,
        step_s=step_s,
        speedup=each.tokens_per_step * plain_s / step_s,
        tokens_per_s=each.tokens_per_step / step_s,
        break_even=_break_even(roofline, left_s) if pass_s is None else _most_fed(pass_s, left_s),
    )


def _mean_seconds(pass_s: Callable[[float], float], sizes: Iterable[tuple[float, int]]) -> float:
    """Over all steps: the mean of t(S), which lies above t of the mean where the curve bends."""
    sizes = list(sizes)
    return sum(pass_s(size) * steps for size, steps in sizes) / sum(steps for _, steps in sizes)


def _most_fed(pass_s: Callable[[float], float], seconds: float) -> float:
    """The same of a pass whose seconds grow with its size in any way."""
    size = 0
    for bit in reversed(range(20)):
        if pass_s(size + 2**bit) <= seconds:
            size += 2**bit
    return float(size)


def _break_even(roofline: Roofline, pass_s: float) -> float:
    """The most tokens that a pass can feed in this many seconds; 0.0 if not even one."""
    if pass_s < roofline.seconds(1):
        return 0.0
    return (pass_s - roofline.overhead_s) / roofline.token_s


_MARKS = "osD^v<>"


def draw(roofline: Roofline, predictions: Sequence[Prediction], title: str, out: Path) -> None:
    """Draw t(S)/t(1) and the measured tokens per step: whatever lies above the curve is gained.

    Args:
        roofline: the cost of steps.
        predictions: the methods.
        title: what it is of.
        out: a file whose ending says what it is to be.

    Raises:
        InputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    largest = max([256.0, *(each.fed for each in predictions)])
    sizes = [2 ** (i / 16) for i in range(int(16 * math.log2(largest)) + 1)]
    costs = [roofline.relative(size) for size in sizes]
    axes.plot(sizes, costs, color=LIGHT.ink, label="cost of a step, t(S)/t(1): break-even")
    axes.fill_between(sizes, costs, color=LIGHT.soft, alpha=0.5, linewidth=0)
    colors = (*LIGHT.lines, LIGHT.loss, LIGHT.even)
    for number, (name, members) in enumerate(_series(predictions).items()):
        fed, made = [each.fed for each in members], [each.tokens_per_step for each in members]
        style: dict[str, Any] = {"marker": _MARKS[number % len(_MARKS)], "color": colors[number % len(colors)]}
        axes.plot(fed, made, linewidth=1, label=name, **style)
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(int(math.log2(largest)) + 1)]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_ylim(0, 1.2 * max([2.0, *(each.tokens_per_step for each in predictions)]))
    axes.set_xlabel("tokens fed by a step")
    axes.set_ylabel("tokens per step, and cost in passes of one token")
    axes.set_title(f"{title}: estimated, above the line is gain")
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(out)
    except OSError as problem:
        raise InputError(f"cannot write {str(out)!r} ({problem.strerror or problem}): give another file") from problem


def _series(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Methods whose names differ in what follows the last comma, together."""
    found: dict[str, list[Prediction]] = {}
    for each in predictions:
        found.setdefault(each.name.rpartition(", budget")[0] or each.name, []).append(each)
    return found
