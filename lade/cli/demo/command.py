"""`lade demo`: `model.generate`, prompt lookup and lookahead decoding side by side, then with a draft memory."""

from __future__ import annotations

import math
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
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
    from lade.cli.demo.race import Race
    from lade.cli.loading.load import LoadedModel
    from lade.memory import Memory

EXAMPLE = 'Example:  [bold]lade demo --prompt "class Stack:" --max-new-tokens 100[/bold]'
EXIT_DIFFERENT = 1
INFLATED = 100e6  # parameters
_WARMUP_TOKENS = 8
_PLAIN_S = 4.0  # of plain decoding, for each text
_FEWEST_TOKENS, _MOST_TOKENS = 40, 120
_REPLAYS_UNTIL_S = 60.0  # after the start; a slow or busy machine shows later races only once
_FIRST = 2  # of the built-in prompts: from here on two are in the middle of all in tokens per pass


@dataclass(frozen=True)
class DemoOptions:
    """Options of `lade demo`.

    Attributes:
        prompt: text in place of the built-in prompts.
        limit: number of built-in prompts, if there is no `prompt`.
        max_new_tokens: limit for each text; None chooses one by the model's speed.
        temperature, seed: sampling of all methods; temperature 0 is greedy.
        window, ngram, guesses: W, N and G of the paper's method, which replaces the adaptive one.
        inflate: parameters that the embedded model is padded to; 0 leaves it as it is, None is the default.
        plain_text, json: display settings.
    """

    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Text in place of the built-in prompts.")
    ] = None
    limit: Annotated[int, typer.Option(metavar="P", help="Only the first P of the built-in prompts.")] = 2
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Maximum number of tokens to generate. Default: 40 to 120, by speed.",
        ),
    ] = None
    temperature: Annotated[
        float,
        typer.Option(metavar="T", help="Sampling temperature, with the same seed for each method. 0: greedy decoding."),
    ] = 0.0
    seed: Annotated[int, typer.Option(metavar="S", help="Sampling seed of each method.")] = 0
    window: options.Window = None
    ngram: options.Ngram = None
    guesses: options.Guesses = None
    inflate: Annotated[
        float | None,
        typer.Option(
            metavar="PARAMS",
            help="Pad the embedded model to this many parameters, such as 500e6: the same text at a larger cost; 0: do "
            "not. Default: 100e6.",
            show_default=False,
        ),
    ] = None
    plain_text: Annotated[bool, typer.Option("--plain-text", help="Print paragraphs instead of moving panels.")] = False
    json: options.Json = False

    def choices(self) -> options.Choices:
        """Return the settled choices of all methods, after checking all options.

        Raises:
            ConfigError, InputError: a value is out of range.
        """
        seed = self.seed if self.temperature else None
        choices = options.Choices(temperature=self.temperature, seed=seed).settled()
        if self.max_new_tokens is not None:
            options.check_max_new_tokens(self.max_new_tokens)
        if self.limit < 1:
            raise ConfigError("limit", self.limit, "give a whole number >= 1")
        if self.prompt is not None:
            check_text(self.prompt, "the prompt")
        return choices

    def parameters(self, choice: options.ModelChoice) -> float:
        """Return the number of parameters to pad to; 0 for no padding.

        Raises:
            ConfigError: the value is negative, or given for a model other than the embedded one.
        """
        if self.inflate is None:
            return INFLATED if choice.model is None else 0
        if not 0 <= self.inflate < math.inf:
            raise ConfigError("inflate", self.inflate, "give a number of parameters, or 0 for no padding")
        if self.inflate and choice.model is not None:
            raise ConfigError("inflate", self.inflate, "pads the embedded model only: leave it out, or --model")
        return self.inflate

    def rounds(self, memory: Memory) -> list[Round]:
        """Return the rounds: adaptive without and with a memory, or the paper's method if sizes are given."""
        from lade.embedded import files as embedded

        builtin = embedded.prompts()
        builtin = (builtin[_FIRST:] + builtin[:_FIRST])[: self.limit]
        texts = builtin if self.prompt is None else [self.prompt]
        choices = self.choices()
        sizes = options.Speed(window=self.window, ngram=self.ngram, guesses=self.guesses).lookahead()
        if isinstance(sizes, LookaheadConfig):
            return fixed_rounds(texts, choices, sizes, "lookahead")
        return adaptive_rounds(texts, choices, memory)

    def style(self, term: Terminal) -> str:
        """Return the kind of display: "live" panels, "text", or "json" at the end."""
        return "json" if self.json else "text" if self.plain_text or not term.interactive else "live"


@options.grouped
def demo(
    wanted: DemoOptions,
    *,
    choice: options.ModelChoice,
    pack: options.Pack = None,
    invariant: options.Invariant = None,
    output: options.Output,
) -> None:
    """Show model.generate, prompt lookup and lade side by side: same text, less time.

    Then with a draft memory filled from other texts. The embedded model is padded to the cost of a larger one.

    Exit code 1: a text differs.
    """
    with terminal(output) as term:
        loading = options.Loading(**vars(choice))
        wanted.choices()  # check before torch is imported
        inflate = wanted.parameters(choice)
        from lade.cli.loading.load import load
        from lade.cli.run import check_served
        from lade.memory import Memory

        memory = Memory()
        rounds = wanted.rounds(memory)
        loaded = load(loading, term=term, pack=False if inflate else pack, invariant=False if inflate else invariant)
        check_served(loaded, rounds[0].config, rounds[0].choices)
        show = Demo(loaded, rounds, memory, wanted, term)
        show.prepare(inflate, pack, invariant=invariant)
        show.run()


class Demo:
    """Runs and shows the rounds, then sums them up.

    Args:
        loaded: model to generate with, and its tokenizer.
        rounds: at least one round.
        memory: draft memory of the rounds that keep one.
        wanted: options of the command.
        term: terminal to write to.
    """

    def __init__(
        self, loaded: LoadedModel, rounds: list[Round], memory: Memory, wanted: DemoOptions, term: Terminal
    ) -> None:
        self._loaded, self._rounds, self._memory, self._term = loaded, rounds, memory, term
        self._max_new_tokens, self._style = wanted.max_new_tokens, wanted.style(term)
        self._races: list[Race] = []
        self._learned: int | None = None
        self._about = ""
        self._unpacked: Any = None
        self._started = perf_counter()

    def prepare(self, parameters: float, pack: bool | None, *, invariant: bool | None) -> None:
        """Fill the memory and pad the embedded model.

        Args:
            parameters: number of parameters to pad to; 0 for no padding.
            pack: option of the command, for the padded model.
            invariant: option of the command, for the padded model.
        """
        if not parameters:
            return
        from lade.cli.loading.load import set_up
        from lade.embedded.padding import pad
        from lade.model.supports import supports

        self._learn()  # the padded model predicts the same, and takes longer
        own = self._loaded.model.num_parameters()
        millions = f"{parameters / 1e6:.0f} million"
        self._term.show_status(f"padding the embedded model to {millions} parameters")
        model = pad(self._loaded.model, parameters)
        unpacked = deepcopy(model)
        set_up(model, self._term, pack=pack, invariant=invariant)
        self._loaded = replace(self._loaded, model=model)
        self._unpacked = unpacked if self._loaded.packed else None
        self._about = (
            f"The embedded model has {own / 1e6:.0f} million parameters. Here it is padded to {millions} with "
            "layers that add zero: the same text at the cost of a real model, in real time."
            + (" lade packs its weights for the CPU, the others use them as loaded." if self._loaded.packed else "")
            + (" It has an MTP layer, which most models lack; lade drafts with it, too." if supports(model).mtp else "")
        )
        if self._style != "json":
            self._term.out.print(self._about)

    def run(self) -> None:
        """Run all rounds.

        Raises:
            typer.Exit: a text differs, or Ctrl-C was pressed.
        """
        encoded = [self._loaded.encode(each.text) for each in self._rounds]
        try:
            self._warm_up(encoded[0])
            for each, ids in zip(self._rounds, encoded, strict=True):
                self._run(each, ids)
        except KeyboardInterrupt:
            if self._races and self._style != "json":
                self._conclude()
            self._term.say("interrupted", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        self._conclude()

    def _warm_up(self, ids: list[int]) -> None:
        """Run a short race, which measures what passes take, and choose the number of tokens by its speed."""
        self._term.show_status("warming up")
        race = self._race(self._rounds[0], ids, _WARMUP_TOKENS)
        race.run(draw=lambda: None)
        if self._max_new_tokens is None:
            rate = race.plain.tokens_per_s or 0.0
            self._max_new_tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, round(rate * _PLAIN_S)))

    def _race(self, each: Round, ids: list[int], max_new_tokens: int, earlier: Race | None = None) -> Race:
        from lade.cli.demo.race import Race

        room = self._loaded.room(ids, max_new_tokens, within=True)
        more: Any = {"earlier": earlier, "unpacked": self._unpacked}
        return Race(self._loaded, ids, each.config, room, each.choices, each.name, **more)

    def _learn(self) -> None:
        from rich.status import Status

        if self._learned is not None or not any(each.keeps_memory for each in self._rounds):
            return
        shown = [each.text for each in self._rounds]
        status = "filling the memory from other texts"
        with Status(status, console=self._term.err) if self._term.err.is_terminal else nullcontext():
            self._learned = learn(self._loaded, self._memory, shown, self._max_new_tokens or _MOST_TOKENS)

    def _run(self, each: Round, ids: list[int]) -> None:
        from lade.cli.demo.screen import LiveView, describe, sampling_text

        if each.keeps_memory:
            self._learn()
        assert self._max_new_tokens is not None, "_warm_up chose it"
        index = len(self._races)
        cold = [text.text for text in self._rounds[:index]]
        earlier = self._races[cold.index(each.text)] if each.text in cold else None
        race = self._race(each, ids, self._max_new_tokens, earlier)
        title = f"{index + 1} of {len(self._rounds)} · {each.name} · {sampling_text(each.choices)}"
        if self._style == "live":
            with LiveView(self._term, title, each.text, race) as view:
                race.run(view.draw)
                self._races.append(race)
                if perf_counter() - self._started < _REPLAYS_UNTIL_S:
                    view.replay()
            return
        race.run(draw=lambda: None)
        self._races.append(race)
        if self._style == "text":
            describe(self._term, title, each.text, race)

    def _conclude(self) -> None:
        from lade.cli.demo.screen import NEXT, conclusion, footnote, summary, verdict

        races, term = self._races, self._term
        different = [race for race in races if not race.same]
        if self._style == "json":
            term.write_json(self._as_dict())
        else:
            term.out.print(summary(races))
            if term.interactive:
                term.out.print(footnote())
            if not different:
                about = f"\n{self._about}\n" if self._about else ""
                term.out.print(Text(conclusion(races, self._learned or 0), "bold"))
                term.out.print(Text(f"{about}\n{NEXT}"))
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
            "parameters": self._loaded.model.num_parameters(),
            **self._loaded.facts,
        }
