"""Work of the commands that prepare later generations: `lade tune`, `lade pack` and `lade warm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lade.backends.cpu.packing import folder, quality
from lade.backends.cpu.packing import pack as packing
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.quality import LayerError
from lade.cli.encoder import Encoder
from lade.cli.loading.load import LoadedModel
from lade.cli.prompts import Prompt
from lade.cli.run import Interrupt, decode
from lade.cli.terminal import Progress, Terminal, count
from lade.config import LookaheadConfig
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.errors import ConfigError, InputError
from lade.memory import Memory
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner, runner_for
from lade.model.supports import supports, unwrap
from lade.stats import Stats
from lade.tuning import cost_cache, cost_file, measure
from lade.tuning.cost_key import key_of

FREE = 1.2
"""A pass of several tokens counts as free up to this multiple of the time of one token."""
_ROUNDS = 10_000  # the time limit comes first


@dataclass
class Sweep:
    """Times of passes with one length of the cache.

    Attributes:
        cached: number of tokens in the cache.
        wanted: numbers of fed tokens to measure.
        samples: seconds of each pass by number of fed tokens, without the first of several, which warms up.
    """

    cached: int
    wanted: list[int]
    samples: dict[int, list[float]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Measured numbers of fed tokens, ascending."""
        return sorted(self.samples)

    @property
    def free(self) -> int:
        """Largest number of tokens up to which all passes are free."""
        limit = FREE * self.median(1)
        costly = [size for size in self.sizes if self.median(size) > limit]
        return max(size for size in self.sizes if size < (costly or [self.sizes[-1] + 1])[0])

    def median(self, size: int) -> float:
        """Return the median time in seconds."""
        return median(self.samples[size])

    def quartiles(self, size: int) -> tuple[float, float]:
        """Return the first and third quartile in seconds."""
        samples = self.samples[size]
        if len(samples) == 1:
            return samples[0], samples[0]
        first, _, third = quantiles(samples, method="inclusive")
        return first, third

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        points = [
            {
                "size": size,
                "passes": len(self.samples[size]),
                "median_s": self.median(size),
                "quartiles_s": list(self.quartiles(size)),
                "relative": self.median(size) / self.median(1),
            }
            for size in self.sizes
        ]
        return {"cached": self.cached, "free_tokens": self.free, "sizes": points}


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured cost curves of a model.

    Attributes:
        sweeps: one curve per length of the cache.
        saved: path of the saved curve; None if none was saved.
        interrupted: Ctrl-C ended the measurement.
    """

    sweeps: list[Sweep]
    saved: str | None
    interrupted: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        sweeps = [sweep.as_dict() for sweep in self.sweeps]
        return {"profile": self.saved, "interrupted": self.interrupted, "sweeps": sweeps}


def measure_costs(model: Any, lengths: list[int], seconds: float, term: Terminal) -> MeasuredCosts:
    """Measure one curve per length of the cache, and save that of the usual length; Ctrl-C ends it early.

    Args:
        model: transformers causal language model.
        lengths: numbers of tokens in the cache.
        seconds: time limit for all lengths together.
        term: terminal that shows the progress.
    """
    plan, inner = supports(model).require(), unwrap(model)
    runner = runner_for(ModelFacts.of(inner), plan, inner.generation_config)
    sweeps: list[Sweep] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        Interrupt() as interrupt,
        Progress(*columns, console=term.err, transient=True, disable=not term.animated) as progress,
    ):
        for length in lengths:
            if not (sweeps and interrupt.requested):
                sweeps.append(_sweep(runner, length, seconds / len(lengths), interrupt, progress))
    saved = _save_usual(inner, runner, sweeps, interrupted=interrupt.requested)
    return MeasuredCosts(sweeps, saved, interrupt.requested)


def _sweep(runner: EagerRunner, cached: int, seconds: float, interrupt: Interrupt, progress: Progress) -> Sweep:
    vocabulary = runner.model.get_input_embeddings().weight.shape[0]
    timer = measure.StepTimer(runner, vocabulary=vocabulary, largest=KNOTS[-1], cached=cached)
    order = [*measure.SIZES, *(knot for knot in KNOTS if knot not in measure.SIZES)]
    sweep = Sweep(timer.cached, [size for size in order if size <= timer.largest])
    task = progress.add_task(f"{timer.cached} cached tokens", total=seconds)
    start = perf_counter()
    for size, taken in measure.samples_of(timer, sweep.wanted, budget_s=seconds, rounds=_ROUNDS):
        sweep.samples.setdefault(size, []).append(taken)
        progress.update(task, completed=perf_counter() - start)
        if interrupt.requested:
            break
    sweep.samples = {size: taken[1:] or taken for size, taken in sweep.samples.items()}
    return sweep


def _save_usual(model: Any, runner: EagerRunner, sweeps: list[Sweep], *, interrupted: bool) -> str | None:
    """Save the curve of the length at which generations measure, or of the nearest one; return its path.

    A curve that Ctrl-C left incomplete is not saved, as an older one may be better.
    """
    usual = min(sweeps, key=lambda sweep: abs(log(sweep.cached / measure.CACHED_TOKENS)))
    if interrupted and len(usual.samples) < len(usual.wanted):
        return None
    key, cost = key_of(model, runner), StepCost.of(usual.samples, measured_at=time())
    return str(cost_file.path_of(key)) if cost_cache.use(model, key, cost) else None


LONGEST_WINDOW = 1024


@dataclass(frozen=True)
class Packing:
    """A model to be packed.

    Args:
        loaded: model and tokenizer; the model is packed in place.
        weights: integer format of the weights, "int8" or "int4".
        keep: patterns of layer names that keep their dtype.
        save: folder to write, or None.
    """

    loaded: LoadedModel
    weights: str
    keep: Sequence[str]
    save: Path | None

    def run(self, ids: list[int], term: Terminal) -> tuple[dict[str, Any], list[LayerError]]:
        """Pack the model; return the fields that `--json` prints, and the errors of layers.

        Args:
            ids: text to compare on; empty for no comparison.
            term: terminal that shows the progress.

        Raises:
            ConfigError: `keep` leaves no layer to round.
            InputError: no layer is large enough, or the folder cannot be written.
        """
        loaded, model = self.loaded, self.loaded.model
        errors: list[LayerError] = []
        facts: dict[str, Any] = {"model": loaded.name, "dtype": loaded.dtype, "weights": self.weights}
        before, window = _bytes(model), min(LONGEST_WINDOW, loaded.context or LONGEST_WINDOW)
        self._check()
        if ids:
            term.show_status("reading the text with the model as it is")
            before_packing = quality.perplexity(model, ids, window)
            facts |= {"tokens": len(ids), "window": window, "perplexity_before": before_packing}
        term.show_status("packing the weights")
        packing.pack(model, keep_original=bool(ids), weights=self.weights, keep=self.keep)
        if ids:
            term.show_status(f"reading the text in {self.weights}")
            with quality.watched(model) as errors:
                facts["perplexity_after"] = quality.perplexity(model, ids, window)
        facts |= {"int8_layers": packing.int8_layers(model), "int4_layers": packing.int4_layers(model)}
        facts |= {"kept_layers": packing.kept_layers(model)}
        facts |= {"bytes_before": before, "bytes_after": _bytes(model), "saved": None}
        if self.save is not None:
            term.show_status("writing the model")
            folder.save_packed(model, self.save, loaded.tokenizer)
            facts["saved"] = str(self.save)
        return facts, errors

    def _check(self) -> None:
        """Check what would otherwise fail at the end."""
        kinds = packing.packable(self.loaded.model, weights=self.weights, keep=self.keep)
        small = f"linear layers below {packing.MIN_WEIGHTS:,} weights keep their dtype"
        if not kinds:
            raise InputError(f"nothing to round to {self.weights}: {small}; give a larger model")
        if not any(issubclass(kind, Int8Linear) for kind in kinds.values()):
            raise ConfigError("keep", ",".join(self.keep), f"no layer is left to round: {small}")
        if self.save is not None:
            folder.check_target(self.save)


def encode_text(loaded: LoadedModel, text: str, path: Path, tokens: int) -> list[int]:
    """Return the first ids of a text; raises `InputError`, naming its file, for fewer than two."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise InputError(f"the text {str(path)!r} has {count(len(ids), 'token')}: give a longer one")
    return ids


def _bytes(model: Any) -> int:
    """Return the bytes of all weights, for int8 and int4 layers those of the integers even if the original is kept."""
    in_integers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    own = {id(module.weight) for module in in_integers} - packing.shared_weights(model)
    dense: int = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in own)
    return dense + sum(module.nbytes for module in in_integers)


SAVE_EVERY_S = 60.0


@dataclass
class WarmResult:
    """Result of filling a memory.

    Attributes:
        runs: statistics of each answer.
        skipped: names of unusable prompts, with the reasons.
        interrupted: Ctrl-C ended the run.
    """

    runs: list[Stats] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(run.new_tokens for run in self.runs)

    @property
    def rate(self) -> float:
        """Tokens per step over all prompts."""
        return _rate(self.runs)

    @property
    def first_tenth(self) -> float:
        """Tokens per step of the first tenth of the prompts, of one at least."""
        return _rate(self.runs[: self._tenth])

    @property
    def last_tenth(self) -> float:
        """Tokens per step of the last tenth of the prompts, of one at least."""
        return _rate(self.runs[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.runs) // 10)


def _rate(runs: list[Stats]) -> float:
    steps = sum(run.steps for run in runs)
    return sum(run.accepted_tokens for run in runs) / steps if steps else 0.0


def fill_memory(
    memory: Memory,
    encode: Encoder,
    loaded: LoadedModel,
    prompts: list[tuple[str, Prompt]],
    max_new_tokens: int,
    save: Callable[[], None],
    term: Terminal,
) -> WarmResult:
    """Fill a memory from a model's answers, one prompt after the other.

    Args:
        memory: draft memory to fill.
        encode: encoder of the prompts.
        loaded: model and tokenizer.
        prompts: prompts with their names for messages.
        max_new_tokens: token limit of each answer.
        save: saves the memory; called every minute, at the end, and after Ctrl-C.
        term: terminal that shows the progress.
    """
    result, saved_at = WarmResult(), perf_counter()
    config = LookaheadConfig(memory=memory)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Interrupt() as interrupt:  # between generations, which have their own
        with Progress(*columns, console=term.err, transient=True, disable=not term.animated) as progress:
            task = progress.add_task("prompts", total=len(prompts))
            for done, (name, prompt) in enumerate(prompts, start=1):
                try:
                    ids = encode(prompt)
                except InputError as problem:
                    term.say(f"skipped: {name}: {problem}", "yellow")
                    result.skipped.append((name, str(problem)))
                else:
                    room = loaded.room(ids, max_new_tokens, within=True)
                    run = decode(loaded, ids, lookahead=config, max_new_tokens=room, term=term, on_step=_ignore)
                    result.runs.append(run.stats)
                    result.interrupted = run.interrupted
                progress.update(task, completed=done, description=f"prompts · {result.rate:.2f} tokens per step")
                if perf_counter() - saved_at > SAVE_EVERY_S:
                    save()
                    saved_at = perf_counter()
                result.interrupted |= interrupt.requested
                if result.interrupted:
                    break
        if result.runs:  # an empty memory must not replace a good one
            save()
        result.interrupted |= interrupt.requested
    return result


def _ignore(step: object) -> None:
    """Do nothing with a step: the answers are not shown."""
