"""Options of decoding, and of the grammar of an answer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lade.cli.options import grouping
from lade.cli.options import grouping as output_options
from lade.cli.options import model as model_options
from lade.cli.options import model as template_options
from lade.cli.options.grouping import in_panel
from lade.cli.prompts import check_text, read_text
from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError, InputError

if TYPE_CHECKING:
    from lade.grammar import Grammar


grouped = grouping.grouped
Loading = model_options.Loading
NamedModel = model_options.NamedModel
Output = output_options.Output
Template = template_options.Template

METHODS = ("plain", "lookahead", "adaptive", "auto")

_DRAWN_SEEDS = 2**32  # a drawn seed is short enough to be typed, and exact in every JSON reader
_SEEDS = 2**63
_MOST_BEAMS, _MOST_TOKENS, _LONGEST_STOP = 256, 10**9, 200
_ONLY_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 1e-10 <= value <= 1e10, "give a number > 0, from 1e-10 to 1e10"),
    "top_k": (lambda value: value >= 0, "give a whole number >= 1, or 0 for no limit"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "give a number > 0 and <= 1"),
    "min_p": (lambda value: 0.0 <= value <= 1.0, "give a number from 0 to 1"),
    "seed": (lambda value: 0 <= value < _SEEDS, f"give a whole number from 0 to {_SEEDS - 1}"),
    "repetition_penalty": (
        lambda value: 0.01 <= value <= 100.0,
        "give a number > 0, 0.01 to 100; 1 is no penalty",
    ),
    "num_beams": (lambda value: 1 <= value <= _MOST_BEAMS, f"give a whole number >= 1 and <= {_MOST_BEAMS}"),
}


Pack = Annotated[
    bool | None,
    typer.Option(
        "--pack/--no-pack",
        metavar="",
        rich_help_panel="Speed",
        help="Prepack the linear layers for the CPU. Default: where steps are faster then, which is measured.",
    ),
]
Invariant = Annotated[
    bool,
    typer.Option(
        "--invariant",
        rich_help_panel="Speed",
        help="Make the model round alike in every pass: in 16 bits, too, the text is plain decoding's bit for bit.",
    ),
]
_speed = grouping.in_panel("Speed")
Method = Annotated[
    str | None,
    _speed(
        metavar="NAME",
        autocompletion=lambda: list(METHODS),
        help="plain, adaptive, lookahead (the paper's), or auto: adaptive if it can be served, else plain.",
    ),
]
Window = Annotated[int | None, _speed(metavar="W", help="Columns of the window. Implies lookahead.")]
Ngram = Annotated[int | None, _speed(metavar="N", help="Length of the n-grams. Implies lookahead.")]
Guesses = Annotated[int | None, _speed(metavar="G", help="Guesses verified in a step. Implies lookahead.")]


@dataclass(frozen=True)
class Speed:
    """How tokens are drafted; None is "not given".

    Attributes:
        method: one of `METHODS`.
        window, ngram, guesses: sizes of the paper's method.
        budget: tokens fed in a step of the adaptive method.
        memory: file of a memory for the adaptive method.
        pack: whether linear layers are prepacked for the CPU.
        invariant: whether the model is made to round alike in every pass.
    """

    method: Method = None
    window: Window = None
    ngram: Ngram = None
    guesses: Guesses = None
    budget: Annotated[int | None, _speed(metavar="B", help="Tokens fed in a step. Implies adaptive.")] = None
    memory: Annotated[Path | None, _speed(metavar="FILE", help="What lade warm has learned. Implies adaptive.")] = None
    pack: Pack = None
    invariant: Invariant = False

    def lookahead(self, *, new_memory: bool = False) -> Lookahead:
        """The same as the library's `lookahead=`.

        The memory is not loaded: that takes a tokenizer, see `loading.remembering`.

        Args:
            new_memory: whether its file need not be there.

        Raises:
            ConfigError: unknown method, a size out of range, or options that contradict each other.
            InputError: there is no such memory.
        """
        method = self.method
        if method not in (*METHODS, None):
            raise ConfigError("method", method, f"give one of {', '.join(METHODS)}")
        sizes: dict[str, Any] = _given(window=self.window, ngram=self.ngram, guesses=self.guesses)
        extras: dict[str, Any] = _given(budget=self.budget, memory=self.memory)
        self._check_together(sizes, extras)
        if self.memory is not None and not new_memory and not self.memory.is_file():
            raise InputError(
                f"memory file {str(self.memory)!r} is not there: check the path, or fill one with lade warm"
            )
        if method == "plain":
            return None
        if sizes or method == "lookahead":
            return LookaheadConfig(**sizes, adaptive=False)
        return LookaheadConfig(budget=self.budget) if extras or method == "adaptive" else "auto"

    def _check_together(self, sizes: dict[str, Any], extras: dict[str, Any]) -> None:
        if self.method == "plain" and (sizes or extras):
            remedy = f"plain decoding has no {_listed(sizes | extras)}: leave out --method, or what it has not"
            raise ConfigError("method", self.method, remedy)
        if self.method == "lookahead" and extras:
            remedy = f"only the adaptive method has {_listed(extras)}: give --method adaptive"
            raise ConfigError("method", self.method, remedy)
        if sizes and (extras or self.method == "adaptive"):
            unlike = _listed(extras) or "--method adaptive"
            name, size = next(iter(sizes.items()))
            raise ConfigError(name, size, f"the adaptive method has no sizes: leave out {_listed(sizes)}, or {unlike}")


MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", metavar="N", help="Tokens to generate at most."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=model_options.PANEL,
        help="CPU threads. Default: torch's (the embedded model: 1).",
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="An image before the prompt; may be given several times."),
]
PredictionFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A text that the answer is expected to follow, such as a file to be edited."),
]
Json = Annotated[
    bool, typer.Option("--json", metavar="", rich_help_panel=output_options.PANEL, help="JSON instead of text.")
]


def _given(**options: Any) -> dict[str, Any]:
    """Those that are."""
    return {name: value for name, value in options.items() if value is not None}


def _listed(options: Mapping[str, Any]) -> str:
    """As on the command line."""
    return " ".join(f"--{_spelt(name)} {value}" for name, value in options.items())


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise `ConfigError` unless there is at least one token to generate."""
    if not 1 <= max_new_tokens <= _MOST_TOKENS:
        raise ConfigError("max-new-tokens", max_new_tokens, f"give a whole number >= 1 and <= {_MOST_TOKENS}")


def check_threads(threads: int | None) -> None:
    """Raise `ConfigError` for a number of CPU threads that the system would not start, or none at all."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if threads is not None and not 1 <= threads <= most:
        raise ConfigError("threads", threads, f"give a whole number >= 1 and <= {most}")


def whole_numbers(name: str, text: str, least: int, example: str) -> list[int]:
    """Whole numbers of at most nine digits with commas between them, none below `least`.

    Raises:
        ConfigError: there is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts):
        remedy = f"give whole numbers >= {least} with commas between them, such as {example}"
        raise ConfigError(name, text if len(text) < 100 else f"{text[:100]}...", remedy)
    return [int(part) for part in parts]


_option = grouping.in_panel("Choosing tokens")


@dataclass(frozen=True)
class Choices:
    """What the shell's options say about choosing tokens; None is "not given".

    Attributes:
        do_sample: draw each token instead of taking the most likely one.
        temperature, top_k, top_p, min_p: as in transformers; not given: as the checkpoint's generation_config has it.
        seed: of torch's generator, set before each generation.
        repetition_penalty: as in transformers.
        num_beams: 1 is no beam search.
        stop: a text ends after any of these.
    """

    do_sample: Annotated[
        bool, _option("--do-sample", metavar="", help="Draw tokens instead of taking the likeliest one each time.")
    ] = False
    temperature: Annotated[float | None, _option(metavar="T", help="With --do-sample: below 1 is less random.")] = None
    top_k: Annotated[int | None, _option(metavar="K", help="With --do-sample: among the K likeliest; 0: all.")] = None
    top_p: Annotated[
        float | None, _option(metavar="P", help="With --do-sample: among the likeliest that add up to P.")
    ] = None
    min_p: Annotated[
        float | None, _option(metavar="P", help="With --do-sample: those at least P times as likely as the best.")
    ] = None
    seed: Annotated[
        int | None,
        _option(
            metavar="S",
            help="With --do-sample: for each prompt S, in a chat S, S+1, ... Default: drawn, and reported.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, _option(metavar="R", help="Above 1: what the text has already gets less likely.")
    ] = None
    num_beams: Annotated[int, _option(metavar="B", help="Beam search; its text is shown when complete.")] = 1
    stop: Annotated[
        list[str] | None, _option("--stop", metavar="TEXT", help="End after this text. May be given several times.")
    ] = None

    def settled(self, seed: int | None = None) -> Choices:
        """The same, checked, and with a seed if one is needed.

        Args:
            seed: to take where none is given; None: one is drawn.

        Raises:
            ConfigError, InputError: a value out of range, or one that nothing would use.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _ONLY_SAMPLING:
            if given[name] is not None and not self.do_sample:
                raise ConfigError(_spelt(name), given[name], "only sampling uses it: add --do-sample, or leave it out")
        check_ranges(given)
        for text in self.stop or ():
            check_text(text, "the text of --stop")
            if len(text) > _LONGEST_STOP:
                remedy = f"it has {len(text)} characters: give at most {_LONGEST_STOP}"
                raise ConfigError("stop", f"{text[:20]}...", remedy)
        if self.do_sample and self.seed is None:
            return replace(self, seed=secrets.randbelow(_DRAWN_SEEDS) if seed is None else seed)
        return self

    def after(self, generations: int) -> Choices:
        """The choices of a later generation of the same session: the next seed, so that it draws something else."""
        return self if self.seed is None else replace(self, seed=(self.seed + generations) % _SEEDS)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` says of them."""
        return {"do_sample": self.do_sample, "num_beams": self.num_beams, "seed": self.seed}

    def summary(self) -> str:
        """The end of a statistics line: nothing for greedy decoding."""
        beams = f" · {self.num_beams} beams" if self.num_beams > 1 else ""
        return beams + (f" · seed {self.seed}" if self.do_sample else "")


GREEDY = Choices()


def check_ranges(values: Mapping[str, Any], origin: str = "") -> None:
    """Raise `ConfigError` for the first value out of its range.

    Args:
        values: by the names of `Choices`' fields; None and unknown names are passed over.
        origin: where they come from, if not from the command line.
    """
    for name, (fits, remedy) in _RANGES.items():
        value = values.get(name)
        if value is not None and not fits(value):
            raise ConfigError(_spelt(name), value, f"{origin}; {remedy} with --{_spelt(name)}" if origin else remedy)


def _spelt(name: str) -> str:
    """As on the command line."""
    return name.replace("_", "-")


_grammar_option = in_panel("What the answer may be")


@dataclass(frozen=True)
class AnswerForm:
    """The form that answers have to have; one of these, or none.

    Attributes:
        json_schema: a file with a JSON schema.
        regex: a pattern that matches all of the answer.
        grammar: a file with a Lark grammar.
    """

    json_schema: Annotated[Path | None, _grammar_option(metavar="FILE", help="JSON of the schema in this file.")] = None
    regex: Annotated[str | None, _grammar_option(metavar="PATTERN", help="Text all of which this pattern matches.")] = (
        None
    )
    grammar: Annotated[Path | None, _grammar_option(metavar="FILE", help="Text of the Lark grammar in this file.")] = (
        None
    )

    def read(self) -> Grammar | None:
        """The grammar; None for no form.

        Raises:
            ConfigError: there are several, or it is none.
            InputError: a file cannot be read.
            MissingExtraError: llguidance is not installed.
        """
        if not self._given:
            return None
        if len(self._given) > 1:
            (first, _), (name, value), *_ = self._given
            raise ConfigError(name, value, f"leave out --{first}, or this")
        from lade.grammar import Grammar

        if self.json_schema is not None:
            schema = read_text(self.json_schema, "JSON schema")
            with self._named():
                return Grammar.json_schema(schema)
        if self.grammar is not None:
            return Grammar.lark(read_text(self.grammar, "grammar"))
        check_text(self.regex or "", "the pattern of --regex")
        return Grammar.regex(self.regex or "")

    def check(self, grammar: Grammar | None, tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> None:
        """Compile what `read` has returned: most of what is wrong with grammars is found then.

        Args:
            grammar: None for no form.
            tokenizer: the model's.
            eos_token_id: what ends its answers.

        Raises:
            ConfigError: the model's answers cannot follow it.
            MissingExtraError: llguidance is not installed.
        """
        if grammar is not None:
            with self._named():
                grammar.processor(tokenizer, eos_token_id)

    @property
    def _given(self) -> list[tuple[str, str]]:
        """Options that were given, and their values."""
        values = {each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)}
        return [(name, str(value)) for name, value in values.items() if value is not None]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What is wrong with the grammar is an error of the option that it came by."""
        try:
            yield
        except InputError as problem:
            ((name, value),) = self._given
            raise ConfigError(name, value, str(problem)) from problem
