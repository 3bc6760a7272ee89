"""`/v1/messages`: Anthropic's API, its schemas, conversion to a chat request, answer and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.server import serialization
from lade.server.chat import Event, ItemAnswer
from lade.server.errors import TOO_LONG, ApiError, internal, invalid, unsupported
from lade.server.output_items import Change, Run
from lade.server.request_context import Exchange
from lade.server.schemas import BaseRequest, ChatRequest, Model, Object, Stop, Text, chat_request
from lade.server.serialization import encoded
from lade.server.service import Service
from lade.server.settings import MOST_MESSAGES, MOST_PARTS, MOST_STOPS, MOST_TOOLS

Blocks = Annotated[list["Block"], Field(fail_fast=True, max_length=MOST_PARTS)]


class BlockSource(Model):
    """Source of an image or a document."""

    type: str = Field(max_length=64)
    media_type: str | None = None
    data: Text | None = None
    url: str | None = None
    content: Text | Blocks | None = None


class Block(Model):
    """A content block of a message; its type decides which fields are required."""

    type: str = Field(max_length=64)
    text: Text | None = None
    thinking: Text | None = None
    source: BlockSource | None = None
    title: Text | None = None
    context: Text | None = None
    citations: Any = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: Text | Blocks | None = None
    is_error: StrictBool | None = None


class InputMessage(Model):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class MessagesTool(Model):
    """A tool; only tools run by the client are served."""

    name: str
    type: str | None = Field(None, max_length=64)
    description: str | None = None
    input_schema: Object | None = None
    strict: StrictBool | None = None
    cache_control: Any = None


class ToolChoice(Model):
    """MessagesTool choice of a request."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(Model):
    """Extended thinking; every type but "disabled" enables it."""

    type: str = Field(max_length=64)
    budget_tokens: StrictInt | None = None


class OutputConfig(Model):
    """Format of the answer."""

    format: Object | None = None


class CountRequest(BaseRequest):
    """Request body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: Text | Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None
    chat_template_kwargs: Object | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest):
    """Request body of `/v1/messages`."""

    max_tokens: StrictInt = Field(ge=1)
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None


_BILLING = "x-anthropic-billing-header"
"""Prefix of a block that changes with each request and would defeat the prefix cache."""
_REFUSED = {
    "mcp_servers": "no server is asked for tools: give tools that the client runs",
    "container": "nothing is run here: leave it out",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Messages = list[dict[str, Any]]


def as_chat(asked: CountRequest) -> ChatRequest:
    """Convert to a chat request.

    Raises:
        ApiError: a block cannot be rendered, or a feature is not supported.
    """
    for name, remedy in _REFUSED.items():
        if (asked.model_extra or {}).get(name):
            raise unsupported(name, f"{name}: {remedy}")
    if asked.n != 1:
        raise unsupported("n", "n: a message is one answer: ask /v1/chat/completions")
    own = [tool for tool in asked.tools or () if tool.type in (None, "custom")]
    dropped = {f"tools.{tool.type}": "" for tool in asked.tools or () if tool.type not in (None, "custom")}
    choice, messages = asked.tool_choice, messages_of(asked)
    if not messages:
        raise invalid("messages", "messages: nobody says anything: give text")
    goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return chat_request(
        asked,
        messages=messages,
        stop=asked.stop_sequences or None if isinstance(asked, MessagesRequest) else None,
        tools=[_function(tool) for tool in own] or None,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=None
        if choice is None or choice.disable_parallel_tool_use is None
        else not choice.disable_parallel_tool_use,
        response_format=_form(asked),
        chat_template_kwargs={**_thinking(asked.thinking), **(asked.chat_template_kwargs or {})} or None,
        continue_final_message=goes_on or None,
        **dropped,
        **_dropped_citations(asked.messages),
        **_dropped_options(asked.output_config),
    )


def messages_of(asked: CountRequest) -> Messages:
    """Convert system text and messages to chat messages; each tool result becomes a message.

    System messages later in a conversation, which few templates accept, become user text.
    """
    made: Messages = []
    if asked.system:
        made.append({"role": "system", "content": _system(asked.system, "system")})
    names: dict[str, str] = {}
    for number, turn in enumerate(asked.messages):
        place = f"messages[{number}].content"
        if turn.role == "assistant":
            made.append(_assistant(turn, names, place))
        elif turn.role == "system" and all(each["role"] == "system" for each in made):
            made.append({"role": "system", "content": _system(turn.content, place)})
        else:
            _add_user(made, turn, names, place)
    return made


def _system(given: str | Sequence[Block], place: str) -> str:
    texts = [given] if isinstance(given, str) else [_text(block, f"{place}[{n}]") for n, block in enumerate(given)]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _assistant(turn: InputMessage, names: dict[str, str], place: str) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(turn.content):
        where = f"{place}[{number}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                if block.id is None or block.name is None or block.input is None:
                    raise invalid(where, f"{where}: a tool_use needs id, name and input: give them")
                names[block.id] = block.name
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    return {**made, "tool_calls": calls} if calls else made


def _add_user(made: Messages, turn: InputMessage, names: dict[str, str], place: str) -> None:
    """Add user text and tool results in the order of the blocks; consecutive user messages are joined."""
    blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    said: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block.type == "tool_result":
            _say(made, said)
            said = []
            made.append(_result(block, names, where))
        else:
            said.append(_part(block, where))
    _say(made, said)


def _say(made: Messages, said: list[dict[str, Any]]) -> None:
    if not said:
        return
    if made and made[-1]["role"] == "user":
        made[-1]["content"] += [{"type": "text", "text": "\n\n"}, *said]
    else:
        made.append({"role": "user", "content": said})


def _result(block: Block, names: dict[str, str], place: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        where = f"{place}.tool_use_id"
        raise invalid(where, f"{where}: a tool_result needs it: give the id of its tool_use")
    name = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
    made = {"role": "tool", "tool_call_id": block.tool_use_id, **name}
    if not isinstance(block.content, list):
        return {**made, "content": block.content or ""}
    parts = [_part(each, f"{place}.content[{number}]") for number, each in enumerate(block.content)]
    return {**made, "content": parts}


def _part(block: Block, place: str) -> dict[str, Any]:
    if block.type == "document":
        return {"type": "text", "text": _document(block, place)}
    if block.type != "image" or block.source is None:
        return {"type": "text", "text": _text(block, place)}
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url or ""}}


def _document(block: Block, place: str) -> str:
    """Return the text of a document below its title and context."""
    source = block.source
    if source is not None and source.type == "text" and source.data is not None:
        text = source.data
    elif source is not None and source.type == "content" and source.content is not None:
        inner, where = source.content, f"{place}.source.content"
        texts = [inner] if isinstance(inner, str) else [_text(each, f"{where}[{n}]") for n, each in enumerate(inner)]
        text = "".join(texts)
    else:
        why = f"{place}.source: a document of type {source and source.type!r} is not read here: send its text, as a"
        raise unsupported(f"{place}.source", f"{why} source of type text with data, or of type content")
    return "".join(f"{part}\n\n" for part in (block.title, block.context, text) if part)


def _text(block: Block, place: str) -> str:
    if block.type != "text" or block.text is None:
        why = f"a block of type {block.type!r} is not served there: send text, image, document, tool_use or tool_result"
        raise unsupported(place, f"{place}: {why}")
    return block.text


def _function(tool: MessagesTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": parameters, **strict}}


def _form(asked: CountRequest) -> dict[str, Any] | None:
    """Return the `response_format`; `output_format` is the older name of the field."""
    config = asked.output_config
    found = config.format if config is not None and config.format is not None else asked.output_format
    if found is None or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {"schema": found.get("schema")}}


def _dropped_options(config: OutputConfig | None) -> dict[str, str]:
    """Return the ignored options of `output_config`, such as effort."""
    return {f"output_config.{name}": "" for name in (config and config.model_extra) or ()}


def _dropped_citations(turns: Sequence[InputMessage]) -> dict[str, str]:
    """Return an ignored field if citations of documents are enabled."""
    blocks = (block for turn in turns if not isinstance(turn.content, str) for block in turn.content)
    asked = [block.citations for block in blocks if block.type == "document" and isinstance(block.citations, dict)]
    return {"citations": ""} if any(each.get("enabled") for each in asked) else {}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "tool_choice.name: name the tool that is to be called")
    return {"type": "function", "function": {"name": choice.name}}


def _thinking(asked: Thinking | None) -> dict[str, Any]:
    """Return the template argument for thinking; a token budget is not enforced."""
    return {} if asked is None else {"enable_thinking": asked.type != "disabled"}


PATH = "/v1/messages"
_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def as_anthropic(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format.

    Args:
        status: HTTP status of OpenAI's API for the error.
        message: description of the problem and its remedy.
        request_id: id of the request.
    """
    kind = _TYPES.get(_status(status), "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _status(status: int) -> int:
    return _OVERLOADED if status == 503 else status


class MessagesForm:
    """ASGI middleware that converts errors below `/v1/messages` to Anthropic's format.

    Every response carries the request id in Anthropic's header.

    Args:
        app: the inner application; its errors are OpenAI's, sent in one piece.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and convert an error response."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
            return
        start: list[Message] = []

        async def send_in_form(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = Exchange.of(scope).id
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start.append(message)
            elif start and message["type"] == "http.response.body":
                await _send_error(start.pop(), message["body"], Exchange.of(scope).id, send)
            else:
                await send(message)

        try:
            await self._app(scope, receive, send_in_form)
        except Exception:
            exchange = Exchange.of(scope)
            if exchange.status == 0:  # nobody else would say so in this form
                await internal(exchange.id).response()(scope, receive, send_in_form)
            raise


async def _send_error(start: Message, body: bytes, request_id: str, send: Send) -> None:
    message = json.loads(body)["error"]["message"] if body else ""
    raw = encoded(as_anthropic(start["status"], message, request_id))
    start = {**start, "status": _status(start["status"])}
    headers = MutableHeaders(scope=start)
    headers["content-length"] = str(len(raw))
    await send(start)
    await send({"type": "http.response.body", "body": raw})


_DELTAS = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ItemAnswer):
    """A message of Anthropic's API.

    Args:
        service: the served state.
        exchange: the request context.
        chat: the request, converted to the chat API.
        asked: the request body.
    """

    endpoint = "messages"
    kind, id_prefix = "message", "msg_"
    field_names: ClassVar = {"chat_template_kwargs.enable_thinking": "thinking"}

    def __init__(self, service: Service, exchange: Exchange, chat: ChatRequest, asked: MessagesRequest) -> None:
        super().__init__(service, exchange, chat, asked)

    def too_long(self, tokens: int, context: int, least: str = "") -> ApiError:
        """See `Answer.too_long`; clients parse the number."""
        return invalid("messages", f"prompt is too long: {tokens} tokens > {context - 1} maximum", TOO_LONG)

    def ping(self) -> bytes:
        """See `Answer.ping`."""
        return serialization.event({"type": "ping"}, "ping")

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
        """Return the token counts so far; cached prompt tokens are not counted as input."""
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
        }


def _block(run: Run) -> dict[str, Any]:
    """Return an output item as a content block; a call's arguments as far as they are complete."""
    match run.kind:
        case "thought":
            return {"type": "thinking", "thinking": run.text, "signature": ""}
        case "text":
            return {"type": "text", "text": run.text}
    assert run.call is not None  # there is no other kind
    return {"type": "tool_use", "id": run.call.id, "name": run.call.name, "input": _object(run.text)}


def _object(arguments: str) -> dict[str, Any]:
    """Return the partial arguments of a call as an object; {} if they are not one."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
