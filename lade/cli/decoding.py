"""One generation as the shell runs it: step by step, stoppable with Ctrl-C, and what it came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lade.cli.interrupt import Interrupt
from lade.cli.loading import Subject
from lade.cli.terminal import Terminal
from lade.config import LookaheadConfig
from lade.hf.arguments import resolve
from lade.hf.generate import stream
from lade.model.support import supports
from lade.stats import Stats, Step

Lookahead = LookaheadConfig | str | None


@dataclass
class Generation:
    """What a generation came to.

    Attributes:
        token_ids: the new tokens.
        stats: figures of these tokens.
        config: the sizes it ran with; None where it decoded plainly.
        interrupted: whether Ctrl-C ended it.
        torn: whether that happened inside a forward pass, so that the cache is not to be used again.
    """

    token_ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    config: LookaheadConfig | None = None
    interrupted: bool = False
    torn: bool = False

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one by the time they took; None where there is no such time."""
        stats = self.stats
        return (stats.new_tokens - stats.generations) / stats.decode_s if stats.decode_s else None

    def absorb(self, other: Generation) -> None:
        """Add another generation's figures, and take over its sizes."""
        mine, its = self.stats, other.stats
        mine.generations += its.generations
        mine.new_tokens += its.new_tokens
        mine.steps += its.steps
        mine.step_tokens += its.step_tokens
        mine.accepted += its.accepted
        mine.prefill_s += its.prefill_s
        mine.decode_s += its.decode_s
        mine.forward_s += its.forward_s
        self.config = other.config

    def as_dict(self, subject: Subject) -> dict[str, Any]:
        """The object that `--json` prints."""
        stats = self.stats
        fed = stats.step_tokens
        return {
            "text": subject.tokenizer.decode(self.token_ids, skip_special_tokens=True),
            "token_ids": self.token_ids,
            "new_tokens": stats.new_tokens,
            "steps": stats.steps,
            "tokens_per_step": stats.tokens_per_step,
            "step_tokens_mean": sum(fed) / len(fed) if fed else None,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": self.tokens_per_s,
            "model": subject.name,
            "dtype": subject.dtype,
            "config": None if self.config is None else asdict(self.config),
            "interrupted": self.interrupted,
        }

    def summary(self) -> str:
        """The statistics line."""
        stats = self.stats
        rate = "" if self.tokens_per_s is None else f" · {self.tokens_per_s:.1f} tokens/s"
        config = self.config
        how = f"lookahead ({config.window}, {config.ngram}, {config.guesses})" if config else "plain"
        fed = sum(stats.step_tokens) / stats.steps if stats.steps else 0.0
        return (
            f"{stats.new_tokens} tokens in {stats.generations} + {stats.steps} passes · "
            f"{stats.tokens_per_step:.2f} tokens a step · {fed:.1f} fed a step · "
            f"prefill {stats.prefill_s:.2f} s · decode {stats.decode_s:.2f} s{rate} · {how}"
        )


def check_served(subject: Subject, lookahead: Lookahead) -> None:
    """Raise `UnsupportedModelError` where a method was asked for that the model cannot be decoded with."""
    if isinstance(lookahead, LookaheadConfig):
        supports(subject.model).require()


def decode(
    subject: Subject,
    prompt: list[int],
    *,
    lookahead: Lookahead,
    max_new_tokens: int,
    term: Terminal,
    on_step: Callable[[Step], None],
    cache: Any = None,
) -> Generation:
    """Generate, telling `on_step` each step.

    Args:
        subject: what generates.
        prompt: ids, at least one.
        lookahead: as in `lade.generate`.
        max_new_tokens: at least 1.
        term: learns of a fallback to plain decoding.
        on_step: is called with each `Step`; its time counts for nothing where lookahead decodes.
        cache: a `TreeCache` that may hold a part of the prompt; it is left holding all tokens but the last.
    """
    run, measured, fallbacks = Generation(), Stats(), len(term.fallbacks)
    with Interrupt() as interrupt:
        steps = _start(subject, prompt, max_new_tokens, cache, lookahead=lookahead, stats=measured)
        if len(term.fallbacks) == fallbacks:
            run.config = resolve(lookahead)[0]
        try:
            for step in steps:
                run.token_ids += step.tokens
                run.stats.add(step)
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
    return run


def _start(subject: Subject, prompt: list[int], max_new_tokens: int, cache: Any, **arguments: Any) -> Any:
    """The steps of a generation that has not begun, a generator."""
    ids = torch.tensor([prompt], device=subject.model.device)
    if cache is not None:
        arguments["past_key_values"] = cache
    room = subject.room(prompt, max_new_tokens)
    return stream(subject.model, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, **arguments)
