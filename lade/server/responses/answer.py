"""The answer of `/v1/responses`, whole and streamed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from lade.server import sse
from lade.server.answer_form import FormatNames
from lade.server.errors import ApiError
from lade.server.exchange import Exchange
from lade.server.item_answer import Event, ItemAnswer
from lade.server.responses.schemas import ResponsesRequest
from lade.server.responses.tools import Tools
from lade.server.runs import Change, Run
from lade.server.schemas import ChatRequest
from lade.server.service import Service

_PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}
_TEXTS = {"thought": "response.reasoning_text", "text": "response.output_text"}
_ARGUMENTS = "response.function_call_arguments"
_SERVED = ("function", "namespace")


class ResponsesAnswer(ItemAnswer):
    """A response.

    Args:
        service: what decodes it.
        exchange: the request.
        chat: what it asks for, of the chat API.
        asked: the same as it came.
    """

    endpoint = "responses"
    kind, id_prefix = "response", "resp_"
    prompt_field = "input"
    field_names: ClassVar = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
    format_names = FormatNames("text.format", "text.format.schema")

    def __init__(self, service: Service, exchange: Exchange, chat: ChatRequest, asked: ResponsesRequest) -> None:
        super().__init__(service, exchange, chat, asked)
        self._asked, self._sent, self._tools = asked, 0, Tools(asked.tools)

    def message(self) -> dict[str, Any]:
        """See `ItemAnswer.message`."""
        return self._response(self._status())

    def first(self) -> Iterator[Event]:
        """See `ItemAnswer.first`."""
        for name in ("response.created", "response.in_progress"):
            yield name, {"response": self._response("in_progress")}

    def told(self, change: Change) -> Iterator[Event]:
        """See `ItemAnswer.told`."""
        run = change.run
        place = {"item_id": self._item_id(run), "output_index": run.index}
        if run.kind == "call":
            yield from self._told_of_call(change, place)
            return
        place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if run.kind == "text" else {}
        if change.what == "begun":
            yield "response.output_item.added", {"output_index": run.index, "item": self._item(run, begun=True)}
            yield "response.content_part.added", {**place, "part": _part(run)}
        elif change.what == "grown":
            yield f"{_TEXTS[run.kind]}.delta", {**place, "delta": change.text, **logprobs}
        else:
            yield f"{_TEXTS[run.kind]}.done", {**place, "text": run.text, **logprobs}
            yield "response.content_part.done", {**place, "part": _part(run)}
            yield "response.output_item.done", {"output_index": run.index, "item": self._item(run)}

    def _told_of_call(self, change: Change, place: dict[str, Any]) -> Iterator[Event]:
        run = change.run
        if change.what == "begun":
            yield "response.output_item.added", {"output_index": run.index, "item": self._item(run, begun=True)}
        elif change.what == "grown":
            yield f"{_ARGUMENTS}.delta", {**place, "delta": change.text}
        else:
            name = self._told(run)["name"]
            yield f"{_ARGUMENTS}.done", {**place, "name": name, "arguments": run.text}
            yield "response.output_item.done", {"output_index": run.index, "item": self._item(run)}

    def last(self) -> Iterator[Event]:
        """See `ItemAnswer.last`."""
        yield f"response.{self._status()}", {"response": self.message()}

    def _first(self) -> Iterator[bytes]:
        return iter(()) if self._sent else super()._first()

    def ping(self) -> bytes:
        """See `Answer.ping`: events, because Codex gives up on a stream without any, whatever comments it has."""
        return b"".join(map(self.encoded, list(self.first())[-1:]) if self._sent else self._first())

    def broken(self, error: ApiError) -> Iterator[Event]:
        """See `ItemAnswer.broken`."""
        yield "response.failed", {"response": self._response("failed", error)}

    def encoded(self, event: Event) -> bytes:
        """See `ItemAnswer.encoded`; events are numbered."""
        name, others = event
        self._sent += 1
        return sse.event({"type": name, "sequence_number": self._sent - 1, **others}, name)

    def _failed(self, problem: Exception) -> ApiError:
        error = super()._failed(problem)
        head = re.split(r"[\[.]", error.param or "")[0]
        error.param = self.field_names.get(head, error.param)
        return error

    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": self.kind,
            "created_at": self._created,
            "completed_at": int(time.time()) if over else None,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.service.settings.name,
            "output": [self._item(run) for run in self.runs.all],
            **self._echo(),
            "usage": self._usage() if over else None,
            **({"lade": self.choices[0].figures} if over else {}),
        }

    def _echo(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        asked, reasoning = self._asked, self._asked.reasoning
        drawing = {"temperature": 1.0, "top_p": 1.0, **self.model.sampling}
        return {
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": drawing["temperature"] if asked.temperature is None else asked.temperature,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in asked.tools or () if tool.type in _SERVED],
            "top_p": drawing["top_p"] if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }

    def _usage(self) -> dict[str, Any]:
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }

    def _item_id(self, run: Run) -> str:
        return f"{_PREFIXES[run.kind]}_{self._id.removeprefix(self.id_prefix)}{run.index:02x}"

    def _item(self, run: Run, *, begun: bool = False) -> dict[str, Any]:
        """A run as an item; one that has only begun has nothing in it."""
        cut = run is self.runs.all[-1] and self.choices[0].finish_reason == "length"
        status = "in_progress" if not run.ended else "incomplete" if cut else "completed"
        item = {"id": self._item_id(run), "status": status}
        content = [] if begun else [_part(run)]
        match run.kind:
            case "thought":
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
        assert run.call is not None  # there is no other kind
        call_id, arguments = run.call.id, "" if begun else run.text
        return {**item, "type": "function_call", "call_id": call_id, **self._told(run), "arguments": arguments}

    def _told(self, run: Run) -> dict[str, str]:
        """The members of an item, or an event, that name what is called."""
        return self._tools.told("" if run.call is None else run.call.name)


def _part(run: Run) -> dict[str, Any]:
    if run.kind == "thought":
        return {"type": "reasoning_text", "text": run.text}
    return {"type": "output_text", "text": run.text, "annotations": [], "logprobs": []}
