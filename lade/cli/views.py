"""What `lade demo` looks like: two panels on a terminal, paragraphs in a pipe, a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, sleep

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lade.cli.options import Choices
from lade.cli.painter import legend
from lade.cli.race import Lane, Race
from lade.cli.terminal import Terminal

_FRAME_S = 0.08
_NOTE = """
per pass: tokens, of lookahead · seconds: decoding after prefill, each on its own clock, without drawing
4-grams: share of distinct ones in the output; a text that repeats itself is easy to guess"""
_SMALLEST_HEIGHT, _LARGEST_HEIGHT = 6, 30


class Tail:
    """The last lines of a text, as many as there is room for."""

    def __init__(self, text: Text, height: int) -> None:
        self._text, self._height = text, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wrap the text to the width at hand and show its end."""
        lines = list(self._text.wrap(console, options.max_width, tab_size=4))[-self._height :]
        lines += [Text()] * (self._height - len(lines))
        yield from lines


class LiveView:
    """Draws a race as two panels, a few times a second.

    Args:
        term: where.
        title: of the picture.
        prompt: shown before each text.
        race: what is drawn.
        slow_motion: how many times slower than it ran, for models too fast to watch; no clock counts the waiting.
    """

    def __init__(self, term: Terminal, title: str, prompt: str, race: Race, slow_motion: float = 1.0) -> None:
        self._prompt, self._race, self._slow_motion = prompt, race, slow_motion
        self._title = title if slow_motion == 1 else f"{title} · shown {slow_motion:g} times slower than it ran"
        self._height = max(_SMALLEST_HEIGHT, min(_LARGEST_HEIGHT, term.out.height - 10))
        self._live = Live(console=term.out, auto_refresh=False, vertical_overflow="crop")
        self._drawn = 0.0

    def __enter__(self) -> LiveView:
        self._live.start()
        self._begun = perf_counter()
        return self

    def __exit__(self, *problem: object) -> None:
        self._live.update(self._picture(), refresh=True)
        self._live.stop()

    def draw(self) -> None:
        """Draw, unless that was done just now; in slow motion wait until the picture is due."""
        ran = max(lane.stats.decode_s for lane in (self._race.plain, self._race.lookahead))
        if self._slow_motion > 1:
            sleep(max(0.0, self._slow_motion * ran - (perf_counter() - self._begun)))
        if perf_counter() - self._drawn >= _FRAME_S:
            self._live.update(self._picture(), refresh=True)
            self._drawn = perf_counter()

    def _picture(self) -> Group:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(self._panel("plain", self._race.plain), self._panel("lookahead", self._race.lookahead))
        return Group(Text(self._title, "bold"), grid)

    def _panel(self, name: str, lane: Lane) -> Panel:
        text = Text.assemble((self._prompt, "dim"), *lane.pieces)
        content = Group(Tail(text, self._height), Text(figures(lane), "yellow"))
        return Panel(content, title=f"[bold]{name}[/bold]", border_style="green" if name == "lookahead" else "white")


def figures(lane: Lane) -> str:
    """One line of counters."""
    stats = lane.stats
    return (
        f"{stats.new_tokens} tokens · {stats.steps} passes · {stats.tokens_per_step:.2f} a pass · "
        f"{stats.decode_s:.2f} s · 4-grams {lane.distinct_4grams:.0%} distinct"
    )


def describe(term: Terminal, title: str, prompt: str, race: Race) -> None:
    """The same as plain text."""
    term.write(f"=== {title}\n{prompt}{race.lookahead.text}\n\n")
    for name, lane in (("plain", race.plain), ("lookahead", race.lookahead)):
        term.write(f"{name:>9}: {figures(lane)}\n")
    if race.speedup is not None:
        term.write(f"{'':>9}  {verdict(race)}, {race.speedup:.2f} times as fast\n\n")


def manner(choices: Choices) -> str:
    """How the texts of a race come about."""
    return f"sampled, temperature {choices.temperature:g}, seed {choices.seed}" if choices.do_sample else "greedy"


def verdict(race: Race) -> str:
    """Whether the texts are equal; where not, from which token on."""
    if race.same:
        return "same text"
    pairs = zip(race.plain.token_ids, race.lookahead.token_ids, strict=False)
    shorter = min(len(race.plain.token_ids), len(race.lookahead.token_ids))
    place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    return f"THE TEXTS DIFFER from token {place} on"


def summary(races: Sequence[Race]) -> Table:
    """One row a round, and one for all."""
    sampled = next((manner(race.choices) for race in races if race.choices.do_sample), None)
    table = Table(title="plain / lookahead", title_style="bold", show_edge=False, pad_edge=False)  # fits 80 columns
    table.caption = f"*: {sampled}" if sampled else None
    for column in ("#", "text", "tokens", "passes", "per pass", "seconds", "speed-up", "4-grams"):
        table.add_column(column, justify="left" if column in ("#", "text") else "right", no_wrap=True)
    for number, race in enumerate(races, start=1):
        name = f"{number}*" if race.choices.do_sample else str(number)
        table.add_row(*_row(name, [race]), style="" if race.same else "bold red")
    if len(races) > 1:
        table.add_section()
        table.add_row(*_row("all", races), style="bold")
    return table


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
        str(sum(lane.stats.new_tokens for lane in fast)),
        f"{sum(lane.stats.steps for lane in plain)} / {steps}",
        f"{emitted / steps:.2f}" if steps else "-",
        f"{plain_seconds:.2f} / {seconds:.2f}",
        f"{plain_seconds / seconds:.2f}" if seconds else "-",
        f"{distinct:.0%}",
    ]


def footnote() -> Text:
    """How to read panels and table."""
    return Text.assemble(legend(), (_NOTE, "dim"))
