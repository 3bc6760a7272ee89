"""One answer to one prompt, while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lade.server.errors import overloaded
from lade.server.message_parts import MarkupParser, PlainParser
from lade.server.prompt import Prompt
from lade.server.runs import Parts
from lade.serving.handle import Handle
from lade.stats import Step

_REASONS = {"length": "length", "time": "length"}


@dataclass(frozen=True)
class Piece:
    """What a step adds to an answer.

    Attributes:
        parts: text that can be shown.
        step: the step; None for what comes at the end.
        texts: what of the parts each token of the step has added.
    """

    parts: Parts
    step: Step | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Emitted ones."""
        return [] if self.step is None else self.step.tokens


@dataclass
class Choice:
    """One answer.

    Attributes:
        index: its number among the answers of a request.
        prompt: what it answers.
        handle: of the engine.
        parser: takes its text apart.
        stop_token_ids: ids that end it because the request says so.
        silent: whether the prompt is all that is asked for: the engine's one token is none of it.
        parts: all of it so far.
        steps: likewise.
        tokens: all that were emitted.
        predicted_tokens: those that came as a text said that was expected.
        reasoning_tokens: those that were emitted within thoughts.
        finish_reason: "stop", "length" or "tool_calls"; None before the end.
        stop_reason: the text or the id that ended it, if one of the request did.
    """

    index: int
    prompt: Prompt
    handle: Handle
    parser: PlainParser | MarkupParser
    stop_token_ids: frozenset[int] = frozenset()
    silent: bool = False
    parts: Parts = field(default_factory=Parts)
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    predicted_tokens: int = 0
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, step: Step) -> Piece:
        """A step has come."""
        if self.silent:
            step = replace(step, tokens=[], sources=[], logprobs=[], texts=[])
        self.steps.append(step)
        self.tokens += step.tokens
        self.predicted_tokens += step.sources.count("prediction")
        parts, texts = Parts(), []
        for text in step.texts or ():
            new = self.parser.push(text)
            parts.add(new)
            texts.append(new.reasoning + new.content)
            self.reasoning_tokens += self.parser.thinks
        self.parts.add(parts)
        return Piece(parts, step, texts)

    def finish(self) -> Piece:
        """The last step has come.

        Raises:
            ApiError: it was ended from this side.
        """
        reason = self.handle.reason
        if reason == "cancelled":
            raise overloaded("the engine ended this request: send it again", "engine_closed")
        parts = self.parser.finish(cut=reason in _REASONS)
        self.parts.add(parts)
        self._conclude(reason)
        return Piece(parts)

    def _conclude(self, reason: str | None) -> None:
        if self.silent:
            self.finish_reason = "length"
            return
        last = self.steps[-1].tokens[-1]
        self.stop_reason = self.handle.stop_text
        if reason in ("eos", "stop_token") and last in self.stop_token_ids:
            self.stop_reason = last
        self.finish_reason = _REASONS.get(reason or "", "stop")
        if self.finish_reason == "stop" and self.parts.tool_calls:
            self.finish_reason = "tool_calls"

    @property
    def figures(self) -> dict[str, Any]:
        """What decoding it took."""
        stats = self.handle.stats
        return {
            "seed": self.handle.seed,
            "steps": stats.steps,
            "tokens_per_step": round(stats.tokens_per_step, 3),
            "fed": stats.fed_tokens,
            "queue_ms": _ms(self.handle.queue_s),
            "prefill_ms": _ms(self.handle.prefill_s),
            "decode_ms": _ms(stats.decode_s),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def usage_of(choices: Sequence[Choice], n: int, predicted: Sequence[int] | None) -> dict[str, Any]:
    """Tokens of all choices so far; those of a prompt count once.

    Args:
        choices: the answers of a request.
        n: how many of them each prompt has.
        predicted: ids that were expected; None where nothing was.
    """
    firsts = choices[::n]
    prompt = sum(len(choice.prompt.ids) for choice in firsts)
    answer = sum(len(choice.tokens) for choice in choices)
    details = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
    if predicted is not None:
        accepted, rejected = predictions_of(choices, predicted)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(choice.handle.cached_tokens for choice in firsts)},
        "completion_tokens_details": details,
    }


def predictions_of(choices: Sequence[Choice], predicted: Sequence[int] | None) -> tuple[int, int]:
    """How many tokens of what was expected have come as expected, and how many have not; those of all answers."""
    if predicted is None:
        return 0, 0
    accepted = [min(choice.predicted_tokens, len(predicted)) for choice in choices]
    return sum(accepted), len(predicted) * len(accepted) - sum(accepted)


def figures_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """What decoding all choices took together."""
    if len(choices) == 1:
        return choices[0].figures
    stats = [choice.handle.stats for choice in choices]
    steps, fed = sum(each.steps for each in stats), sum(each.fed_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    seed = choices[0].handle.seed
    return {"seed": seed, "steps": steps, "tokens_per_step": round(accepted / max(1, steps), 3), "fed": fed}
