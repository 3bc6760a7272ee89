"""The stream of one choice: prompt, text, logprobs, usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lade.server.errors import invalid, overloaded
from lade.server.output_items import Parts
from lade.server.output_parser import MarkupParser, PlainParser
from lade.server.served_model import TextOffsets, TokenText, finite
from lade.serving.handle import Handle
from lade.stats import Step, TokenLogprobs


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        ids: of its tokens.
        media: the other arguments of `generate`: pixels, and what says where they belong.
        text: as the model sees it, special tokens included, where something depends on that.
    """

    ids: list[int]
    media: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def check_ids(self, vocabulary: int) -> None:
        """Raise `ApiError` where it has no tokens, or one that cannot be fed.

        Args:
            vocabulary: V; placeholders of images may be above it.
        """
        if not self.ids:
            raise invalid(None, "the prompt has no tokens: send a longer one")
        if max(self.ids) >= vocabulary and not self.media:
            raise invalid("prompt", f"the prompt has the id {max(self.ids)}: give ids below {vocabulary}")


OldForm = dict[str, list[Any]]
"""Of `/v1/completions`: lists that are as long as each other."""


def tokens_of(steps: Sequence[Step]) -> Iterator[TokenLogprobs]:
    """All tokens of some steps."""
    for step in steps:
        yield from step.logprobs or ()


def chat_entry(spelling: TokenText, token: TokenLogprobs) -> dict[str, Any]:
    """A token and the likeliest ones in its place."""
    tops = [spelling.entry(each, logprob) for each, logprob in token.top]
    return {**spelling.entry(token.token, token.logprob), "top_logprobs": tops}


class CompletionLogprobs:
    """Logprobs of a text in the old form, told piece by piece: where a token begins depends on those before it.

    Args:
        spelling: of the tokens.
    """

    def __init__(self, spelling: TokenText) -> None:
        self._spelling, self._offsets = spelling, TextOffsets(spelling)

    def of_prompt(self, first: int, text: str, others: Sequence[TokenLogprobs]) -> OldForm:
        """Those of a prompt, about whose first token nothing is said.

        Args:
            first: that token.
            text: of the prompt, as it is shown; tokenizers may put a space before it.
            others: the other tokens.
        """
        told = self.of([TokenLogprobs(first, 0.0, []), *others])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        hidden = max(0, self._offsets.end - len(text))
        self._offsets.end -= hidden
        told["text_offset"] = [max(0, offset - hidden) for offset in told["text_offset"]]
        return told

    def of(self, tokens: Sequence[TokenLogprobs]) -> OldForm:
        """Those of the tokens that come next."""
        spelled = self._spelling
        return {
            "tokens": [spelled.text(each.token) for each in tokens],
            "token_logprobs": [finite(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": self._offsets.take(each.token for each in tokens),
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The likeliest ones, and the token itself; of several that are spelled alike the likeliest."""
        made: dict[str, float] = {}
        for each, value in (*token.top, (token.token, token.logprob)):
            made.setdefault(self._spelling.text(each), finite(value))
        return made


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
