"""Display of `lade demo`: panels on a terminal, paragraphs in a pipe, a table and what to do next at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from time import perf_counter, sleep

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lade.cli.demo.race import PLAIN, Lane, Race, legend
from lade.cli.demo.rounds import KEPT
from lade.cli.options.decoding import Choices
from lade.cli.terminal import Terminal, count

NEXT = """For a model of your own, after import lade:

    lade.pack(model)      # on a CPU
    lade.enable(model)
    output = model.generate(**inputs, max_new_tokens=200)"""
_NOTE = "tokens/s: decoding without prefill, each method alone · per pass: tokens per forward pass"
_FRAME_S = 0.08
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
    """Draws a race as one panel per method: as it runs, one method after the other, then all together.

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
        self._live.update(self._panels(self._race.panels, self._end()), refresh=True)
        self._live.stop()

    def draw(self) -> None:
        """Draw the current state, at most once per frame."""
        if perf_counter() - self._drawn >= _FRAME_S:
            self._live.update(self._panels(self._race.panels, "generating, one method at a time"), refresh=True)
            self._drawn = perf_counter()

    def replay(self) -> None:
        """Show a finished race again, all methods side by side at the speed that each had."""
        start = perf_counter()
        while (seconds := perf_counter() - start) < self._race.seconds:
            self._live.update(self._panels(self._race.at(seconds), "side by side, in real time"), refresh=True)
            sleep(_FRAME_S)

    def _end(self) -> str:
        speed = "" if self._race.speedup is None else f", {self._race.speedup:.2f} times as fast"
        return verdict(self._race) + speed

    def _panels(self, lanes: Sequence[Lane], status: str) -> Group:
        grid = Table.grid(expand=True)
        for _ in lanes:
            grid.add_column(ratio=1)
        grid.add_row(*(self._panel(lane, "green" if lane is lanes[-1] else "white") for lane in lanes))
        return Group(Text.assemble((self._title, "bold"), (f" · {status}", "bold yellow"), overflow="ellipsis"), grid)

    def _panel(self, lane: Lane, border: str) -> Panel:
        text = Text.assemble((self._prompt, "dim"), *lane.pieces)
        figures = f"{lane.stats.new_tokens} tokens, {lane.stats.decode_s:.1f} s\n{_rate(lane)} tokens/s"
        shown = Text(figures, "yellow", no_wrap=True, overflow="ellipsis")
        return Panel(Group(Tail(text, self._height), shown), title=f"[bold]{lane.name}[/bold]", border_style=border)


def _rate(lane: Lane) -> str:
    return "-" if lane.tokens_per_s is None else f"{lane.tokens_per_s:.1f}"


def describe(term: Terminal, title: str, prompt: str, race: Race) -> None:
    """Write a race as plain text."""
    term.write(f"=== {title}\n{prompt}{race.lookahead.text}\n\n")
    for lane in race.lanes:
        stats = lane.stats
        passes = f"{count(stats.steps, 'pass', 'passes')} · {stats.tokens_per_step:.2f} a pass"
        term.write(f"{lane.name:>20}: {count(stats.new_tokens, 'token')} · {passes} · {_rate(lane)} tokens/s\n")
    if race.speedup is not None:
        term.write(f"{'':>20}  {verdict(race)}, {race.speedup:.2f} times as fast\n\n")


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
    """Return a table with a row per text and method, slower ones in red, and one per method for all texts."""
    table = Table(show_edge=False, pad_edge=False)  # fits 80 columns
    for column in ("prompt", "method", "tokens/s", "per pass", "speed-up", "text"):
        table.add_column(column, justify="left" if column in ("prompt", "method", "text") else "right", no_wrap=True)
    by_prompt = _by_prompt(races)
    for number, own in enumerate(by_prompt, 1):
        _add_rows(table, str(number), [[pair] for pair in own])
    if len(by_prompt) > 1 and len({len(own) for own in by_prompt}) == 1:
        _add_rows(table, "all", [list(pairs) for pairs in zip(*by_prompt, strict=True)])
    return table


Pair = tuple[Lane, Lane]
"""A lane and that of `model.generate` for the same prompt."""


def _by_prompt(races: Sequence[Race]) -> list[list[Pair]]:
    """Return the lanes of each prompt, those that races share once."""
    lanes: dict[int, list[Pair]] = {}
    for race in races:
        own = lanes.setdefault(id(race.plain), [(lane, race.plain) for lane in race.rivals])
        own.append((race.lookahead, race.plain))
    return list(lanes.values())


def _add_rows(table: Table, prompt: str, rows: Sequence[Sequence[Pair]]) -> None:
    for index, pairs in enumerate(rows):
        speed = _speedup(pairs)
        same = all(lane.token_ids == plain.token_ids for lane, plain in pairs)
        steps = sum(lane.stats.steps for lane, _ in pairs)
        emitted = sum(lane.stats.accepted_tokens for lane, _ in pairs)
        seconds = sum(lane.stats.decode_s for lane, _ in pairs)
        lost = speed is not None and speed < 1
        table.add_row(
            "" if index else prompt,
            pairs[0][0].name,
            f"{emitted / seconds:.1f}" if seconds else "-",
            f"{emitted / steps:.2f}" if steps else "-",
            "-" if speed is None else f"{speed:.2f}",
            "" if not index else "same" if same else "DIFFERS",
            style="red" if lost or not same else "bold" if index + 1 == len(rows) else "",
            end_section=index + 1 == len(rows),
        )


def _speedup(pairs: Sequence[Pair]) -> float | None:
    """Return tokens per second over those of `model.generate`; None without any time."""
    rates = [0.0, 0.0]
    for side in (0, 1):
        stats = [pair[side].stats for pair in pairs]
        seconds = sum(each.decode_s for each in stats)
        rates[side] = sum(each.accepted_tokens for each in stats) / seconds if seconds else 0.0
    return rates[0] / rates[1] if rates[1] else None


def total_speedup(races: Sequence[Race]) -> float | None:
    """Return the speed-up over `model.generate` of all races together; None without any time."""
    return _speedup([(race.lookahead, race.plain) for race in races])


def conclusion(races: Sequence[Race], learned: int) -> str:
    """Return in words that the texts are equal, the speed-up of each method, and where it was slower.

    Args:
        races: all races of the demo.
        learned: number of texts that the memory was filled from.
    """
    tokens = sum(len(race.lookahead.token_ids) for race in races)
    lines = [f"All {tokens} tokens are those of transformers' own {PLAIN}.", *_speeds(races, learned)]
    return "\n".join(lines)


def _speeds(races: Sequence[Race], learned: int) -> Iterator[str]:
    for name, group in groupby(races, key=lambda race: race.name):
        own = list(group)
        speed = total_speedup(own)
        if speed is None:
            continue
        source = f" (filled from {count(learned, 'other text')})" if name == KEPT else ""
        lost = sum(race.speedup is not None and race.speedup < 1 for race in own)
        loss = f"; slower on {lost} of {count(len(own), 'prompt')}" if lost else ""
        yield f"{name}: {speed:.2f} times as fast{source}{loss}"


def footnote() -> Text:
    """Return the legend of panels and table."""
    return Text.assemble(legend(), (f"\n{_NOTE}", "dim"))
