"""`lade tune`: measure the time of a forward pass by the number of tokens it feeds, and save it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.options.grouping import check_picture, in_panel
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, count, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.preparation import MeasuredCosts, Sweep

EXAMPLE = "Example:  [bold]lade tune --model gpt2 --cached 64,1024 --out cost.svg[/bold]"
LONGEST_S = 86_400
_what = in_panel("What to measure")
_BAR_WIDTH = 32


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
    invariant: options.Invariant = None,
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
        from lade.cli.preparation import measure_costs

        loaded = load(loading, term=term, pack=pack, invariant=invariant, threads=measuring.threads)
        costs = measure_costs(loaded.model, lengths, measuring.seconds, term)
        if json:
            term.write_json({**loaded.facts, **costs.as_dict()})
        else:
            _show(costs, term)
        if measuring.out is not None:
            draw(costs.sweeps, f"{loaded.name}, {loaded.dtype}{loaded.layout}", measuring.out)
        term.say(f"saved to {costs.saved}" if costs.saved else "not saved", "dim" if costs.saved else "yellow")
        if costs.interrupted:
            term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED)


def _show(costs: MeasuredCosts, term: Terminal) -> None:
    from lade.cli.preparation import FREE

    for sweep in costs.sweeps:
        price = f"{count(sweep.free, 'token')} for the price of one (at most {FREE:g} times its time)"
        term.out.print(Text(f"{sweep.cached} cached tokens: {price}", "bold"))
        term.out.print(_table(sweep))


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

    from lade.cli.preparation import FREE

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
