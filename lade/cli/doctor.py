"""`lade doctor`: whether all is well with the machine and a model, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text

from lade.cli.info import facts_of, show_facts
from lade.cli.options import decoding as options
from lade.cli.options.grouping import in_panel
from lade.cli.terminal import Terminal, count, terminal
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.diagnosis import Curve

EXAMPLE = "Example:  [bold]lade doctor --model gpt2[/bold]"
LONGEST_S, MOST_CACHED = 86_400, 10**6
_what = in_panel("What to measure")
_BAR_WIDTH = 32


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `lade doctor`."""

    model_argument: options.NamedModel = None
    cached: Annotated[int, _what(metavar="P", help="Tokens in the cache while passes are measured.")] = 256
    seconds: Annotated[float, _what(metavar="S", help="Time limit for measuring passes.")] = 5.0
    threads: options.Threads = None

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        if not 1 <= self.cached <= MOST_CACHED:
            raise ConfigError("cached", self.cached, f"give a whole number >= 1 and <= {MOST_CACHED}")
        if not 0 < self.seconds <= LONGEST_S:
            raise ConfigError("seconds", self.seconds, f"give a number > 0 and <= {LONGEST_S}, a day")
        options.check_threads(self.threads)


@options.grouped
def doctor(
    wanted: DoctorOptions,
    *,
    loading: options.Loading,
    pack: options.Pack = None,
    invariant: options.Invariant = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Check machine, versions and a model, measure its passes, try drafting, and say what to change.

    The times of passes are saved for later generations, which otherwise measure them in about a second.
    """
    with terminal(output) as term:
        wanted.check()
        loading = loading.with_model(wanted.model_argument)
        loading.check()
        loading.check_layout(pack, invariant=invariant)
        from lade.cli import diagnosis
        from lade.cli.loading.load import load

        term.out.quiet = json
        found: dict[str, Any] = {"machine": diagnosis.machine(), "versions": diagnosis.versions()}
        for part, facts in found.items():
            _show(part, facts, term)
        loaded = load(loading, term=term, pack=pack, invariant=invariant, threads=wanted.threads)
        found["model"] = {**facts_of(loaded), **diagnosis.layout(loaded)}
        _show("model", found["model"], term)
        if found["model"]["supported"]:
            term.say(f"measuring passes: {wanted.seconds:g} s", "dim")
            curve = diagnosis.measured_curve(loaded, wanted.cached, wanted.seconds)
            found["curve"] = curve.as_dict()
            _show_curve(curve, term)
            term.say("answering three prompts with and without drafts", "dim")
            found["trial"] = diagnosis.trial(loaded, curve, term)
            _show("trial", found["trial"], term)
        found["advice"] = diagnosis.advice(found)
        _title("what to change", term)
        for line in found["advice"] or ["nothing: all is well"]:
            term.out.print(Text(f"- {line}"))
        if json:
            term.out.quiet = False
            term.write_json(found)


def _title(text: str, term: Terminal) -> None:
    term.out.print(Text(f"\n{text}", "bold"))


def _show(part: str, facts: Mapping[str, Any], term: Terminal) -> None:
    _title(part, term)
    show_facts({name: value for name, value in facts.items() if value is not None}, term)


def _show_curve(curve: Curve, term: Terminal) -> None:
    from lade.cli.diagnosis import FREE

    price = f"{count(curve.free, 'token')} for the price of one (up to {FREE:g} times)"
    _title(f"passes over {count(curve.cached, 'cached token')}: {price}", term)
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "ms", "relative"):
        table.add_column(name, justify="right")
    table.add_column("")
    longest = max(map(curve.median, curve.samples))
    for size in curve.samples:
        middle = curve.median(size)
        bar = "█" * max(1, round(_BAR_WIDTH * middle / longest))
        style = "green" if size <= curve.free else "cyan"
        table.add_row(str(size), f"{1e3 * middle:.2f}", f"{middle / curve.median(1):.2f}", Text(bar, style))
    term.out.print(table)
    term.say(f"saved to {curve.saved}" if curve.saved else "not saved", "dim")
