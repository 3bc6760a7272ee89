"""`lade tune`: measure the time of a forward pass by the number of tokens it feeds, and save it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.options.grouping import check_picture, in_panel
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.loading.load import LoadedModel
    from lade.cli.run import Interrupt
    from lade.model.runner import EagerRunner
    from lade.tuning.step_cost import StepCost

EXAMPLE = "Example:  [bold]lade tune --model gpt2 --cached 64,1024 --out cost.svg[/bold]"
FREE = 1.2
"""A pass of several tokens counts as free up to this multiple of the time of one token."""

LONGEST_S = 86_400
_what = in_panel("What to measure")
_BAR_WIDTH = 32
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
        dear = [size for size in self.sizes if self.median(size) > limit]
        return max(size for size in self.sizes if size < (dear or [self.sizes[-1] + 1])[0])

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
class TuneOptions:
    """Options of `lade tune`.

    Attributes:
        cached: comma-separated numbers of tokens in the cache.
        seconds: time limit for all lengths together.
        out: file of a plot.
        threads: number of CPU threads.
    """

    cached: Annotated[str, _what(metavar="P,P,...", help="Tokens in the cache; each length is measured.")] = "256"
    seconds: Annotated[float, _what(metavar="S", help="Time limit for all lengths together.")] = 20.0
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel="Results", help="Plot the curves to a .svg, .png or .pdf file."),
    ] = None
    threads: options.Threads = None

    def lengths(self) -> list[int]:
        """Return the lengths of the cache.

        Raises:
            ConfigError, MissingExtraError: an option is out of range, or matplotlib is missing.
        """
        lengths = options.whole_numbers("cached", self.cached, 1, "64,1024")
        if not 0 < self.seconds <= LONGEST_S:
            raise ConfigError("seconds", self.seconds, f"give a number > 0 and <= {LONGEST_S}, a day")
        options.check_threads(self.threads)
        if self.out is not None:
            check_picture(self.out)
        return lengths


@options.grouped
def tune(
    measuring: TuneOptions,
    *,
    loading: options.Loading,
    pack: options.Pack = None,
    invariant: options.Invariant = False,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Measure the cost of a step by the number of tokens it feeds, and save it for later generations.

    The first generation with a model measures this in about a second; this command measures more accurately.

    Ctrl-C keeps what was measured.
    """
    with terminal(output) as term:
        lengths = measuring.lengths()
        loading.check_layout(pack, invariant=invariant)
        from lade.cli.loading.load import load

        loaded = load(loading, term=term, pack=pack, invariant=invariant, threads=measuring.threads)
        _run(loaded, lengths, measuring, term, json=json)


def _run(loaded: LoadedModel, lengths: list[int], measuring: TuneOptions, term: Terminal, *, json: bool) -> None:
    from lade.cli.run import Interrupt
    from lade.cli.terminal import count
    from lade.model.facts import ModelFacts
    from lade.model.runner import runner_for
    from lade.model.supports import supports, unwrap

    plan = supports(loaded.model).require()
    model = unwrap(loaded.model)
    runner = runner_for(ModelFacts.of(model), plan, model.generation_config)
    with Interrupt() as interrupt:
        sweeps = _measure(runner, lengths, measuring.seconds, interrupt, term)
    saved = _save(model, runner, sweeps, interrupted=interrupt.requested)
    if json:
        found = {"profile": saved, "interrupted": interrupt.requested, "sweeps": [sweep.as_dict() for sweep in sweeps]}
        term.write_json({**loaded.facts, **found})
    else:
        for sweep in sweeps:
            price = f"{count(sweep.free, 'token')} for the price of one (at most {FREE:g} times its time)"
            term.out.print(Text(f"{sweep.cached} cached tokens: {price}", "bold"))
            term.out.print(_table(sweep))
    if measuring.out is not None:
        draw(sweeps, f"{loaded.name}, {loaded.dtype}{loaded.layout}", measuring.out)
    term.say(f"saved to {saved}" if saved else "not saved", "dim" if saved else "yellow")
    if interrupt.requested:
        term.say("interrupted", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED)


def _measure(
    runner: EagerRunner, lengths: list[int], seconds: float, interrupt: Interrupt, term: Terminal
) -> list[Sweep]:
    """Return one sweep per length, up to the one that Ctrl-C ended, which has at least a single token."""
    sweeps: list[Sweep] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=term.err, transient=True, disable=not term.animated) as progress:
        for length in lengths:
            if not (sweeps and interrupt.requested):
                sweeps.append(_sweep(runner, length, seconds / len(lengths), interrupt, progress))
    return sweeps


def _sweep(runner: EagerRunner, cached: int, seconds: float, interrupt: Interrupt, progress: Progress) -> Sweep:
    from time import perf_counter

    from lade.tuning.measure import SIZES, StepTimer, samples_of
    from lade.tuning.step_cost import KNOTS

    vocabulary = runner.model.get_input_embeddings().weight.shape[0]
    timer = StepTimer(runner, vocabulary=vocabulary, largest=KNOTS[-1], cached=cached)
    order = [*SIZES, *(knot for knot in KNOTS if knot not in SIZES)]
    sweep = Sweep(timer.cached, [size for size in order if size <= timer.largest])
    task = progress.add_task(f"{timer.cached} cached tokens", total=seconds)
    start = perf_counter()
    for size, taken in samples_of(timer, sweep.wanted, budget_s=seconds, rounds=_ROUNDS):
        sweep.samples.setdefault(size, []).append(taken)
        progress.update(task, completed=perf_counter() - start)
        if interrupt.requested:
            break
    sweep.samples = {size: taken[1:] or taken for size, taken in sweep.samples.items()}
    return sweep


def _save(model: Any, runner: EagerRunner, sweeps: list[Sweep], *, interrupted: bool) -> str | None:
    """Save the curve of the length at which generations measure, or of the nearest one.

    A curve that Ctrl-C left incomplete is not saved, as an older one may be better.

    Returns:
        Path of the file; None if nothing was saved.
    """
    from math import log
    from time import time

    from lade.tuning import cost_cache as profile
    from lade.tuning import cost_file as store
    from lade.tuning.cost_key import key_of
    from lade.tuning.measure import CACHED_TOKENS
    from lade.tuning.step_cost import StepCost

    usual = min(sweeps, key=lambda sweep: abs(log(sweep.cached / CACHED_TOKENS)))
    if interrupted and len(usual.samples) < len(usual.wanted):
        return None
    cost: StepCost = StepCost.of(usual.samples, measured_at=time())
    key = key_of(model, runner)
    return str(store.path_of(key)) if profile.use(model, key, cost) else None


def _table(sweep: Sweep) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "ms", "quartiles", "relative"):
        table.add_column(name, justify="right")
    table.add_column("")
    longest = max(map(sweep.median, sweep.sizes))
    for size in sweep.sizes:
        middle, (low, high) = sweep.median(size), sweep.quartiles(size)
        bar = "█" * max(1, round(_BAR_WIDTH * middle / longest))
        table.add_row(
            str(size),
            f"{1e3 * middle:.2f}",
            f"{1e3 * low:.2f}-{1e3 * high:.2f}",
            f"{middle / sweep.median(1):.2f}",
            Text(bar, "green" if size <= sweep.free else "cyan"),
        )
    return table


def draw(sweeps: list[Sweep], title: str, out: Path) -> None:
    """Plot the curves with their quartiles; the suffix of the file decides the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for sweep in sweeps:
        quartiles = [sweep.quartiles(size) for size in sweep.sizes]
        medians = [1e3 * sweep.median(size) for size in sweep.sizes]
        (line,) = axes.plot(sweep.sizes, medians, marker="o", label=f"{sweep.cached} cached tokens")
        low, high = ([1e3 * pair[i] for pair in quartiles] for i in (0, 1))
        axes.fill_between(sweep.sizes, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axes.axhline(FREE * medians[0], color=line.get_color(), linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sweeps[0].sizes, [str(size) for size in sweeps[0].sizes], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"tokens fed by a forward pass (dotted: {FREE:g} times the time of one)")
    axes.set_ylabel("milliseconds")
    axes.set_title(title)
    axes.legend(frameon=False)
    figure.savefig(out)
