"""One generation of the shell: its plan, its steps, Ctrl-C, its coloured output."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import cycle
from types import FrameType
from typing import Any

import torch
from rich.text import Text
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from lade import ConfigError, Detokenizer, Stats, Step, generate, stream, supports
from lade.cli.loading import BEAM_FIELDS, SAMPLING_FIELDS, LoadedModel
from lade.cli.options.decoding import GREEDY, Choices
from lade.cli.terminal import Terminal
from lade.config import Lookahead, LookaheadConfig, resolve


class Interrupt(StoppingCriteria):
    """Within its block the first Ctrl-C sets `requested`, the second raises `KeyboardInterrupt`.

    As a stopping criterion it ends generations that are not streamed.
    Without effect outside of the main thread, and where Ctrl-C is ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *problem: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return bool `[rows]`: True once Ctrl-C was pressed."""
        return torch.full((input_ids.shape[0],), self.requested, device=input_ids.device, dtype=torch.bool)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass
class Generation:
    """Result of a generation."""

    token_ids: list[int] = field(default_factory=list)  # without the prompt's
    prompt: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    config: LookaheadConfig | None = None  # of the drafts; None for plain decoding
    choices: Choices = GREEDY
    interrupted: bool = False
    torn: bool = False  # interrupted within a forward pass, which leaves the cache unusable
    predicted: int = 0  # number of tokens accepted from the `--prediction-file`
    finish_reason: str = "stop"  # "stop": a stop token or text; "length": token limit or context; "interrupted"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first per second of decoding; None if nothing was decoded."""
        stats = self.stats
        return (stats.new_tokens - stats.generations) / stats.decode_s if stats.decode_s else None

    def absorb(self, other: Generation) -> None:
        """Add the statistics of another generation, and take over its settings."""
        self.stats.merge(other.stats)
        self.config, self.choices = other.config, other.choices

    def as_dict(self, loaded: LoadedModel) -> dict[str, Any]:
        """Return the object that `--json` prints."""
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
            "config": None if self.config is None else _settings(self.config),
            **self.choices.as_dict(),
            "interrupted": self.interrupted,
            "finish_reason": self.finish_reason,
        }

    def summary(self) -> str:
        """Return the statistics line."""
        stats = self.stats
        rate = "" if self.tokens_per_s is None else f" · {self.tokens_per_s:.1f} tokens/s"
        fed = stats.fed_tokens / stats.steps if stats.steps else 0.0
        how = _how(self.config) + self.choices.summary()
        return (
            f"{stats.new_tokens} tokens in {stats.generations} + {stats.steps} passes · "
            f"{stats.tokens_per_step:.2f} tokens per step · {fed:.1f} fed per step · "
            f"prefill {stats.prefill_s:.2f} s · decode {stats.decode_s:.2f} s{rate} · {how}"
        )


def _settings(config: LookaheadConfig) -> dict[str, Any]:
    """Return the fields that the shell sets, a memory as a bool."""
    names = [each.name for each in fields(config) if each.name not in ("sources", "only")]
    return {**{name: getattr(config, name) for name in names}, "memory": config.memory is not None}


def _how(config: LookaheadConfig | None) -> str:
    """Return the method and its sizes for the statistics line."""
    if config is None:
        return "plain"
    if config.method.name == "lookahead":
        return f"lookahead ({config.window}, {config.ngram}, {config.guesses})"
    budget = "" if config.budget is None else f", budget {config.budget}"
    return f"{config.method.name}{budget}{', memory' if config.memory is not None else ''}"


def check_served(loaded: LoadedModel, lookahead: Lookahead, choices: Choices = GREEDY) -> None:
    """Check before the first prompt that the method supports the model, and that its tokenizer can spell stop texts."""
    if isinstance(lookahead, LookaheadConfig):
        supports(loaded.model).require()
    for text in choices.stop or ():
        try:
            StopStringCriteria(loaded.tokenizer, [text])
        except ValueError as problem:
            raise ConfigError("stop", text, f"the tokenizer of {loaded.name!r} cannot encode it") from problem


def warn_of_length(loaded: LoadedModel, longest: int, max_new_tokens: int, term: Terminal) -> None:
    """Warn if the longest prompt and the new tokens together exceed the model's context."""
    if loaded.context and longest + max_new_tokens > loaded.context:
        then = "the text ends there" if loaded.context_is_hard else "beyond it the text may get worse"
        term.say(
            f"warning: {longest} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{loaded.context}: {then}",
            "yellow",
        )


def generate_arguments(loaded: LoadedModel, choices: Choices) -> dict[str, Any]:
    """Return the arguments of `model.generate` for choosing tokens that differ from the model's own."""
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


def stop_ids(model: Any) -> set[int]:
    """Return the stop token ids of the model's generation_config."""
    eos = model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


def finish_reason(loaded: LoadedModel, run: Generation, room: int) -> str:
    """Return the finish reason of a generation that was not interrupted; see `Generation`."""
    if len(run.token_ids) < room or run.token_ids[-1] in stop_ids(loaded.model):
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
    """Generate, passing each step to `on_step`, or each token of a beam search once it is complete.

    The seed of the settled `choices` is set in torch's generator. A `cache` is empty or holds a prefix of the prompt;
    afterwards it holds all tokens but the last. `more` has further arguments of `lade.generate`, such as images.
    """
    run = Generation(prompt=prompt, choices=choices)
    ids, room = torch.tensor([prompt], device=loaded.model.device), loaded.room(prompt, max_new_tokens)
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": room,
        "lookahead": lookahead,
        **({} if cache is None else {"cache": cache}),
        **generate_arguments(loaded, choices),
        **(more or {}),
    }
    if choices.seed is not None:
        torch.manual_seed(choices.seed)
    term.show_status("reading the prompt" if choices.num_beams == 1 else "searching with beams")
    (_steps if choices.num_beams == 1 else _beams)(loaded, arguments, run, on_step)
    run.finish_reason = "interrupted" if run.interrupted else finish_reason(loaded, run, room)
    if run.stats.fallback is None:
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
    if measured.new_tokens == run.stats.new_tokens:  # plain decoding may be a token ahead when stopped
        run.stats = measured
    run.stats.fallback = measured.fallback


def _beams(loaded: LoadedModel, arguments: dict[str, Any], run: Generation, on_step: Callable[[Step], None]) -> None:
    """Run a beam search; its text is known only at the end, or after Ctrl-C."""
    with Interrupt() as interrupt:
        try:
            criteria = StoppingCriteriaList([interrupt])
            output: Any = generate(loaded.model, stats=run.stats, stopping_criteria=criteria, **arguments)
        except KeyboardInterrupt:
            run.stats, run.interrupted, run.torn = Stats(fallback=run.stats.fallback), True, True
            return
        run.interrupted = interrupt.requested
    run.token_ids = output[0, arguments["input_ids"].shape[1] :].tolist()
    run.stats.new_tokens = len(run.token_ids)  # of the best beam; it may have ended before the search did
    for index, token in enumerate(run.token_ids):
        on_step(Step(index, [token], ["bonus"], 1, 0.0))


RUNS = ("bold green", "bold cyan")


class Painter:
    """Writes steps as text; on a terminal those of several tokens have colours, in turn."""

    def __init__(self, loaded: LoadedModel, term: Terminal, context: Iterable[int] = ()) -> None:
        self._term, self._colours = term, cycle(reversed(RUNS))
        self._detokenizer = Detokenizer(loaded.tokenizer, context)

    def __call__(self, step: Step) -> None:
        """Write the text that a step completes."""
        self._write(self._detokenizer.push(step.tokens), next(self._colours) if len(step.tokens) > 1 else "")

    def finish(self, mark: str = "") -> None:
        """Write the held back text, a mark that is no part of it, and a newline."""
        self._write(self._detokenizer.flush(), "")
        self._write(mark, "dim")
        self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        if text:
            self._term.write(text, style)


def legend() -> Text:
    """Return the legend of the colours."""
    return Text.assemble(
        ("colours: ", "dim"), "one token in a step", (" · ", "dim"), ("several", RUNS[0]), (" or ", "dim"),
        ("several tokens", RUNS[1]), (" in one step", "dim"),
    )  # fmt: skip
