"""Saved step costs, and the step cost of a model: the curve in use already, else the saved one, else a new one.

A curve in use belongs to the model, as the result of `lade.supports` does, and is freed with it. A saved one is a small
JSON file for each combination of machine, model, settings and versions, see `lade.files.Records`:

    <user's cache folder>/lookahead-decoding/step-cost/<hash of the key>.json    {"key": {...}, "cost": {...}}

A new one times the model's own forward pass over dummy trees of several sizes. Its cache is this module's own. One
token is really run; copies of its keys and values fill it up to the length wanted, since their content does not change
what a pass costs, and running 256 tokens through a large model on a CPU takes longer than all that is to be measured.

A curve is measured at one length of the cache. At other lengths passes cost more or less, by much the same factor for
all sizes (`lade doctor --cached 1024` shows it), and `StepCost.observe` follows it. Nothing else is touched: no hook,
no setting, no torch generator.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from time import monotonic, perf_counter
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedModel

from lade.announcements import announce, contention_now
from lade.decoding.drafting.controller import RECENT
from lade.decoding.drafting.step_cost import KNOTS, SURPRISE, StepCost, fast_quantile
from lade.decoding.tree import ROOT, TokenTree
from lade.files import Records, digest_of
from lade.locks import ForkSafeLock
from lade.model.config import field, token_embeddings
from lade.model.facts import ModelFacts, bytes_by_kind
from lade.model.inputs import batch_bucket
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.native import processor_name
from lade.version import __version__

logger = logging.getLogger(__name__)

SIZES = (1, 8, 32, 2, 4, 16, 64, 128)  # in this order: should the time be over early, the first ones tell most
CACHED_TOKENS = 256
"""As many as a short chat has."""
BUDGET_S = 1.0
"""Of all passes together, before the first answer of a model on a machine; what does not fit in it is extrapolated."""
_DEPTH = 7
"""Of the trees that are timed: of as many tokens a balanced tree of the largest size would have."""


class StepTimer:
    """Times single passes of up to `largest` tokens in each of `batch` equal rows.

    The cache holds `cached` tokens, or as many as the model has positions for. Passes change the runner's `pass_time`.
    """

    def __init__(
        self, runner: EagerRunner, *, vocabulary: int, largest: int, cached: int = CACHED_TOKENS, batch: int = 1
    ) -> None:
        depth = runner.room(0)
        self.cached = cached if depth is None else min(cached, max(1, depth - _DEPTH))
        self.largest = min(largest, vocabulary)  # nodes must have tokens of their own, else the tree would merge them
        self._runner, self._batch, self._reader = runner, batch, runner.reader
        self._tokens = random.Random(0).sample(range(vocabulary), self.largest)
        self._text = [self._tokens[i % self.largest] for i in range(self.cached)]
        self._room = runner.room(self.cached)
        if self._room == 0:
            self.largest = 1
        self._cache = runner.host(self._filled(), self.cached + self.largest)
        for size in runner.pass_sizes(self.largest):
            self(min(size, self.largest))  # captures it, which is not to count

    def __call__(self, size: int) -> float:
        """Undisturbed seconds of one pass that feeds `size` tokens a row, 1 to `largest`."""
        tree = self._tree(size)
        trees, rows = [tree] * self._batch, [[*self._text, tree.ids[ROOT]]] * self._batch
        if self._reader is None:
            self._runner.forward(trees, rows, self._cache)
        else:  # as greedy decoding does; steps that need whole rows of logits are soon found to take longer
            self._reader.readouts(trees, rows, self._cache, wants_entries=True)
        self._cache.keep([[]] * self._batch, fed=size)
        return self._runner.pass_time.undisturbed_s

    def close(self) -> None:
        """Free the cache; the timer cannot be used afterwards."""
        self._cache.reset()

    def _tree(self, size: int) -> TokenTree:
        """Chains that hang from the root: all tokens differ, as in a real step, so that all experts are used."""
        depth = _DEPTH if self._room is None else min(_DEPTH, self._room)
        tree = TokenTree(self._tokens[0])
        for start in range(1, size, depth or 1):
            tree.add_path(self._tokens[start : min(size, start + depth)], "pool")
        return tree

    def _filled(self) -> TreeCache:
        """Run one token and repeat its keys and values: `cached` of them, and room for the largest pass."""
        cache = self._runner.tree_cache()
        self._runner.eager().prefill([self._text[:1]] * self._batch, cache)
        cache.repeat(self.cached + self.largest - 1)
        cache.keep([[]] * self._batch, fed=self.largest)
        return cache


def samples_of(
    timer: Callable[[int], float],
    sizes: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    rounds: int = RECENT,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[tuple[int, float]]:
    """Time the sizes in turn, so that a drift of the machine's speed meets all of them.

    A size that would not end in time is left out: then the smaller ones are measured more often. The first two are
    measured once whatever they take, since one point makes no curve. Yields a size and the seconds that a pass took, as
    soon as they are known.
    """
    deadline = clock() + budget_s
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        measured = False
        for size in sizes:
            must = not samples[size] and not any(samples[other] for other in sizes[1:])
            if must or clock() + _expected(samples, size) <= deadline:
                samples[size].append(timer(size))
                measured = True
                yield size, samples[size][-1]
        if not measured:
            return


def measure_step_cost(
    runner: EagerRunner,
    *,
    vocabulary: int,
    cached: int = CACHED_TOKENS,
    batch: int = 1,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = perf_counter,
) -> StepCost:
    """Measure what a pass costs by its size, see `StepTimer` and `samples_of`.

    >>> cost = measure_step_cost(runner, vocabulary=32000)
    >>> cost.seconds(16) / cost.seconds(1)
    1.3
    """
    sizes = SIZES if runner.parts == 1 else (*SIZES, KNOTS[-1])  # several processes feed a part of each tree
    before = runner.pass_time
    samples: dict[int, list[float]] = {}
    with closing(StepTimer(runner, vocabulary=vocabulary, largest=max(sizes), cached=cached, batch=batch)) as timer:
        feasible = [size for size in sizes if size <= timer.largest]
        for size, seconds in samples_of(timer, feasible, budget_s=budget_s, clock=clock):
            samples.setdefault(size, []).append(seconds)
    runner.pass_time = before
    return StepCost.of(samples, measured_at=time.time())


def _expected(samples: Mapping[int, Sequence[float]], size: int) -> float:
    """Seconds that a pass of this size will take, as far as is known."""
    if samples[size]:
        return fast_quantile(samples[size])
    return StepCost.of(samples).seconds(size) if any(samples.values()) else 0.0


Key = Mapping[str, object]  # what a saved curve is good for, by readable names; anything JSON can hold

RECORDS = Records("step-cost", "step cost")
_SHAPE = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes


def key_of(model: PreTrainedModel, runner: EagerRunner, batch: int = 1) -> dict[str, object]:
    """All that a step's cost depends on, but for the length of the text and the machine's other load.

    These two change from step to step: the curve follows them while it is used.
    """
    facts = runner.facts
    config = facts.text_config
    return {
        "devices": _names(weight.device for weight in facts.weights),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # which can be limited from outside
        "model": type(model).__name__,
        "shape": {name: field(config, name) for name in _SHAPE},
        "parameters": sum(weight.numel() for weight in facts.weights),
        # These two tell packed, quantised and adapted weights from plain ones: they sit in modules of other classes,
        # or are tensors of other classes, or other numbers of bytes.
        "modules": _counts(facts),
        "weights": bytes_by_kind(facts.weights),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
        "runner": type(runner).__name__,
        "batch": batch_bucket(batch),
        **({"processes": runner.processes} if runner.processes > 1 else {}),
        "lade": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def devices_of(model: PreTrainedModel) -> list[str]:
    """Names of the hardware that a model's weights lie on, one for each device."""
    return _names(parameter.device for parameter in model.parameters())


def _names(devices: Iterable[torch.device]) -> list[str]:
    return sorted(map(_device_name, set(devices))) or ["none"]


def _counts(facts: ModelFacts) -> dict[str, int]:
    """Modules by the name of their class."""
    counts = Counter[str]()
    for kind, modules in facts.kinds.items():
        counts[kind.__name__] += len(modules)
    return dict(counts)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {os.cpu_count()} cores" if device.type == "cpu" else device.type


SAVE_EVERY_S = 30.0
"""Between two times that a process saves a curve, at least: sizes that are seldom fed move in every short text, and a
file takes as long to write as half a step of a small model."""


@dataclasses.dataclass
class CurveInUse:
    """A curve that steps refresh.

    One that was measured on a busy machine, where threads wait for each other and passes of all sizes take nearly as
    long, is not kept: it is not saved, and measured again once the machine is quiet.
    """

    key: Key
    cost: StepCost
    saved: Sequence[float]  # its `table` as it is in the file
    saved_at: float = -math.inf  # when it was saved because steps had moved it, by a monotonic clock
    shapes: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # of passes made, see `EagerRunner.shapes`
    is_kept: bool = True


_in_use: WeakKeyDictionary[PreTrainedModel, dict[str, CurveInUse]] = WeakKeyDictionary()
_measuring = ForkSafeLock()  # two threads that measured at once would measure each other


def step_cost_for(model: PreTrainedModel, runner: EagerRunner, *, batch: int = 1) -> StepCost:
    """The step cost of a model as this runner runs it; measured now, in a second or two, if it never was.

    The same object is returned as long as model, settings and machine are the same: what one generation observes, the
    next one knows. The batch is rounded up to a power of two, so that one that loses rows seldom measures again.
    """
    key = key_of(model, runner, batch)
    name = digest_of(key)
    curves = _in_use.setdefault(model, {})
    curve = curves.get(name)
    if curve is None or (not curve.is_kept and not _is_busy(model)):
        with _measuring:
            if curves.get(name) is curve:  # else another thread has measured it meanwhile
                made = _new_curve(key, model, runner, batch=batch_bucket(batch))
                if made is None:
                    return step_cost_for(model, runner.eager(), batch=batch)
                if curve is not None:
                    made.cost.take_over_texts(curve.cost)
                curves[name] = made
            curve = curves[name]
    curve.cost.pad_to(runner.step_sizes)
    curve.shapes |= runner.shapes
    runner.shapes = curve.shapes
    return curve.cost


def forget_texts(model: PreTrainedModel) -> None:
    """Forget what texts have taught about drafting with a model, as after a warm-up; see `StepCost.forget_texts`."""
    for curve in list(_in_use.get(model, {}).values()):
        curve.cost.forget_texts()


def _new_curve(key: Key, model: PreTrainedModel, runner: EagerRunner, *, batch: int) -> CurveInUse | None:
    """The saved curve, or one that is measured and saved now; None if it cannot be measured."""
    cost, is_kept = RECORDS.load(key, lambda record: StepCost.from_json(record["cost"])), True
    if cost is None:
        cost, is_kept = _measured(model, runner, batch), not _is_busy(model)
        if cost is None:
            return None
        if is_kept:
            _save(key, cost)
        else:
            logger.info("the machine is busy: the step cost is not saved, and measured again once it is quiet")
    else:
        logger.debug("step cost of %s, batch of %d, loaded: %s", type(model).__name__, batch, _summary(cost))
    return CurveInUse(key, cost, cost.table, is_kept=is_kept)


def _save(key: Key, cost: StepCost) -> bool:
    """Save a curve, which is as old as its first measurement: passes only refresh the sizes they have."""
    return RECORDS.save(key, {"cost": cost.to_json(), "saved_at": cost.measured_at})


def _is_busy(model: PreTrainedModel) -> bool:
    """Return whether other processes compete for the cores that compute passes."""
    return model.device.type == "cpu" and bool(contention_now(torch.get_num_threads()))


def save_refreshed(model: PreTrainedModel) -> None:
    """Save those curves of a model that its steps have moved by a `SURPRISE`; for the end of a generation.

    Not those that were saved a short while ago: what moves them further is saved by the first generation after it. Nor
    on a busy machine.
    """
    now = monotonic()
    for curve in list(_in_use.get(model, {}).values()):  # other threads may add to them
        if now - curve.saved_at < SAVE_EVERY_S or not curve.is_kept or _is_busy(model):
            continue
        if curve.cost.change_since(curve.saved) > SURPRISE:
            _save(curve.key, curve.cost)
            curve.saved, curve.saved_at = curve.cost.table, now


def use(model: PreTrainedModel, key: Key, cost: StepCost) -> bool:
    """Use a curve that was measured with more care, and save it unless the machine is busy; whether it was saved."""
    is_kept = not _is_busy(model)
    _in_use.setdefault(model, {})[digest_of(key)] = CurveInUse(key, cost, cost.table, is_kept=is_kept)
    return is_kept and _save(key, cost)


def _measured(model: PreTrainedModel, runner: EagerRunner, batch: int) -> StepCost | None:
    """Measure, in whatever thread decodes; passes of models that are served draw no random numbers.

    None where there is no memory for captured passes. Those of an eager runner are measured then.
    """
    name = type(model).__name__
    takes = "minutes, as torch.compile compiles a pass for each size" if runner.facts.compiled else "a second or two"
    announce(logger, f"measuring the step cost of {name}, batch of {batch}, once on this machine: {takes}")
    try:
        cost = measure_step_cost(runner, vocabulary=token_embeddings(model).weight.shape[0], batch=batch)
    except torch.OutOfMemoryError:
        if runner.eager() is runner:
            raise
        logger.info("no memory to measure the captured passes of %s: those that are not captured are measured", name)
        return None
    logger.info("measured the step cost of %s, batch of %d: %s", name, batch, _summary(cost))
    return cost


def _summary(cost: StepCost) -> str:
    """What passes of some sizes take, for the log."""
    return ", ".join(f"{size} tokens {1e3 * cost.seconds(size):.2f} ms" for size in (1, 8, 32))
