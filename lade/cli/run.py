"""One generation of the shell: its plan, its steps, Ctrl-C, its coloured output."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import FrameType, TracebackType
from typing import Any

import torch
from rich.text import Text
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from lade.cli.encoder import Encoder
from lade.cli.loading import checkpoint
from lade.cli.loading.checkpoint import BEAM_FIELDS, SAMPLING_FIELDS
from lade.cli.loading.load import LoadedModel
from lade.cli.options.decoding import GREEDY, Choices
from lade.cli.terminal import Terminal
from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError
from lade.grammar import Grammar
from lade.hf.detokenizer import Detokenizer
from lade.hf.generate import generate, stream
from lade.hf.refusals import resolve
from lade.model.support.supports import supports
from lade.stats import Stats, Step


class Interrupt(StoppingCriteria):
    """While it is entered, the first Ctrl-C sets `requested`; the second raises `KeyboardInterrupt` at once.

    As a stopping criterion it ends what does not come step by step.
    Outside of the main thread, and where Ctrl-C is ignored, it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """`[rows]` of whether Ctrl-C was pressed."""
        return torch.full((input_ids.shape[0],), self.requested, device=input_ids.device, dtype=torch.bool)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass
class Generation:
    """What a generation came to.

    Attributes:
        token_ids: the new tokens.
        prompt: the ids before them.
        stats: figures of these tokens.
        config: the sizes it ran with; None where it decoded plainly.
        choices: how its tokens were chosen.
        interrupted: whether Ctrl-C ended it.
        torn: whether that happened inside a forward pass, so that the cache is not to be used again.
        predicted: tokens that came as the text said that the answer was expected to follow.
        finish_reason: "stop": the model or a stop text ended it; "length": it was cut off, by the number of tokens or
            by the end of the context; "interrupted".
    """

    token_ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    config: LookaheadConfig | None = None
    choices: Choices = GREEDY
    interrupted: bool = False
    torn: bool = False
    predicted: int = 0
    finish_reason: str = "stop"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one by the time they took; None where there is no such time."""
        stats = self.stats
        return (stats.new_tokens - stats.generations) / stats.decode_s if stats.decode_s else None

    def absorb(self, other: Generation) -> None:
        """Add another generation's figures, and take over its sizes."""
        self.stats.merge(other.stats)
        self.config, self.choices = other.config, other.choices

    def as_dict(self, loaded: LoadedModel) -> dict[str, Any]:
        """The object that `--json` prints."""
        stats = self.stats
        return {
            "text": Detokenizer(loaded.tokenizer, self.prompt).whole(self.token_ids),
            "token_ids": self.token_ids,
            "new_tokens": stats.new_tokens,
            "steps": stats.steps,
            "tokens_per_step": stats.tokens_per_step,
            "step_tokens_mean": stats.fed_tokens / stats.steps if stats.steps else None,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": self.tokens_per_s,
            "predicted_tokens": self.predicted,
            **loaded.facts,
            "config": config_dict(self.config),
            **self.choices.as_dict(),
            "interrupted": self.interrupted,
            "finish_reason": self.finish_reason,
        }

    def summary(self) -> str:
        """The statistics line."""
        stats = self.stats
        rate = "" if self.tokens_per_s is None else f" · {self.tokens_per_s:.1f} tokens/s"
        fed = stats.fed_tokens / stats.steps if stats.steps else 0.0
        how = _how(self.config) + self.choices.summary()
        return (
            f"{stats.new_tokens} tokens in {stats.generations} + {stats.steps} passes · "
            f"{stats.tokens_per_step:.2f} tokens a step · {fed:.1f} fed a step · "
            f"prefill {stats.prefill_s:.2f} s · decode {stats.decode_s:.2f} s{rate} · {how}"
        )


def config_dict(config: LookaheadConfig | None) -> dict[str, Any] | None:
    """The fields; of a memory, whether there is one."""
    if config is None:
        return None
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {**values, "memory": config.memory is not None}


def _how(config: LookaheadConfig | None) -> str:
    """The method, for the statistics line."""
    if config is None:
        return "plain"
    if not config.adaptive:
        return f"lookahead ({config.window}, {config.ngram}, {config.guesses})"
    budget = "" if config.budget is None else f", budget {config.budget}"
    return f"adaptive{budget}{', memory' if config.memory is not None else ''}"


def check_served(loaded: LoadedModel, lookahead: Lookahead, choices: Choices = GREEDY) -> None:
    """Raise what would be wrong with every prompt.

    Raises:
        UnsupportedModelError: the model cannot be decoded with this method.
        ConfigError: a stop text that its tokenizer cannot spell, or a checkpoint's value that is out of range.
    """
    if isinstance(lookahead, LookaheadConfig):
        supports(loaded.model).require()
    checkpoint.check_choices(generate_arguments(loaded, choices), loaded.name)
    for text in choices.stop or ():
        try:
            StopStringCriteria(loaded.tokenizer, [text])
        except ValueError as problem:
            raise ConfigError("stop", text, f"no tokens of {loaded.name!r} spell it: give another") from problem


def warn_of_length(loaded: LoadedModel, longest: int, max_new_tokens: int, term: Terminal) -> None:
    """Say so where the longest prompt and the new tokens together leave the model's context."""
    if loaded.context and longest + max_new_tokens > loaded.context:
        then = "the text ends there" if loaded.ends else "beyond it the text may get worse"
        term.say(
            f"warning: {longest} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{loaded.context}: {then}",
            "yellow",
        )


def generate_arguments(loaded: LoadedModel, choices: Choices) -> dict[str, Any]:
    """Arguments of `model.generate` for choosing tokens; others are the model's own."""
    arguments: dict[str, Any] = {"repetition_penalty": choices.repetition_penalty}
    if choices.do_sample:
        checkpoint_defaults = {name: loaded.checkpoint_defaults.get(name) for name in SAMPLING_FIELDS}
        mine = {name: getattr(choices, name, None) for name in SAMPLING_FIELDS}
        arguments |= {name: value if mine[name] is None else mine[name] for name, value in checkpoint_defaults.items()}
        arguments["do_sample"] = True
    if choices.num_beams > 1:
        arguments |= {name: loaded.checkpoint_defaults.get(name) for name in BEAM_FIELDS}
        arguments["num_beams"] = choices.num_beams
    if choices.stop:
        arguments |= {"stop_strings": choices.stop, "tokenizer": loaded.tokenizer}
    return {name: value for name, value in arguments.items() if value is not None}


def finish_reason(loaded: LoadedModel, run: Generation, room: int) -> str:
    """Why a generation ended that was not interrupted; see `Generation`.

    Args:
        loaded: what generated.
        run: its tokens, its prompt, and its stop texts.
        room: the number of tokens that it might have.
    """
    if len(run.token_ids) < room:
        return "stop"  # nothing else ends it before
    end = loaded.model.generation_config.eos_token_id
    if run.token_ids[-1] in (end if isinstance(end, list) else [end]):
        return "stop"
    if not run.choices.stop:
        return "length"
    text = torch.tensor([run.prompt + run.token_ids])
    stopped = StopStringCriteria(loaded.tokenizer, run.choices.stop)(text, None)
    return "stop" if stopped.all() else "length"


def decode(
    loaded: LoadedModel,
    prompt: list[int],
    *,
    lookahead: Lookahead,
    max_new_tokens: int,
    term: Terminal,
    on_step: Callable[[Step], None],
    choices: Choices = GREEDY,
    cache: Any = None,
    more: Mapping[str, Any] | None = None,
) -> Generation:
    """Generate, telling `on_step` each step, or each token of a beam search when it is complete.

    Args:
        loaded: what generates.
        prompt: ids, at least one.
        lookahead: as in `lade.generate`.
        max_new_tokens: at least 1.
        term: learns of a fallback to plain decoding.
        on_step: is called with each `Step`; its time counts for nothing where lookahead decodes.
        choices: settled ones; their seed becomes that of torch's generator.
        cache: a `TreeCache` that may hold a part of the prompt; it is left holding all tokens but the last.
        more: arguments of `lade.generate`: images in the prompt, a text that the answer is expected to follow.
    """
    run, fallbacks = Generation(prompt=prompt, choices=choices), len(term.fallbacks)
    ids, room = torch.tensor([prompt], device=loaded.model.device), loaded.room(prompt, max_new_tokens)
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": room,
        "lookahead": lookahead,
        **({} if cache is None else {"past_key_values": cache}),
        **generate_arguments(loaded, choices),
        **(more or {}),
    }
    if choices.seed is not None:
        torch.manual_seed(choices.seed)
    term.working("reading the prompt" if choices.num_beams == 1 else "searching with beams")
    (_steps if choices.num_beams == 1 else _beams)(loaded, arguments, run, on_step)
    run.finish_reason = "interrupted" if run.interrupted else finish_reason(loaded, run, room)
    if len(term.fallbacks) == fallbacks:
        run.config = resolve(lookahead)[0]
    return run


def _steps(loaded: LoadedModel, arguments: dict[str, Any], run: Generation, on_step: Callable[[Step], None]) -> None:
    measured = Stats()
    with Interrupt() as interrupt:
        steps: Any = stream(loaded.model, stats=measured, **arguments)  # a generator
        try:
            for step in steps:
                run.token_ids += step.tokens
                run.stats.add(step)
                run.predicted += step.sources.count("prediction")
                on_step(step)
                if interrupt.requested:
                    run.interrupted = True
                    break
        except KeyboardInterrupt:
            run.interrupted = run.torn = True
        finally:
            steps.close()
    if measured.new_tokens == run.stats.new_tokens:  # else plain decoding was a token ahead when it was stopped
        run.stats = measured


def _beams(loaded: LoadedModel, arguments: dict[str, Any], run: Generation, on_step: Callable[[Step], None]) -> None:
    """Beams change until the last of them ends, so their text comes at the end; so it does after Ctrl-C."""
    with Interrupt() as interrupt:
        try:
            criteria = StoppingCriteriaList([interrupt])
            output: Any = generate(loaded.model, stats=run.stats, stopping_criteria=criteria, **arguments)
        except KeyboardInterrupt:
            run.stats, run.interrupted, run.torn = Stats(), True, True
            return
        run.interrupted = interrupt.requested
    run.token_ids = output[0, arguments["input_ids"].shape[1] :].tolist()
    run.stats.new_tokens = len(run.token_ids)  # of the best beam; it may have ended before the search did
    for index, token in enumerate(run.token_ids):
        on_step(Step(index, [token], ["bonus"], 1, 0.0))


@dataclass(frozen=True)
class GenerationPlan:
    """How all prompts of a command are decoded.

    Attributes:
        loaded: what generates.
        encode: makes ids of a prompt.
        lookahead: as in `lade.generate`.
        choices: settled ones.
        max_new_tokens: of each.
        grammar: that answers have to follow, if any.
    """

    loaded: LoadedModel
    encode: Encoder
    lookahead: Lookahead
    choices: Choices
    max_new_tokens: int
    grammar: Grammar | None = None

    @property
    def form(self) -> dict[str, Any]:
        """Arguments of `lade.generate` about the grammar."""
        return {} if self.grammar is None else {"grammar": self.grammar, "tokenizer": self.loaded.tokenizer}

    @property
    def settings(self) -> dict[str, Any]:
        """The options, as far as the object that `--json` prints does not have them."""
        shown = self.choices.as_dict()
        others = {name: value for name, value in asdict(self.choices).items() if name not in shown}
        given = {"method": _method(self.config), "max_new_tokens": self.max_new_tokens, **others}
        form = {} if self.grammar is None else {"grammar": self.grammar.source}
        rounding = {"invariant": True} if self.loaded.invariant else {}
        return {**given, **form, **self.loaded.variant, **rounding, **self.encode.settings}

    @property
    def config(self) -> LookaheadConfig | None:
        """The method and its sizes; None decodes plainly."""
        return resolve(self.lookahead)[0]

    @property
    def terms(self) -> dict[str, Any]:
        """What all lines of a file have alike."""
        return {
            "model": self.loaded.name,
            "dtype": self.loaded.dtype,
            "packed": self.loaded.packed,
            "settings": self.settings,
            "config": config_dict(self.config),
            **self.choices.as_dict(),
        }


def _method(config: LookaheadConfig | None) -> str:
    """What it is called on the command line."""
    if config is None:
        return "plain"
    return "adaptive" if config.adaptive else "lookahead"


RUNS = ("bold green", "bold cyan")


class Palette:
    """Styles for steps: plain for a single token, and alternating colours for those that yielded several."""

    def __init__(self) -> None:
        self._runs = 0

    def style(self, tokens: int) -> str:
        """The style of the next step, which yielded this many tokens."""
        if tokens < 2:
            return ""
        self._runs += 1
        return RUNS[self._runs % len(RUNS)]


class Painter:
    """Writes steps as text, coloured on a terminal.

    Args:
        loaded: has the tokenizer.
        term: is written to.
        context: ids of the prompt that the text continues.
    """

    def __init__(self, loaded: LoadedModel, term: Terminal, context: Iterable[int] = ()) -> None:
        self._term, self._palette = term, Palette()
        self._detokenizer = Detokenizer(loaded.tokenizer, context)

    def __call__(self, step: Step) -> None:
        """Write what a step completes."""
        style = self._palette.style(len(step.tokens))
        self._write(self._detokenizer.push(step.tokens), style)

    def finish(self, mark: str = "") -> None:
        """Write what was held back, and end the line, with a mark that is not of the text."""
        self._write(self._detokenizer.flush(), "")
        self._write(mark, "dim")
        self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        if text:
            self._term.write(text, style)


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("colours: ", "dim"), "one token in a step", (" · ", "dim"), ("several", RUNS[0]), (" or ", "dim"),
        ("several tokens", RUNS[1]), (" in one step", "dim"),
    )  # fmt: skip
