"""`lade bench compare`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.terminal import Terminal, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade_lab.compare import Change, Comparison, Interval, Steps


EXAMPLE = "Example:  [bold]lade bench compare before/results.json after/results.json --tolerance 5%[/bold]"
EXIT_SLOWER = 1

_SHOWN = {"faster": ("faster", "green"), "slower": ("slower", "red"), "no difference seen": ("none seen", "dim")}
_CLOCKS = ("decoding", "call")


@options.grouped
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="results.json of the earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="results.json of the later run.")],
    tolerance: Annotated[
        str, typer.Option(metavar="SHARE", help="How much slower a method may get, such as 3% or 0.03.")
    ] = "3%",
    *,
    absolute: Annotated[
        bool,
        typer.Option("--absolute", help="Compare tokens per second instead of speed-ups over the reference method."),
    ] = False,
    clock: Annotated[
        str,
        typer.Option(metavar="|".join(_CLOCKS), help="Time after the first token, or of the whole call."),
    ] = "decoding",
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs even if their models or settings differ.")
    ] = False,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Compare two benchmark runs: what got faster or slower, and what is noise.

    Compares speed-ups over the reference method, so that the speed of the machine cancels out.

    Exit code 1: a method got slower, beyond noise and by more than the tolerance. 0: none did. 2: bad input.
    """
    with terminal(output) as term:
        share = tolerance_of(tolerance)
        if clock not in _CLOCKS:
            raise ConfigError("clock", clock, f"give one of {', '.join(_CLOCKS)}")
        from lade_lab import compare as library
        from lade_lab.results import Results
        from lade_lab.summary import CALL, DECODING

        found = library.compare(
            Results.load(before),
            Results.load(after),
            tolerance=share,
            force=force,
            absolute=absolute,
            clock=CALL if clock == "call" else DECODING,
        )
        _warn(found, term)
        if json:
            term.write_json(found.as_dict())
        else:
            _print(found, library.drift(found), term)
        if found.failures:
            raise typer.Exit(EXIT_SLOWER)


def tolerance_of(text: str) -> float:
    """A share: 3% and 0.03 are the same.

    Raises:
        ConfigError: it is no number from 0 to 1.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100.0 if percent else 1.0)
    except ValueError:
        share = math.nan
    if rest or not 0.0 <= share < 1.0:
        raise ConfigError("tolerance", text, "give a fraction from 0 to 1, such as 3% or 0.03")
    return share


def _warn(found: Comparison, term: Terminal) -> None:
    for warning in [*(f"compared anyway: {each}" for each in found.forced), *found.warnings]:
        term.say(warning, "yellow")


def _print(found: Comparison, drift: float | None, term: Terminal) -> None:
    term.out.print(_table(found))
    if drift is not None:
        term.out.print(
            f"The reference, {found.reference}, ran at {drift:.3f} times its speed in A: the machine, its load or "
            "transformers. Speed-ups over it are judged; --absolute judges tokens per second."
        )
    for change in found.changes:
        for line in _exact(change):
            term.out.print(Text(f"{_name(change, found)}: {line}"))
    for mark, names in (("only in A", found.only_a), ("only in B", found.only_b)):
        for name in names:
            term.out.print(Text(f"{mark}: {name}", "dim"))
    failures = ", ".join(_name(change, found) for change in found.failures)
    limit = f"by more than {100 * found.tolerance:.3g} % beyond noise"
    verdict = f"slower {limit}: {failures}" if failures else f"nothing got slower {limit}"
    term.out.print(Text(verdict, "bold red" if failures else "bold green"))


def _table(found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", overflow="fold")
    for name in ("pairs", "tokens/s", "interval", "speed-up", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("difference", no_wrap=True)
    for change in found.changes:
        shown, style = ("reference", "dim") if change.judged == "reference" else _SHOWN[change.verdict]
        if shown == "slower" and not change.fails(found.tolerance):
            shown = "tolerated"
        table.add_row(
            _name(change, found),
            str(change.pairs),
            f"{change.rate.ratio:.3f}",
            _ends(change.rate),
            "" if change.speedup is None else f"{change.speedup.ratio:.3f}",
            "" if change.speedup is None else _ends(change.speedup),
            Text(shown, style),
        )
    table.caption = "B over A: above 1 is faster. All intervals hold together in 95 of 100 comparisons."
    table.caption_justify = "left"
    return table


def _ends(interval: Interval) -> str:
    if not math.isfinite(interval.high):
        return "too few"
    return f"{interval.low:.3f}-{interval.high:.3f}"


def _exact(change: Change) -> list[str]:
    """Noise-free columns: tokens per step, and the tokens themselves."""
    lines = []
    if change.paths:
        before, after = change.steps_before, change.steps_after
        lines.append(
            f"tokens per step {_rate(before)} -> {_rate(after)} ({before.tokens} tokens in {before.passes} steps -> "
            f"{after.tokens} in {after.passes}); {change.paths} of {change.pairs} answers took other steps"
        )
    if change.texts:
        lines.append(f"{change.texts} of {change.pairs} answers have other tokens")
    return lines


def _rate(steps: Steps) -> str:
    return "none" if steps.tokens_per_step is None else f"{steps.tokens_per_step:.4f}"


def _name(change: Change, found: Comparison) -> str:
    several = len({each.workload for each in found.changes}) > 1
    return f"{change.workload}: {change.method}" if several else change.method
