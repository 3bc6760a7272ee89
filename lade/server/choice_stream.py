"""One choice of an answer: its prompt, text, logprobs and usage."""

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
class EncodedPrompt:
    """An encoded prompt.

    Attributes:
        ids: token ids.
        media: further arguments of `generate`, such as pixels and their positions.
        text: the rendered prompt, special tokens included; "" if nothing depends on it.
    """

    ids: list[int]
    media: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def check_ids(self, vocabulary: int) -> None:
        """Raise `ApiError` for an empty prompt or an id outside the vocabulary.

        Args:
            vocabulary: size of the vocabulary; placeholders of images may exceed it.
        """
        if not self.ids:
            raise invalid(None, "the prompt has no tokens: send a longer one")
        if max(self.ids) >= vocabulary and not self.media:
            raise invalid("prompt", f"the prompt has the id {max(self.ids)}: give ids below {vocabulary}")


OldForm = dict[str, list[Any]]
"""Logprobs of `/v1/completions`: lists of equal length."""


def tokens_of(steps: Sequence[Step]) -> Iterator[TokenLogprobs]:
    """Yield the logprobs of all tokens of some steps."""
    for step in steps:
        yield from step.logprobs or ()


def chat_entry(spelling: TokenText, token: TokenLogprobs) -> dict[str, Any]:
    """Return the logprobs of a token and its alternatives in the chat API's format."""
    tops = [spelling.entry(each, logprob) for each, logprob in token.top]
    return {**spelling.entry(token.token, token.logprob), "top_logprobs": tops}


class CompletionLogprobs:
    """Incremental logprobs in the format of `/v1/completions`, whose text offsets depend on the tokens before.

    Args:
        spelling: decoder of single tokens.
    """

    def __init__(self, spelling: TokenText) -> None:
        self._spelling, self._offsets = spelling, TextOffsets(spelling)

    def of_prompt(self, first: int, text: str, others: Sequence[TokenLogprobs]) -> OldForm:
        """Return the logprobs of a prompt, null for its first token.

        Args:
            first: id of the first token.
            text: the prompt as shown; tokenizers may put a space before it.
            others: logprobs of the other tokens.
        """
        told = self.of([TokenLogprobs(first, 0.0, []), *others])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        hidden = max(0, self._offsets.end - len(text))
        self._offsets.end -= hidden
        told["text_offset"] = [max(0, offset - hidden) for offset in told["text_offset"]]
        return told

    def of(self, tokens: Sequence[TokenLogprobs]) -> OldForm:
        """Return the logprobs of the next tokens."""
        spelled = self._spelling
        return {
            "tokens": [spelled.text(each.token) for each in tokens],
            "token_logprobs": [finite(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": self._offsets.take(each.token for each in tokens),
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """Return the alternatives and the token itself; of several with one spelling the likeliest."""
        made: dict[str, float] = {}
        for each, value in (*token.top, (token.token, token.logprob)):
            made.setdefault(self._spelling.text(each), finite(value))
        return made


_REASONS = {"length": "length", "time": "length"}


@dataclass(frozen=True)
class Piece:
    """The part of an answer that one step adds.

    Attributes:
        parts: text to show.
        step: the step; None at the end of the answer.
        texts: text that each token of the step adds to `parts`.
    """

    parts: Parts
    step: Step | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Ids emitted by the step."""
        return [] if self.step is None else self.step.tokens


@dataclass
class Choice:
    """One choice of an answer.

    Attributes:
        index: index among the choices of the request.
        prompt: the prompt that it continues.
        handle: the engine's handle.
        parser: parser of the generated text.
        stop_token_ids: ids of the request that end the answer.
        silent: True if only the prompt is wanted, so that the engine's one token is dropped.
        parts: the parsed answer so far.
        steps: the steps so far.
        tokens: the emitted ids so far.
        predicted_tokens: number of tokens drafted from the predicted output.
        reasoning_tokens: number of tokens emitted within reasoning.
        finish_reason: "stop", "length" or "tool_calls"; None before the end.
        stop_reason: the request's stop text or id that ended the answer, or None.
    """

    index: int
    prompt: EncodedPrompt
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
        """Add a step."""
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
        """End the choice and return held-back text.

        Raises:
            ApiError: the engine cancelled the request.
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
        """Decoding statistics."""
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
    """Return the token counts of all choices; those of a prompt count once.

    Args:
        choices: the choices of a request.
        n: number of choices per prompt.
        predicted: ids of the predicted output; None for none.
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
    """Return the numbers of accepted and rejected tokens of the predicted output, over all choices."""
    if predicted is None:
        return 0, 0
    accepted = [min(choice.predicted_tokens, len(predicted)) for choice in choices]
    return sum(accepted), len(predicted) * len(accepted) - sum(accepted)


def figures_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the decoding statistics of all choices together."""
    if len(choices) == 1:
        return choices[0].figures
    stats = [choice.handle.stats for choice in choices]
    steps, fed = sum(each.steps for each in stats), sum(each.fed_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    seed = choices[0].handle.seed
    return {"seed": seed, "steps": steps, "tokens_per_step": round(accepted / max(1, steps), 3), "fed": fed}
