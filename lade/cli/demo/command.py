"""`lade demo`: plain and adaptive decoding of the same texts side by side, then with a draft memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lade.cli.demo.rounds import Round, adaptive_rounds, fixed_rounds, learn
from lade.cli.options import decoding as options
from lade.cli.prompts import check_text
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.config import LookaheadConfig
from lade.errors import ConfigError

if TYPE_CHECKING:
    from lade.cli.demo.side_by_side import Race
    from lade.cli.loading.load import LoadedModel
    from lade.memory import Memory

EXAMPLE = 'Example:  [bold]lade demo --prompt "class Stack:" --max-new-tokens 200[/bold]'
EXIT_DIFFERENT = 1
_WARMUP_TOKENS = 8
_REPLAY_S = 4.0  # the embedded model is too fast to follow
_MIN_SLOWDOWN = 3.0  # a race that would be slowed down less can be followed as it is


@dataclass(frozen=True)
class _Show:
    """Display settings of a race.

    Attributes:
        style: "live" panels, "text", or "json" at the end.
        slow_motion: slow-down factor of the replay; 1 for no replay; None chooses one.
    """

    style: str
    slow_motion: float | None

    def slower(self, seconds: float) -> float:
        """Return the slow-down factor for a race of this many seconds; 1 for no replay."""
        if self.slow_motion is not None:
            return self.slow_motion
        factor = _REPLAY_S / seconds if seconds else 1.0
        return factor if factor >= _MIN_SLOWDOWN else 1.0


@dataclass(frozen=True)
class DemoOptions:
    """Options of `lade demo`.

    Attributes:
        prompt: text in place of the built-in prompts.
        limit: number of built-in prompts, if there is no `prompt`.
        max_new_tokens: limit for each text.
        temperature, seed: sampling of both sides; temperature 0 is greedy.
        window, ngram, guesses: W, N and G of the paper's method, which replaces the adaptive one.
        slow_motion, plain_text, json: display settings.
    """

    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Text in place of the built-in prompts.")
    ] = None
    limit: Annotated[int, typer.Option(metavar="N", help="Only the first N of the built-in prompts.")] = 3
    max_new_tokens: options.MaxNewTokens = 120
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Above 0: sample, with the same noise on both sides.")
    ] = 0.0
    seed: Annotated[int, typer.Option(metavar="S", help="Sampling seed of both sides.")] = 0
    window: options.Window = None
    ngram: options.Ngram = None
    guesses: options.Guesses = None
    slow_motion: Annotated[
        float | None,
        typer.Option(metavar="X", help="Replay X times slower; 1: no replay. Default: so that it takes 4 seconds."),
    ] = None
    plain_text: Annotated[bool, typer.Option("--plain-text", help="Print paragraphs, not moving panels.")] = False
    json: options.Json = False

    def choices(self) -> options.Choices:
        """Return the settled choices of both sides, after checking all options.

        Raises:
            ConfigError, InputError: a value is out of range.
        """
        seed = self.seed if self.temperature else None
        choices = options.Choices(temperature=self.temperature, seed=seed).settled()
        options.check_max_new_tokens(self.max_new_tokens)
        if self.slow_motion is not None and self.slow_motion < 1:
            raise ConfigError("slow-motion", self.slow_motion, "give a number >= 1")
        if self.limit < 1:
            raise ConfigError("limit", self.limit, "give a whole number >= 1")
        if self.prompt is not None:
            check_text(self.prompt, "the prompt")
        return choices

    def rounds(self, memory: Memory) -> list[Round]:
        """Return the rounds: adaptive without and with a memory, or the paper's method if sizes are given."""
        from lade.embedded import files as embedded

        texts = [self.prompt] if self.prompt is not None else embedded.prompts()[: self.limit]
        choices = self.choices()
        sizes = options.Speed(window=self.window, ngram=self.ngram, guesses=self.guesses).lookahead()
        if isinstance(sizes, LookaheadConfig):
            return fixed_rounds(texts, choices, sizes, "lookahead")
        return adaptive_rounds(texts, choices, memory)

    def show(self, term: Terminal) -> _Show:
        """Return the display settings for this terminal."""
        style = "json" if self.json else "text" if self.plain_text or not term.interactive else "live"
        return _Show(style, self.slow_motion)


@options.grouped
def demo(
    wanted: DemoOptions,
    *,
    choice: options.ModelChoice,
    pack: options.Pack = None,
    invariant: options.Invariant = False,
    output: options.Output,
) -> None:
    """Show plain and adaptive decoding side by side: the same text, fewer passes, less time.

    Then the same texts with a draft memory filled from others. Each round runs live and is replayed.

    Exit code 1: a text differs.
    """
    with terminal(output) as term:
        loading = options.Loading(**vars(choice))
        wanted.choices()  # check before torch is imported
        from lade.cli.loading.load import load
        from lade.cli.run import check_served
        from lade.memory import Memory

        memory = Memory()
        rounds = wanted.rounds(memory)
        loaded = load(loading, term=term, pack=pack, invariant=invariant)
        check_served(loaded, rounds[0].config, rounds[0].choices)
        Demo(loaded, rounds, memory, wanted.max_new_tokens, term, wanted.show(term)).run()


class Demo:
    """Runs and shows the rounds, then sums them up.

    Args:
        loaded: model to generate with, and its tokenizer.
        rounds: at least one round.
        memory: draft memory of the rounds that keep one.
        max_new_tokens: token limit of each text.
        term: terminal to write to.
        show: how the races are displayed.
    """

    def __init__(
        self, loaded: LoadedModel, rounds: list[Round], memory: Memory, max_new_tokens: int, term: Terminal, show: _Show
    ) -> None:
        self._loaded, self._rounds, self._memory = loaded, rounds, memory
        self._max_new_tokens, self._term, self._show = max_new_tokens, term, show
        self._races: list[Race] = []
        self._learned: int | None = None

    def run(self) -> None:
        """Run all rounds.

        Raises:
            typer.Exit: a text differs, or Ctrl-C was pressed.
        """
        encoded = [self._loaded.encode(each.text) for each in self._rounds]
        try:
            self._race(self._rounds[0], encoded[0], _WARMUP_TOKENS).run(draw=lambda: None)
            for each, ids in zip(self._rounds, encoded, strict=True):
                if each.keeps_memory and self._learned is None:
                    self._learn()
                self._run(each, self._race(each, ids, self._max_new_tokens))
        except KeyboardInterrupt:
            if self._races and self._show.style != "json":
                self._conclude()
            self._term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        self._conclude()

    def _race(self, each: Round, ids: list[int], max_new_tokens: int) -> Race:
        from lade.cli.demo.side_by_side import Race

        room = self._loaded.room(ids, max_new_tokens, within=True)
        return Race(self._loaded, ids, each.config, room, each.choices, each.name)

    def _learn(self) -> None:
        from rich.status import Status

        shown = [each.text for each in self._rounds]
        status = "filling the memory from other texts"
        with Status(status, console=self._term.err) if self._term.err.is_terminal else nullcontext():
            self._learned = learn(self._loaded, self._memory, shown, self._max_new_tokens)

    def _run(self, each: Round, race: Race) -> None:
        from lade.cli.demo.screen import LiveView, describe, sampling_text

        title = f"{len(self._races) + 1} of {len(self._rounds)} · {each.name} · {sampling_text(each.choices)}"
        if self._show.style == "live":
            with LiveView(self._term, title, each.text, race) as view:
                race.run(view.draw)
                self._races.append(race)
                slower = self._show.slower(race.seconds)
                if slower > 1:
                    view.replay(slower)
            return
        race.run(draw=lambda: None)
        self._races.append(race)
        if self._show.style == "text":
            describe(self._term, title, each.text, race)

    def _conclude(self) -> None:
        from lade.cli.demo.screen import conclusion, footnote, summary, verdict

        races, term = self._races, self._term
        different = [race for race in races if not race.same]
        if self._show.style == "json":
            term.write_json(self._as_dict())
        else:
            term.out.print(summary(races))
            if term.interactive:
                term.out.print(footnote())
            if not different:
                term.out.print(Text(conclusion(races, self._learned or 0), "bold"))
        if different:
            term.fail(f"{verdict(different[0])}; with --dtype float32 they must be equal: please report this")
            raise typer.Exit(EXIT_DIFFERENT)

    def _as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        from lade.cli.demo.screen import total_speedup

        groups = {each.name: [race for race in self._races if race.name == each.name] for each in self._rounds}
        return {
            "races": [race.as_dict() for race in self._races],
            "speedups": {name: total_speedup(group) for name, group in groups.items()},
            "memory_texts": self._learned or 0,
            "same_tokens": all(race.same for race in self._races),
            **self._loaded.facts,
        }
