"""The answer of `/v1/messages`, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic_core import from_json

from lade.server import sse
from lade.server.errors import TOO_LONG, ApiError, invalid
from lade.server.exchange import Exchange
from lade.server.item_answer import Event, ItemAnswer
from lade.server.messages.errors import as_anthropic
from lade.server.messages.schemas import MessagesRequest
from lade.server.runs import Change, Run
from lade.server.schemas import ChatRequest
from lade.server.service import Service

_DELTAS = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ItemAnswer):
    """A message.

    Args:
        service: what decodes it.
        exchange: the request.
        chat: what it asks for, of the chat API.
        asked: the same as it came.
    """

    endpoint = "messages"
    kind, id_prefix = "message", "msg_"
    field_names: ClassVar = {"chat_template_kwargs.enable_thinking": "thinking"}

    def __init__(self, service: Service, exchange: Exchange, chat: ChatRequest, asked: MessagesRequest) -> None:
        super().__init__(service, exchange, chat, asked)

    def too_long(self, tokens: int, context: int, least: str = "") -> ApiError:
        """See `Answer.too_long`; the number is what clients read."""
        return invalid("messages", f"prompt is too long: {tokens} tokens > {context - 1} maximum", TOO_LONG)

    def ping(self) -> bytes:
        """See `Answer.ping`."""
        return sse.event({"type": "ping"}, "ping")

    def message(self) -> dict[str, Any]:
        """See `ItemAnswer.message`."""
        content = [_block(run) for run in self.runs.all]
        return {
            **self._begun(),
            "content": content,
            **self._end(),
            "usage": self._usage(),
            "lade": self.choices[0].figures,
        }

    def first(self) -> Iterator[Event]:
        """See `ItemAnswer.first`."""
        yield "message_start", {"message": {**self._begun(), "usage": {**self._usage(), "output_tokens": 0}}}

    def told(self, change: Change) -> Iterator[Event]:
        """See `ItemAnswer.told`."""
        run, place = change.run, {"index": change.run.index}
        if change.what == "begun":
            yield "content_block_start", {**place, "content_block": _block(run)}
        elif change.what == "ended":
            yield "content_block_stop", place
        elif run.kind == "call":
            yield "content_block_delta", {**place, "delta": {"type": "input_json_delta", "partial_json": change.text}}
        else:
            kind, member = _DELTAS[run.kind]
            yield "content_block_delta", {**place, "delta": {"type": kind, member: change.text}}

    def last(self) -> Iterator[Event]:
        """See `ItemAnswer.last`."""
        yield "message_delta", {"delta": self._end(), "usage": self._usage(), "lade": self.choices[0].figures}
        yield "message_stop", {}

    def broken(self, error: ApiError) -> Iterator[Event]:
        """See `ItemAnswer.broken`."""
        yield "error", as_anthropic(error.status, error.message, self._request_id)

    def _begun(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": self.kind,
            "role": "assistant",
            "model": self.service.settings.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _end(self) -> dict[str, Any]:
        (choice,) = self.choices
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        reason = "stop_sequence" if stop is not None else _REASONS.get(choice.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """So far; tokens of the prompt that were kept are not counted among those that were read."""
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
        }


def _block(run: Run) -> dict[str, Any]:
    """A run as far as it is known; that of a call has its arguments when they are whole."""
    match run.kind:
        case "thought":
            return {"type": "thinking", "thinking": run.text, "signature": ""}
        case "text":
            return {"type": "text", "text": run.text}
    assert run.call is not None  # there is no other kind
    return {"type": "tool_use", "id": run.call.id, "name": run.call.name, "input": _object(run.text)}


def _object(arguments: str) -> dict[str, Any]:
    """What the arguments of a call mean, as far as they go; {} where that is no object."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
