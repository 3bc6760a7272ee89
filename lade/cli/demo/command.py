"""`lade demo`: plain decoding, prompt lookup and lookahead decoding side by side, then with a draft memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
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
_BUDGET_S = 55.0
"""No round begins later than this, loading and compilation included; the first always does."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `lade demo`.

    Attributes:
        prompt: text in place of the built-in prompts.
        limit: number of built-in prompts, if there is no `prompt`.
        max_new_tokens: limit for each text.
        temperature, seed: sampling of both sides; temperature 0 is greedy.
        window, ngram, guesses: W, N and G of the paper's method, which replaces the adaptive one.
        inflate: number of parameters to pad the model to; None: 100 million for the embedded one.
        plain_text, json: display settings.
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
    inflate: Annotated[
        float | None,
        typer.Option(
            metavar="PARAMS",
            help="Pad the model to the cost of this many parameters, such as 500e6; 0: not. "
            "Default: 100e6 for the embedded one.",
        ),
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
        if self.inflate is not None and self.inflate < 0:
            raise ConfigError("inflate", self.inflate, "give a number of parameters, or 0")
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

    def params(self, loading: options.Loading) -> float:
        """Return the number of parameters to pad the model to; 0 to leave it as it is."""
        if self.inflate is not None:
            return self.inflate
        return 100e6 if loading.model is None else 0.0

    def style(self, term: Terminal) -> str:
        """Return "live" for moving panels, "text", or "json" at the end."""
        return "json" if self.json else "text" if self.plain_text or not term.interactive else "live"


@options.grouped
def demo(
    wanted: DemoOptions,
    *,
    choice: options.ModelChoice,
    pack: options.Pack = None,
    invariant: options.Invariant = False,
    output: options.Output,
) -> None:
    """Watch plain decoding, prompt lookup and lookahead decoding write the same text, in real time.

    The embedded model is padded to the cost of 100 million parameters: the same text, the time of a larger model.
    Then the same with a draft memory filled from other texts.

    Exit code 1: a text differs from that of model.generate.
    """
    with terminal(output) as term:
        loading = options.Loading(**vars(choice))
        end = perf_counter() + _BUDGET_S
        wanted.choices()  # check before torch is imported
        from lade.cli.loading.load import load
        from lade.cli.run import check_served
        from lade.memory import Memory

        memory = Memory()
        rounds = wanted.rounds(memory)
        if params := wanted.params(loading):
            import torch

            from lade.cli.demo.padded import padded

            threads = torch.get_num_threads()  # those of a larger model, not of the embedded one
            loaded = padded(load(loading, term=term, threads=threads), params, loading, term)
        else:
            loaded = load(loading, term=term, pack=pack, invariant=invariant)
        check_served(loaded, rounds[0].config, rounds[0].choices)
        Demo(loaded, rounds, memory, wanted.max_new_tokens, term, wanted.style(term), end).run()


class Demo:
    """Runs and shows the rounds, then sums them up.

    Args:
        loaded: model to generate with, and its tokenizer.
        rounds: at least one round.
        memory: draft memory of the rounds that keep one.
        max_new_tokens: token limit of each text.
        term: terminal to write to.
        style: "live" panels, "text", or "json" at the end.
        end: time on `perf_counter` after which no further round begins.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        rounds: list[Round],
        memory: Memory,
        max_new_tokens: int,
        term: Terminal,
        style: str,
        end: float,
    ) -> None:
        self._loaded, self._rounds, self._memory = loaded, rounds, memory
        self._max_new_tokens, self._term, self._style = max_new_tokens, term, style
        self._races: list[Race] = []
        self._learned: int | None = None
        self._end = end

    def run(self) -> None:
        """Run all rounds.

        Raises:
            typer.Exit: a text differs, or Ctrl-C was pressed.
        """
        from lade.compilation import compile_all
        from lade.decoding import kernels

        encoded = [self._loaded.encode(each.text) for each in self._rounds]
        try:
            self._term.show_status("compiling the inner loops, once on a machine")
            compile_all(kernels)  # a short text may not reach all of them
            self._race(self._rounds[0], encoded[0], _WARMUP_TOKENS).run(draw=lambda: None)
            for each, ids in zip(self._rounds, encoded, strict=True):
                if self._races and perf_counter() > self._end:
                    break
                if each.keeps_memory and self._learned is None:
                    self._learn()
                self._run(each, self._race(each, ids, self._max_new_tokens))
        except KeyboardInterrupt:
            if self._races and self._style != "json":
                self._conclude()
            self._term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        self._conclude()

    def _race(self, each: Round, ids: list[int], max_new_tokens: int) -> Race:
        from lade.cli.demo.side_by_side import Race

        room = self._loaded.room(ids, max_new_tokens, within=True)
        return Race(self._loaded, ids, each.config, room, each.choices, each.name, lookup=True)

    def _learn(self) -> None:
        from rich.status import Status

        shown = [each.text for each in self._rounds]
        status = "filling the memory from other texts"
        with Status(status, console=self._term.err) if self._term.err.is_terminal else nullcontext():
            self._learned = learn(self._loaded, self._memory, shown, self._max_new_tokens)

    def _run(self, each: Round, race: Race) -> None:
        from lade.cli.demo.screen import LiveView, describe, sampling_text

        title = f"{len(self._races) + 1} of {len(self._rounds)} · {each.name} · {sampling_text(each.choices)}"
        if self._style == "live":
            with LiveView(self._term, title, each.text, race) as view:
                race.run(view.wait)
                self._races.append(race)
                view.play()
            return
        race.run(draw=lambda: None)
        self._races.append(race)
        if self._style == "text":
            describe(self._term, title, each.text, race)

    def _conclude(self) -> None:
        from lade.cli.demo.screen import YOUR_OWN, conclusion, footnote, summary, verdict

        races, term = self._races, self._term
        different = [race for race in races if not race.same]
        if self._style == "json":
            term.write_json(self._as_dict())
        else:
            term.out.print(summary(races))
            if term.interactive:
                term.out.print(footnote())
            if not different:
                term.out.print(Text(conclusion(self._loaded.name, races, self._learned or 0), "bold"))
                term.out.print(YOUR_OWN)
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
