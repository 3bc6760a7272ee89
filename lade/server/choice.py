"""The choices of an answer: prompts, text, usage, and output items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lade.server.errors import overloaded
from lade.server.metrics import speculative_decoding
from lade.server.output_parser import MarkupParser, Parts, PlainParser, ToolCall
from lade.server.sampling_parameters import first_seed
from lade.server.schemas import BaseRequest
from lade.server.service import Service, Serving
from lade.serving.handle import Handle
from lade.stats import Step


@dataclass(frozen=True)
class EncodedPrompt:
    """An encoded prompt."""

    ids: list[int]
    media: Mapping[str, Any] = field(default_factory=dict)  # arguments of `generate`: pixels and their positions
    text: str = ""  # rendered, with special tokens; "" if nothing depends on it


@dataclass(frozen=True)
class ChoiceDelta:
    """The part of a choice that one step adds, or its end, which has no step; `texts` are those of each token."""

    parts: Parts
    step: Step | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Ids emitted by the step."""
        return [] if self.step is None else self.step.tokens


@dataclass
class Choice:
    """One choice of an answer: its inputs, and what it has so far."""

    index: int  # among the choices of the request
    prompt: EncodedPrompt
    handle: Handle
    parser: PlainParser | MarkupParser
    stop_token_ids: frozenset[int] = frozenset()  # of the request
    silent: bool = False  # only the prompt is wanted, so that the engine's one token is dropped
    deltas: list[ChoiceDelta] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)
    tokens: list[int] = field(default_factory=list)
    predicted_tokens: int = 0  # drafted from the predicted output
    reasoning_tokens: int = 0  # emitted within reasoning
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"; None before the end
    stop_reason: str | int | None = None  # the request's stop text or id that ended the answer

    def take(self, step: Step) -> ChoiceDelta:
        """Add a step."""
        if self.silent:
            step = replace(step, tokens=[], sources=[], logprobs=[], texts=[])
        self.tokens += step.tokens
        self.predicted_tokens += step.sources.count("prediction")
        parts, texts = Parts(), []
        for text in step.texts or ():
            new = self.parser.push(text)
            parts.add(new)
            texts.append(new.reasoning + new.content)
            self.reasoning_tokens += self.parser.in_reasoning
        return self._added(ChoiceDelta(parts, step, texts))

    def finish(self) -> ChoiceDelta:
        """End the choice and return held-back text; raise `ApiError` if the engine cancelled the request."""
        reason = self.handle.reason
        if reason == "cancelled":
            raise overloaded("the engine was closed: retry the request", "engine_closed")
        cut = self.silent or reason in ("length", "time")
        delta = self._added(ChoiceDelta(self.parser.finish(cut=cut)))
        self.finish_reason = "length" if cut else "tool_calls" if self.parts.tool_calls else "stop"
        if not self.silent:
            self.stop_reason = self.handle.stop_text
            if reason in ("eos", "stop_token") and self.tokens[-1] in self.stop_token_ids:
                self.stop_reason = self.tokens[-1]
        return delta

    def _added(self, delta: ChoiceDelta) -> ChoiceDelta:
        self.deltas.append(delta)
        self.parts.add(delta.parts)
        return delta

    @property
    def steps(self) -> list[Step]:
        """The steps so far."""
        return [delta.step for delta in self.deltas if delta.step is not None]

    @property
    def figures(self) -> dict[str, Any]:
        """Decoding statistics."""
        stats = self.handle.stats
        return {
            "seed": self.handle.seed,
            "steps": stats.steps,
            "resting_steps": stats.resting_steps,
            "tokens_per_step": round(stats.tokens_per_step, 3),
            "fed": stats.fed_tokens,
            "queue_ms": _ms(self.handle.queue_s),
            "prefill_ms": _ms(self.handle.prefill_s),
            "decode_ms": _ms(stats.decode_s),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


class RequestOutput:
    """The choices of one request."""

    serving: Serving  # set when the request is accepted

    def __init__(self, service: Service, body: BaseRequest, request_id: str) -> None:
        self.service, self.body, self.request_id = service, body, request_id
        self.choices: list[Choice] = []  # by prompt; empty until they are submitted
        self.predicted: list[int] | None = None  # ids of the predicted output
        self.seed = first_seed(body)
        self.key = secrets.token_hex(16)  # part of the answer's ids
        self.created = int(time.time())

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, over all choices; those of a prompt count once."""
        firsts = self.choices[:: self.body.n]
        prompt = sum(len(choice.prompt.ids) for choice in firsts)
        answer = sum(len(choice.tokens) for choice in self.choices)
        details = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)}
        if self.predicted is not None:
            accepted, rejected = self.predictions()
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(choice.handle.cached_tokens for choice in firsts)},
            "completion_tokens_details": details,
        }

    def predictions(self) -> tuple[int, int]:
        """Return the numbers of accepted and rejected tokens of the predicted output, over all choices."""
        if self.predicted is None:
            return 0, 0
        accepted = sum(min(choice.predicted_tokens, len(self.predicted)) for choice in self.choices)
        return accepted, len(self.predicted) * len(self.choices) - accepted

    def metrics(self) -> dict[str, Any]:
        """Return the member `metrics` if the server reports acceptance; null in it for several choices, as in vLLM."""
        if self.service.settings.acceptance == "none":
            return {}
        found = speculative_decoding(self.choices[0].steps) if len(self.choices) == 1 else None
        return {"metrics": {"speculative_decoding": found}}

    def figures(self) -> dict[str, Any]:
        """Return the decoding statistics of all choices together."""
        first, *others = self.choices
        if not others:
            return first.figures
        stats = [choice.handle.stats for choice in self.choices]
        steps, fed = sum(each.steps for each in stats), sum(each.fed_tokens for each in stats)
        tokens_per_step = round(sum(each.accepted_tokens for each in stats) / max(1, steps), 3)
        return {"seed": first.handle.seed, "steps": steps, "tokens_per_step": tokens_per_step, "fed": fed}


ItemKind = Literal["reasoning", "text", "call"]


@dataclass
class OutputItem:
    """An output item: a stretch of the answer of one kind."""

    index: int  # among the items of the answer
    kind: ItemKind
    text: str = ""  # so far; the arguments as JSON for a call
    call: ToolCall | None = None  # without its arguments; None for other kinds
    ended: bool = False


@dataclass(frozen=True)
class ItemChange:
    """A change of an output item, with the item after it, and the text that a "delta" appends."""

    event: Literal["added", "delta", "done"]
    item: OutputItem
    text: str = ""


class OutputItems:
    """All output items of an answer in progress, in order; only the last one is open."""

    def __init__(self) -> None:
        self.all: list[OutputItem] = []

    def take(self, delta: ChoiceDelta) -> Iterator[ItemChange]:
        """Add an increment and yield the changes: a continued call, reasoning, text, new calls.

        At the end of the choice the last item is closed; an empty answer gets an empty text.
        """
        calls = list(delta.parts.tool_calls)
        if calls and not calls[0].id:
            yield self._append(calls.pop(0).arguments)
        texts: list[tuple[ItemKind, str]] = [("reasoning", delta.parts.reasoning), ("text", delta.parts.content)]
        for kind, text in texts:
            if not text:
                continue
            if not self.all or self.all[-1].kind != kind:
                yield from self._open(kind)
            yield self._append(text)
        for call in calls:
            yield from self._open("call", call)
            if call.arguments:
                yield self._append(call.arguments)
        if delta.step is None:
            if not self.all:
                yield from self._open("text")
            yield from self._close()

    def _open(self, kind: ItemKind, call: ToolCall | None = None) -> Iterator[ItemChange]:
        yield from self._close()
        self.all.append(OutputItem(len(self.all), kind, call=call))
        yield ItemChange("added", self.all[-1])

    def _append(self, text: str) -> ItemChange:
        self.all[-1].text += text
        return ItemChange("delta", self.all[-1], text)

    def _close(self) -> Iterator[ItemChange]:
        if self.all and not self.all[-1].ended:
            self.all[-1].ended = True
            yield ItemChange("done", self.all[-1])
