"""`/v1/responses`: OpenAI's stateless item API, its schemas, conversion to a chat request, and answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt

from lade.server import serialization
from lade.server.answer import Formatter
from lade.server.choice import Choice, ChoiceDelta, ItemChange, OutputItem, OutputItems, RequestOutput
from lade.server.errors import ApiError, invalid, unsupported
from lade.server.schemas import BaseRequest, ChatRequest, Model, Names, Object, Text, chat_request, refuse
from lade.server.settings import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS


class InputPart(Model):
    """A part of a message, an output, or reasoning."""

    type: str
    text: Text | None = None
    refusal: Text | None = None
    image_url: str | None = None


InputParts = Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputItem(Model):
    """A message, tool call, tool output or reasoning; its type decides which fields are required."""

    type: str = Field("message", max_length=64)
    role: str | None = Field(None, min_length=1, max_length=64)
    content: Text | InputParts | None = None
    summary: InputParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: Text | InputParts | None = None


class Reasoning(Model):
    """Reasoning options."""

    effort: str | None = None
    summary: Any = None


class TextOptions(Model):
    """Format of the text."""

    format: Object | None = None
    verbosity: Any = None


ToolList = Annotated[list["ResponsesTool"], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ResponsesTool(Model):
    """A tool; functions are served, alone or in namespaces."""

    type: str = Field(max_length=64)
    name: str | None = None
    tools: ToolList | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: StrictBool | None = None


class ResponsesRequest(BaseRequest):
    """Request body of `/v1/responses`."""

    input: Text | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    tools: ToolList | None = None
    tool_choice: Literal["auto", "none", "required"] | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Names | None = None
    client_metadata: Any = None
    truncation: Any = None
    prompt_cache_retention: Any = None


_BETWEEN = "__"


class Tools:
    """The functions of a request, alone or in namespaces.

    The model sees a function of a namespace as `namespace__name`; the client gets the two names separately.
    """

    def __init__(self, given: Sequence[ResponsesTool] | None) -> None:
        self.functions: list[dict[str, Any]] = []  # in the chat API's format
        self.dropped: list[str] = []  # types of the tools that are not served
        self._places: dict[str, dict[str, str]] = {}
        for tool in given or ():
            if tool.type == "namespace":
                for each in tool.tools or ():
                    self._add(each, tool.name)
            else:
                self._add(tool, None)

    def item_names(self, name: str) -> dict[str, str]:
        """Return the members of an item that name a function called by the model."""
        return self._places.get(name, {"name": name})

    def _add(self, tool: ResponsesTool, namespace: str | None) -> None:
        if tool.type != "function":
            self.dropped.append(tool.type)
            return
        name = flat_name(tool.name, namespace)
        fields = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        given = {field: value for field, value in fields.items() if value is not None}
        self.functions.append({"type": "function", "function": given})
        if namespace and name and tool.name:
            self._places[name] = {"namespace": namespace, "name": tool.name}


def flat_name(name: str | None, namespace: str | None) -> str | None:
    """Return the model's name of a function; the name itself outside of any namespace."""
    if not namespace or name is None:
        return name
    return f"{namespace.removesuffix(_BETWEEN)}{_BETWEEN}{name}"


_LOGPROBS = "message.output_text.logprobs"
_NOT_KEPT = {
    "prompt": "stored prompts are not supported: send instructions and input",
    "previous_response_id": "responses are not stored: send all items in input",
    "conversation": "conversations are not stored: send all items in input",
    "background": "background responses are not supported: wait for this one, or stream it",
    "top_logprobs": "use /v1/chat/completions for logprobs",
    "max_tool_calls": "this server calls no tools: leave it out",
}
Messages = list[dict[str, Any]]


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Convert to a chat request; raise `ApiError` for invalid items, and stored state or other unsupported fields."""
    refuse(request, _NOT_KEPT)
    if _LOGPROBS in (request.include or ()):
        raise unsupported("include", f"{_LOGPROBS}: use /v1/chat/completions for logprobs")
    tools = Tools(request.tools)
    return chat_request(
        request,
        messages=messages_of(request),
        tools=tools.functions or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        response_format=_format(request),
        **{f"tools.{kind}": "" for kind in tools.dropped},
    )


def messages_of(request: ResponsesRequest) -> Messages:
    """Convert instructions and items to chat messages; consecutive items of an assistant form one message."""
    made: Messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*made, {"role": "user", "content": request.input}]
    names: dict[str, str] = {}
    for number, item in enumerate(request.input):
        place = f"input[{number}]"
        match item.type:
            case "message" | "agent_message":
                _add_message(made, item, place)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else item.summary
                thought = "".join(part.text or "" for part in parts or item.summary or ())
                _assistant(made, "content", "tool_calls")["reasoning_content"] = thought
            case "function_call" | "custom_tool_call":
                call = _call(item, place)
                names[call["id"]] = call["function"]["name"]
                _assistant(made).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                made.append(_tool_message(item, names, place))
            case _:
                remedy = "send messages, function calls and outputs"
                raise unsupported(f"{place}.type", f"items of type {item.type!r} are not supported: {remedy}")
    return made


def _add_message(made: Messages, item: InputItem, place: str) -> None:
    role = _required(item, "role", place) if item.type == "message" else "user"  # messages of other agents
    if item.content is None:
        raise invalid(f"{place}.content", "a message needs text or parts")
    content = _content(item.content, f"{place}.content")
    if role == "assistant":
        _assistant(made, "content", "tool_calls")["content"] = content
    else:
        made.append({"role": role, "content": content})


def _assistant(made: Messages, *taken: str) -> dict[str, Any]:
    """Return the last message if it is an assistant's without these fields, else a new one."""
    last = made[-1] if made else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        made.append({"role": "assistant", "content": None})
    return made[-1]


def _call(item: InputItem, place: str) -> dict[str, Any]:
    """Return a tool call; a custom tool's call, from another server, has one text argument."""
    call_id, name = _required(item, "call_id", place), flat_name(_required(item, "name", place), item.namespace)
    if item.type == "custom_tool_call":
        arguments = json.dumps({"input": _required(item, "input", place)}, ensure_ascii=False)
    else:
        arguments = _required(item, "arguments", place)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_message(item: InputItem, names: dict[str, str], place: str) -> dict[str, Any]:
    call_id = _required(item, "call_id", place)
    if item.output is None:
        raise invalid(f"{place}.output", "give what the function returned, as text")
    name = {"name": names[call_id]} if call_id in names else {}
    content = _content(item.output, f"{place}.output")
    return {"role": "tool", "tool_call_id": call_id, **name, "content": content}


def _required(item: InputItem, name: str, place: str) -> str:
    value: str | None = getattr(item, name)
    if value is None:
        raise invalid(f"{place}.{name}", f"required for items of type {item.type!r}")
    return value


def _content(content: str | Sequence[InputPart], place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    made: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in ("input_text", "output_text", "text", "refusal") and text is not None:
            made.append({"type": "text", "text": text})
        elif part.type == "input_image" and part.image_url is not None:
            made.append({"type": "image_url", "image_url": {"url": part.image_url}})
        else:
            why = f"parts of type {part.type[:40]!r} are not supported: send input_text, or input_image with a URL"
            raise unsupported(f"{place}[{number}]", why)
    return made


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": flat_name(choice.get("name"), choice.get("namespace"))}}
    return choice


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` as a `response_format`, which nests the schema one level deeper."""
    found = None if request.text is None else request.text.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: found[name] for name in found if name != "type"}}


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_CONTENTS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
_SERVED = ("function", "namespace")


class ResponsesFormatter(Formatter):
    """A response object, or the events of its items; it repeats fields of the body as the client sent it."""

    endpoint = "responses"
    prompt_field = "input"
    field_names: ClassVar = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, sent: ResponsesRequest, output: RequestOutput) -> None:
        super().__init__(output)
        self._request, self._tools, self._items = sent, Tools(sent.tools), OutputItems()
        self._sent = 0  # events

    def whole(self) -> dict[str, Any]:
        """See `Formatter.whole`."""
        (choice,) = self.output.choices
        for delta in choice.deltas:
            list(self._items.take(delta))
        return self._response(self._status())

    def first(self) -> Iterator[bytes]:
        """See `Formatter.first`; none if a ping has sent them."""
        if self._sent:
            return
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def step(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """See `Formatter.step`."""
        for change in self._items.take(delta):
            yield from self._changed(change)

    def last(self) -> Iterator[bytes]:
        """See `Formatter.last`."""
        yield self._event(f"response.{self._status()}", response=self._response(self._status()))

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """See `Formatter.failed`."""
        yield self._event("response.failed", response=self._response("failed", error))

    def ping(self) -> bytes:
        """See `Formatter.ping`; an event, since Codex times out on a stream of comments only."""
        if not self._sent:
            return b"".join(self.first())
        return self._event("response.in_progress", response=self._response("in_progress"))

    def _event(self, event_name: str, /, **members: Any) -> bytes:
        """Encode an event with the next number."""
        self._sent += 1
        return serialization.event({"type": event_name, "sequence_number": self._sent - 1, **members}, event_name)

    def _changed(self, change: ItemChange) -> Iterator[bytes]:
        item, is_call = change.item, change.item.call is not None
        place: dict[str, Any] = {"item_id": self._item_id(item), "output_index": item.index}
        if not is_call:
            place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "text" else {}  # always empty
        if change.event == "delta":
            yield self._event(f"{_CONTENTS[item.kind]}.delta", **place, delta=change.text, **logprobs)
        elif change.event == "added":
            yield self._event("response.output_item.added", output_index=item.index, item=self._item(item, begun=True))
            if not is_call:
                yield self._event("response.content_part.added", **place, part=_part(item))
        else:
            whole = {"name": self._item(item)["name"], "arguments": item.text} if is_call else {"text": item.text}
            yield self._event(f"{_CONTENTS[item.kind]}.done", **place, **whole, **logprobs)
            if not is_call:
                yield self._event("response.content_part.done", **place, part=_part(item))
            yield self._event("response.output_item.done", output_index=item.index, item=self._item(item))

    def _status(self) -> str:
        return "incomplete" if self.output.choices[0].finish_reason == "length" else "completed"

    def _response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        output, over = self.output, status in ("completed", "incomplete")
        return {
            "id": f"resp_{output.key}",
            "object": "response",
            "created_at": output.created,
            "completed_at": int(time.time()) if over else None,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": output.service.settings.name,
            "output": [self._item(item) for item in self._items.all],
            **self._repeated(),
            "usage": self._usage() if over else None,
            **({"lade": output.figures()} if over else {}),
        }

    def _repeated(self) -> dict[str, Any]:
        """Return the fields of the request that a response repeats."""
        sent, reasoning = self._request, self._request.reasoning
        sampling = {"temperature": 1.0, "top_p": 1.0, **self.output.serving.model.sampling}
        return {
            "instructions": sent.instructions,
            "max_output_tokens": sent.max_output_tokens,
            "metadata": sent.metadata or {},
            "parallel_tool_calls": sent.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "prompt_cache_key": sent.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "safety_identifier": sent.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling["temperature"] if sent.temperature is None else sent.temperature,
            "text": {"format": (sent.text and sent.text.format) or {"type": "text"}},
            "tool_choice": sent.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in sent.tools or () if tool.type in _SERVED],
            "top_p": sampling["top_p"] if sent.top_p is None else sent.top_p,
            "truncation": "disabled",
            "user": sent.user,
        }

    def _usage(self) -> dict[str, Any]:
        used = self.output.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }

    def _item_id(self, item: OutputItem) -> str:
        return f"{_PREFIXES[item.kind]}_{self.output.key}{item.index:02x}"

    def _item(self, item: OutputItem, *, begun: bool = False) -> dict[str, Any]:
        """Return an output item as JSON; one that has just begun is empty."""
        cut = item is self._items.all[-1] and self.output.choices[0].finish_reason == "length"
        status = "in_progress" if not item.ended else "incomplete" if cut else "completed"
        made = {"id": self._item_id(item), "status": status}
        content = [] if begun else [_part(item)]
        match item.kind:
            case "reasoning":
                return {**made, "type": "reasoning", "summary": [], "content": content}
            case "text":
                return {**made, "type": "message", "role": "assistant", "content": content}
        assert item.call is not None  # there is no other kind
        call, names = {"type": "function_call", "call_id": item.call.id}, self._tools.item_names(item.call.name)
        return {**made, **call, **names, "arguments": "" if begun else item.text}


def _part(item: OutputItem) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}
