"""`/v1/chat/completions`, and the base of APIs whose answers are output items."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.responses import Response

from lade.grammar import Grammar
from lade.server import serialization
from lade.server.answer import Answer
from lade.server.choice_stream import Choice, EncodedPrompt, Piece, chat_entry, tokens_of
from lade.server.errors import ApiError, unsupported
from lade.server.output_items import Change, Parts, Runs
from lade.server.output_parser import MarkupParser, PlainParser
from lade.server.request_context import Exchange
from lade.server.sampling_parameters import with_generation_config
from lade.server.schemas import BaseRequest, ChatRequest
from lade.server.serialization import Json
from lade.server.service import Service
from lade.server.structured_output import CHAT_NAMES, asked_calls, asked_form, message_grammar
from lade.stats import Step


class ChatAnswer(Answer):
    """The answer to a conversation."""

    endpoint = "chat"
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    prompt_field = "messages"
    format_names = CHAT_NAMES
    body: ChatRequest

    def __init__(
        self, service: Service, exchange: Exchange, body: ChatRequest, asked: BaseRequest | None = None
    ) -> None:
        super().__init__(service, exchange, with_generation_config(body), asked)

    @property
    def count(self) -> int:
        """See `Answer.count`."""
        return self.body.n

    @property
    def top_logprobs(self) -> int | None:
        """See `Answer.top_logprobs`."""
        return (self.body.top_logprobs or 0) if self.body.logprobs else None

    @property
    def has_special_marks(self) -> bool:
        """See `Answer.has_special_marks`."""
        return self.service.markup.has_special_tokens

    def prompts(self) -> list[EncodedPrompt]:
        """See `Answer.prompts`."""
        ids, media = self.service.template.encode(self.body)
        return [EncodedPrompt(ids, media, self.model.tokenizer.decode(ids))]

    def parser(self, prompt: EncodedPrompt) -> PlainParser | MarkupParser:
        """See `Answer.parser`."""
        return self.service.markup.parser(prompt.text, self.body.tools if self.body.tool_choice != "none" else None)

    def grammar(self, prompt: EncodedPrompt) -> tuple[Grammar, str] | None:
        """See `Answer.grammar`; tool calls follow their schemas where these can be compiled."""
        body, forms, markup = self.body, self.service.forms, self.service.markup
        asked = asked_form(body, self.format_names)
        form, param = (None, "tool_choice") if asked is None else asked
        if form is None and body.tool_choice in (None, "auto", "none"):
            goes_on = body.ignore_eos or body.min_tokens
            if not body.tools or goes_on or not forms.available or markup.has_other_thoughts:
                return None
        elif markup.has_other_thoughts:
            raise unsupported(
                param, f"{param}: this model's thoughts have a markup that no grammar knows: leave it out"
            )
        vocabulary = forms.vocabulary(param)
        if form is not None:
            forms.require(form, param)  # by itself: else an error in it would be told of the whole message
        calls = asked_calls(body, vocabulary)
        made = message_grammar(self.model.chat_template, prompt.text, form, calls, vocabulary)
        return None if made is None else (made, param)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """See `Answer.whole_choice`."""
        calls = {"tool_calls": [call.whole for call in choice.parts.tool_calls]} if choice.parts.tool_calls else {}
        message = {"role": "assistant", "refusal": None, **_members(choice.parts), **calls}
        if not choice.parts.content:
            message["content"] = None if choice.parts.tool_calls else ""
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.steps),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.tokens} if self.body.return_token_ids else {}),
        }

    def opening(self, choice: Choice) -> dict[str, Any]:
        """See `Answer.opening`."""
        ids = {"prompt_token_ids": choice.prompt.ids} if self.body.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **ids}

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """See `Answer.delta`."""
        members = _members(piece.parts)
        if piece.parts.tool_calls:
            members["tool_calls"] = [call.delta for call in piece.parts.tool_calls]
        return {
            "index": choice.index,
            "delta": members,
            "logprobs": self._logprobs([] if piece.step is None else [piece.step]),
            "finish_reason": None,
            **({"token_ids": piece.tokens} if self.body.return_token_ids else {}),
        }

    def _logprobs(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        if not self.body.logprobs or not steps:
            return None
        spelling = self.service.token_text
        return {"content": [chat_entry(spelling, token) for token in tokens_of(steps)], "refusal": None}


def _members(parts: Parts) -> dict[str, Any]:
    """Return the texts of a message or a delta, with reasoning under both names in use."""
    made: dict[str, Any] = {}
    if parts.reasoning:
        made |= {"reasoning_content": parts.reasoning, "reasoning": parts.reasoning}
    if parts.content:
        made["content"] = parts.content
    return made


Event = tuple[str, dict[str, Any]]
"""Name and data of an event."""


class ItemAnswer(ChatAnswer):
    """A single answer as a list of output items: reasoning, text and tool calls.

    A whole answer is built from the same changes that a stream sends.

    Attributes:
        runs: the output items so far.
    """

    def __init__(self, service: Service, exchange: Exchange, body: ChatRequest, asked: BaseRequest) -> None:
        super().__init__(service, exchange, body, asked)
        self.runs = Runs()

    @abstractmethod
    def message(self) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def first(self) -> Iterator[Event]:
        """Yield the first events of a stream, before the first token's."""

    @abstractmethod
    def told(self, change: Change) -> Iterator[Event]:
        """Yield the events of a change."""

    @abstractmethod
    def last(self) -> Iterator[Event]:
        """Yield the last events of a stream."""

    @abstractmethod
    def broken(self, error: ApiError) -> Iterator[Event]:
        """Yield the events that end a failed stream."""

    def encoded(self, event: Event) -> bytes:
        """Encode an event."""
        name, others = event
        return serialization.event({"type": name, **others}, name)

    async def _whole(self) -> Response:
        async for found in self._steps(None):
            if found is not None:
                list(self._changes(found[1]))
        self.ended()
        return Json(self.message(), headers=self._headers)

    def _first(self) -> Iterator[bytes]:
        return map(self.encoded, self.first())

    def _chunks(self, choice: Choice, piece: Piece) -> Iterator[bytes]:
        return (self.encoded(event) for change in self._changes(piece) for event in self.told(change))

    def _last(self) -> Iterator[bytes]:
        return map(self.encoded, self.last())

    def _broken(self, error: ApiError) -> Iterator[bytes]:
        return map(self.encoded, self.broken(error))

    def _changes(self, piece: Piece) -> Iterator[Change]:
        yield from self.runs.take(piece.parts)
        if piece.step is None:
            yield from self.runs.finish()
