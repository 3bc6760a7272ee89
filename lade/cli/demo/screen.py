"""Display of `lade demo`: two panels on a terminal, paragraphs in a pipe, a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from time import perf_counter, sleep

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lade.cli.demo.rounds import KEPT
from lade.cli.demo.side_by_side import Lane, Race
from lade.cli.options.decoding import Choices
from lade.cli.run import legend
from lade.cli.terminal import Terminal

_FRAME_S = 0.08
_NOTE = """
per pass: tokens, of the method · seconds: decoding after prefill, each on its own clock, without drawing
4-grams: share of distinct ones in the output; a text that repeats itself is easy to guess"""
_SMALLEST_HEIGHT, _LARGEST_HEIGHT = 6, 30


class Tail:
    """The last lines of a text that fit into a height."""

    def __init__(self, text: Text, height: int) -> None:
        self._text, self._height = text, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wrap the text to the width at hand and show its end."""
        lines = list(self._text.wrap(console, options.max_width, tab_size=4))[-self._height :]
        lines += [Text()] * (self._height - len(lines))
        yield from lines


class LiveView:
    """Draws a race as two panels, live and as a replay.

    Args:
        term: terminal to draw on.
        title: title above the panels.
        prompt: text shown before each continuation.
        race: race to draw, running or finished.
    """

    def __init__(self, term: Terminal, title: str, prompt: str, race: Race) -> None:
        self._title, self._prompt, self._race = title, prompt, race
        self._height = max(_SMALLEST_HEIGHT, min(_LARGEST_HEIGHT, term.out.height - 10))
        self._live = Live(console=term.out, auto_refresh=False, vertical_overflow="crop")
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._live.update(self._panels(*self._lanes, self._end()), refresh=True)
        self._live.stop()

    @property
    def _lanes(self) -> tuple[Lane, Lane]:
        return self._race.plain, self._race.lookahead

    def draw(self) -> None:
        """Draw the current state, at most once per frame."""
        if perf_counter() - self._drawn >= _FRAME_S:
            self._live.update(self._panels(*self._lanes, "as it runs"), refresh=True)
            self._drawn = perf_counter()

    def replay(self, slower: float) -> None:
        """Replay a finished race.

        Args:
            slower: slow-down factor, above 1.
        """
        start = perf_counter()
        while (seconds := (perf_counter() - start) / slower) < self._race.seconds:
            status = f"the same, {slower:.3g} times slower"
            self._live.update(self._panels(*self._race.at(seconds), status), refresh=True)
            sleep(_FRAME_S)

    def _end(self) -> str:
        speed = "" if self._race.speedup is None else f", {self._race.speedup:.2f} times as fast"
        return verdict(self._race) + speed

    def _panels(self, plain: Lane, fast: Lane, status: str) -> Group:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(self._panel("plain", plain, "white"), self._panel(self._race.name, fast, "green"))
        return Group(Text.assemble((self._title, "bold"), (f" · {status}", "bold yellow"), overflow="ellipsis"), grid)

    def _panel(self, name: str, lane: Lane, border: str) -> Panel:
        text = Text.assemble((self._prompt, "dim"), *lane.pieces)
        stats = lane.stats
        counts = f"{stats.new_tokens} tokens, {stats.steps} passes: {stats.tokens_per_step:.2f} each"
        figures = Text(f"{counts}\n{stats.decode_s:.2f} s", "yellow", no_wrap=True, overflow="ellipsis")
        return Panel(Group(Tail(text, self._height), figures), title=f"[bold]{name}[/bold]", border_style=border)


def figures(lane: Lane) -> str:
    """Return a line of counters."""
    stats = lane.stats
    return (
        f"{stats.new_tokens} tokens · {stats.steps} passes · {stats.tokens_per_step:.2f} a pass · "
        f"{stats.decode_s:.2f} s · 4-grams {lane.distinct_4grams:.0%}"
    )


def describe(term: Terminal, title: str, prompt: str, race: Race) -> None:
    """Write a race as plain text."""
    term.write(f"=== {title}\n{prompt}{race.lookahead.text}\n\n")
    for name, lane in (("plain", race.plain), (race.name, race.lookahead)):
        term.write(f"{name:>11}: {figures(lane)}\n")
    if race.speedup is not None:
        term.write(f"{'':>11}  {verdict(race)}, {race.speedup:.2f} times as fast\n\n")


def sampling_text(choices: Choices) -> str:
    """Return how tokens are chosen, in words."""
    return f"sampled, temperature {choices.temperature:g}, seed {choices.seed}" if choices.do_sample else "greedy"


def verdict(race: Race) -> str:
    """Return whether the texts are equal, and if not, from which token on."""
    if race.same:
        return "same text"
    pairs = zip(race.plain.token_ids, race.lookahead.token_ids, strict=False)
    shorter = min(len(race.plain.token_ids), len(race.lookahead.token_ids))
    place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    return f"THE TEXTS DIFFER from token {place} on"


def summary(races: Sequence[Race]) -> Table:
    """Return a table with a row per round, and one per method for all rounds."""
    sampled = next((sampling_text(race.choices) for race in races if race.choices.do_sample), None)
    table = Table(title="plain / method", title_style="bold", show_edge=False, pad_edge=False)  # fits 80 columns
    table.caption = f"*: {sampled}" if sampled else None
    for column in ("round", "text", "passes", "per pass", "seconds", "speed-up", "4-grams"):
        table.add_column(column, justify="left" if column in ("round", "text") else "right", no_wrap=True)
    number = 0
    for name, group in groupby(races, key=lambda race: race.name):
        own = list(group)
        for race in own:
            number += 1
            mark = "*" if race.choices.do_sample else ""
            table.add_row(*_row(f"{number}{mark}", [race]), style="" if race.same else "bold red")
        table.add_row(*_row(name, own), style="bold", end_section=True)
    return table


def total_speedup(races: Sequence[Race]) -> float | None:
    """Return the speed-up over plain decoding of all rounds together; None without any time."""
    seconds = sum(race.lookahead.stats.decode_s for race in races)
    return sum(race.plain.stats.decode_s for race in races) / seconds if seconds else None


def conclusion(races: Sequence[Race], learned: int) -> str:
    """Return in words that the texts are equal, and the speed-up of each method.

    Args:
        races: all races of the demo.
        learned: number of texts that the memory was filled from.
    """
    tokens = sum(len(race.plain.token_ids) for race in races)
    lines = [f"All {tokens} tokens are those of transformers' own model.generate."]
    for name, group in groupby(races, key=lambda race: race.name):
        speed = total_speedup(list(group))
        others = f"{learned} other text{'' if learned == 1 else 's'}"
        source = f" (it had learned from {others})" if name == KEPT else ""
        lines += [f"{name}: {speed:.2f} times as fast{source}"] if speed is not None else []
    return "\n".join(lines)


def _row(name: str, races: Sequence[Race]) -> list[str]:
    plain, fast = [race.plain for race in races], [race.lookahead for race in races]
    steps = sum(lane.stats.steps for lane in fast)
    seconds = sum(lane.stats.decode_s for lane in fast)
    plain_seconds = sum(lane.stats.decode_s for lane in plain)
    emitted = sum(lane.stats.accepted_tokens for lane in fast)
    distinct = sum(lane.distinct_4grams for lane in fast) / len(fast)
    return [
        name,
        "same" if all(race.same for race in races) else "DIFFER",
        f"{sum(lane.stats.steps for lane in plain)} / {steps}",
        f"{emitted / steps:.2f}" if steps else "-",
        f"{plain_seconds:.2f} / {seconds:.2f}",
        f"{plain_seconds / seconds:.2f}" if seconds else "-",
        f"{distinct:.0%}",
    ]


def footnote() -> Text:
    """Return the legend of panels and table."""
    return Text.assemble(legend(), (_NOTE, "dim"))
