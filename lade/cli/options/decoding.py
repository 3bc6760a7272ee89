"""Options of decoding, and of structured output."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import lade
from lade import ConfigError, InputError
from lade.cli.options import Checked, Output, Takes, grouped, options_in
from lade.cli.options.model import Loading, ModelChoice, NamedModel, Template
from lade.cli.prompts import check_text, read_text
from lade.config import Lookahead, LookaheadConfig

__all__ = ["Loading", "ModelChoice", "NamedModel", "Output", "Template", "grouped"]
"""Re-exported: commands take all shared options from here."""

METHODS = ("plain", "lookahead", "adaptive", "auto")

_DRAWN_SEEDS = 2**32  # short enough to type, and exact in every JSON reader
_SEEDS = 2**63
_MAX_BEAMS, _MAX_TOKENS, _MAX_STOP_LENGTH = 256, 10**9, 200
_ONLY_SAMPLING = ("top_k", "top_p", "min_p", "seed")
_RANGES: dict[str, Takes] = {
    "temperature": (lambda value: value == 0 or 1e-10 <= value <= 1e10, "give 0 for greedy, or 1e-10 to 1e10"),
    "top_k": (lambda value: value >= 0, "give a whole number >= 1, or 0 for no limit"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "give a number > 0 and <= 1"),
    "min_p": (lambda value: 0.0 <= value <= 1.0, "give a number from 0 to 1"),
    "seed": (lambda value: 0 <= value < _SEEDS, f"give a whole number from 0 to {_SEEDS - 1}"),
    "repetition_penalty": (lambda value: 0.01 <= value <= 100.0, "give a number > 0, 0.01 to 100; 1 is no penalty"),
    "num_beams": (lambda value: 1 <= value <= _MAX_BEAMS, f"give a whole number >= 1 and <= {_MAX_BEAMS}"),
}


Pack = Annotated[
    bool | None,
    typer.Option(
        "--pack/--no-pack",
        rich_help_panel="Speed",
        help="Prepack linear layers for the CPU. Default: if measured to be faster.",
    ),
]
Invariant = Annotated[
    bool | None,
    typer.Option(
        "--invariant/--no-invariant",
        rich_help_panel="Speed",
        help="Same text with and without drafts in 16 bits, too. Default: on a CPU, where possible.",
    ),
]
_speed, _sizes = options_in("Speed"), options_in("Draft sizes")
_METHOD = "plain, adaptive, lookahead (the paper's), or auto: adaptive if supported, else plain."


@dataclass(frozen=True)
class Speed(Checked):
    """Drafting options; None is "not given"."""

    method: str | None = _speed(None, "NAME", _METHOD, one_of=METHODS)
    memory: Path | None = _speed(None, "FILE", "Draft memory made by lade warm, for the adaptive method.")
    pack: Pack = None
    invariant: Invariant = None
    window: int | None = _sizes(None, "W", "Columns of the window. Implies --method lookahead.")
    ngram: int | None = _sizes(None, "N", "Length of the n-grams. Implies --method lookahead.")
    guesses: int | None = _sizes(None, "G", "N-grams verified per step. Implies --method lookahead.")
    budget: int | None = _sizes(None, "B", "Tokens fed per step. Implies --method adaptive.")

    def lookahead(self, *, new_memory: bool = False) -> Lookahead:
        """Return the `lookahead` argument of `lade.generate`.

        The memory is not loaded, since that takes a tokenizer: see `loading.with_memory`. Its file has to exist,
        unless `new_memory`.
        """
        sizes: dict[str, Any] = _given(window=self.window, ngram=self.ngram, guesses=self.guesses)
        extras: dict[str, Any] = _given(budget=self.budget, memory=self.memory)
        self.check()
        self._check_together(sizes, extras)
        if self.memory is not None and not new_memory and not self.memory.is_file():
            raise InputError(
                f"memory file {str(self.memory)!r} does not exist: check the path, or create it with lade warm"
            )
        if self.method == "plain":
            return None
        if sizes or self.method == "lookahead":
            return LookaheadConfig(**sizes, adaptive=False)
        return LookaheadConfig(budget=self.budget, adaptive=True) if extras or self.method == "adaptive" else "auto"

    def _check_together(self, sizes: dict[str, Any], extras: dict[str, Any]) -> None:
        if self.method == "plain" and (sizes or extras):
            remedy = f"plain decoding does not use {_as_options(sizes | extras)}: leave out one of them"
            raise ConfigError("method", self.method, remedy)
        if self.method == "lookahead" and extras:
            remedy = f"{_as_options(extras)} needs --method adaptive"
            raise ConfigError("method", self.method, remedy)
        if sizes and (extras or self.method == "adaptive"):
            unlike = _as_options(extras) or "--method adaptive"
            name, size = next(iter(sizes.items()))
            raise ConfigError(name, size, f"contradicts {unlike}: leave out {_as_options(sizes)}, or {unlike}")


MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", metavar="N", help="Maximum number of tokens to generate.")
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel="Model", help="CPU threads. Default: torch's; 1 for the embedded model."),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel="Output", help="JSON instead of text.")]


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _as_options(options: Mapping[str, Any]) -> str:
    """Return options as typed on the command line, such as `--window 5 --ngram 4`."""
    return " ".join(f"--{_option_name(name)} {value}" for name, value in options.items())


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise `ConfigError` for a number of tokens out of range."""
    if not 1 <= max_new_tokens <= _MAX_TOKENS:
        raise ConfigError("max-new-tokens", max_new_tokens, f"give a whole number >= 1 and <= {_MAX_TOKENS}")


def check_threads(threads: int | None) -> None:
    """Raise `ConfigError` for a number of CPU threads out of range."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if threads is not None and not 1 <= threads <= most:
        raise ConfigError("threads", threads, f"give a whole number >= 1 and <= {most}")


_option = options_in("Choosing tokens")


@dataclass(frozen=True)
class Choices:
    """How tokens are chosen; None is "not given"."""

    temperature: float | None = _option(None, "T", "Sampling temperature; below 1 is less random. 0: greedy decoding.")
    do_sample: bool = _option(False, "", "Sample, at the checkpoint's temperature.", "--do-sample")
    top_k: int | None = _option(None, "K", "Sample from the K most likely tokens; 0: from all.")
    top_p: float | None = _option(None, "P", "Sample from the most likely tokens whose probabilities add up to P.")
    min_p: float | None = _option(None, "P", "Sample from tokens at least P times as likely as the best.")
    seed: int | None = _option(
        None, "S", "Sampling seed of each prompt; in a chat S, S+1, ... Default: random, and reported."
    )
    repetition_penalty: float | None = _option(None, "R", "Above 1: penalise tokens that are already in the text.")
    num_beams: int = _option(1, "B", "Beam search with B beams, shown when complete.")
    stop: list[str] | None = _option(None, "TEXT", "End after this text. Repeatable.", "--stop")

    def settled(self, *, by_default: bool = False) -> Choices:
        """Return the choices, checked, with `do_sample` resolved and a seed if tokens are sampled.

        Where neither `--temperature` nor `--do-sample` is given, they are sampled `by_default`.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        check_ranges(given)
        if self.do_sample and self.temperature == 0:
            raise ConfigError("temperature", self.temperature, "contradicts --do-sample")
        do_sample = self.do_sample or (by_default if self.temperature is None else self.temperature > 0)
        for name in _ONLY_SAMPLING:
            if given[name] is not None and not do_sample:
                raise ConfigError(_option_name(name), given[name], "needs --temperature above 0, or --do-sample")
        for text in self.stop or ():
            check_text(text, "the text of --stop")
            if len(text) > _MAX_STOP_LENGTH:
                remedy = f"{len(text)} characters, give at most {_MAX_STOP_LENGTH}"
                raise ConfigError("stop", f"{text[:20]}...", remedy)
        seed = secrets.randbelow(_DRAWN_SEEDS) if do_sample and self.seed is None else self.seed
        return replace(self, do_sample=do_sample, temperature=self.temperature or None, seed=seed)

    def after(self, generations: int) -> Choices:
        """Return the choices of a later generation of the same session, with the next seed."""
        return self if self.seed is None else replace(self, seed=(self.seed + generations) % _SEEDS)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        return {"do_sample": self.do_sample, "num_beams": self.num_beams, "seed": self.seed}

    def summary(self) -> str:
        """Return the end of the statistics line; empty for greedy decoding."""
        beams = f" · {self.num_beams} beams" if self.num_beams > 1 else ""
        return beams + (f" · seed {self.seed}" if self.do_sample else "")


GREEDY = Choices()


def check_ranges(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first value, by the name of its field, out of its range; None is in all of them."""
    for name, (fits, remedy) in _RANGES.items():
        value = values.get(name)
        if value is not None and not fits(value):
            raise ConfigError(_option_name(name), value, remedy)


def _option_name(name: str) -> str:
    """Return the name of an option as typed on the command line, without dashes."""
    return name.replace("_", "-")


_grammar_option = options_in("Structured output")


@dataclass(frozen=True)
class StructuredOutput:
    """Structured output options, at most one of them."""

    json_schema: Path | None = _grammar_option(None, "FILE", "Answer with JSON of the schema in this file.")
    regex: str | None = _grammar_option(
        None, "PATTERN", "Answer with text that matches this pattern from start to end."
    )
    grammar: Path | None = _grammar_option(None, "FILE", "Answer with text of the Lark grammar in this file.")

    def read(self) -> lade.Grammar | None:
        """Return the grammar; None without these options."""
        if not self._given:
            return None
        if len(self._given) > 1:
            (first, _), (name, value), *_ = self._given
            raise ConfigError(name, value, f"contradicts --{first}")
        if self.json_schema is not None:
            schema = read_text(self.json_schema, "JSON schema")
            with self._named():
                return lade.Grammar.json_schema(schema)
        if self.grammar is not None:
            return lade.Grammar.lark(read_text(self.grammar, "grammar"))
        check_text(self.regex or "", "the pattern of --regex")
        return lade.Grammar.regex(self.regex or "")

    def check(self, grammar: lade.Grammar | None, tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> None:
        """Compile the result of `read` for a tokenizer, which finds most errors of grammars."""
        if grammar is not None:
            with self._named():
                grammar.processor(tokenizer, eos_token_id)

    @property
    def _given(self) -> list[tuple[str, str]]:
        """Names and values of the options that were given."""
        values = {_option_name(each.name): getattr(self, each.name) for each in fields(self)}
        return [(name, str(value)) for name, value in values.items() if value is not None]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn errors of the grammar into errors of the option."""
        try:
            yield
        except InputError as problem:
            ((name, value),) = self._given
            raise ConfigError(name, value, str(problem)) from problem
