"""`/v1/messages`: Anthropic's API, its schemas, conversion to a chat request, answer and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt
from pydantic_core import from_json

from lade.server import serialization
from lade.server.answer import Formatter
from lade.server.choice import Choice, ChoiceDelta, OutputItem, OutputItems, RequestOutput
from lade.server.errors import ApiError, anthropic_error, invalid, too_long, unsupported
from lade.server.schemas import BaseRequest, ChatRequest, Model, Object, Stop, Text, chat_request, refuse
from lade.server.settings import MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_TOOLS

Blocks = Annotated[list["Block"], Field(fail_fast=True, max_length=MAX_PARTS)]


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

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None
    chat_template_kwargs: Object | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest):
    """Request body of `/v1/messages`."""

    max_tokens: StrictInt = Field(ge=1)
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None


_BILLING = "x-anthropic-billing-header"
"""Prefix of a block that changes with each request and would defeat the prefix cache."""
_REFUSED = {
    "mcp_servers": "MCP servers are not called: send tools that the client runs",
    "container": "containers are not supported: leave it out",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Messages = list[dict[str, Any]]


def as_chat(request: CountRequest) -> ChatRequest:
    """Convert to a chat request; raise `ApiError` for blocks and features that are not supported."""
    refuse(request, _REFUSED)
    own = [tool for tool in request.tools or () if tool.type in (None, "custom")]
    ignored = [f"tools.{tool.type}" for tool in request.tools or () if tool.type not in (None, "custom")]
    if request.output_config is not None:  # such as effort
        ignored += [f"output_config.{name}" for name in request.output_config.model_extra or ()]
    choice, messages = request.tool_choice, messages_of(request)
    if not messages:
        raise invalid("messages", "no message has content: give text")
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    serial = None if choice is None else choice.disable_parallel_tool_use
    thinks = {} if request.thinking is None else {"enable_thinking": request.thinking.type != "disabled"}
    return chat_request(
        request,
        messages=messages,
        stop=request.stop_sequences or None if isinstance(request, MessagesRequest) else None,
        tools=[_function(tool) for tool in own] or None,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=None if serial is None else not serial,
        response_format=_form(request),
        chat_template_kwargs={**thinks, **(request.chat_template_kwargs or {})} or None,
        continue_final_message=continues or None,
        **dict.fromkeys([*ignored, *_ignored_citations(request.messages)], ""),
    )


def messages_of(request: CountRequest) -> Messages:
    """Convert system text and messages to chat messages; each tool result becomes a message.

    System messages later in a conversation, which few templates accept, become user text.
    """
    made: Messages = []
    if request.system:
        made.append({"role": "system", "content": _system(request.system, "system")})
    names: dict[str, str] = {}
    for number, turn in enumerate(request.messages):
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
                    raise invalid(where, "a tool_use needs id, name and input: give them")
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
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        if block.type == "tool_result":
            _append_user(made, parts)
            parts = []
            made.append(_result(block, names, where))
        else:
            parts.append(_part(block, where))
    _append_user(made, parts)


def _append_user(made: Messages, parts: list[dict[str, Any]]) -> None:
    if not parts:
        return
    if made and made[-1]["role"] == "user":
        made[-1]["content"] += [{"type": "text", "text": "\n\n"}, *parts]
    else:
        made.append({"role": "user", "content": parts})


def _result(block: Block, names: dict[str, str], place: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise invalid(f"{place}.tool_use_id", "a tool_result needs the id of its tool_use")
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
        why = f"documents of type {source and source.type!r} are not supported: send the text, as a source of type"
        raise unsupported(f"{place}.source", f"{why} text with data, or of type content")
    return "".join(f"{part}\n\n" for part in (block.title, block.context, text) if part)


def _text(block: Block, place: str) -> str:
    if block.type != "text" or block.text is None:
        remedy = "send text, image, document, tool_use or tool_result"
        raise unsupported(place, f"blocks of type {block.type!r} are not supported here: {remedy}")
    return block.text


def _function(tool: MessagesTool) -> dict[str, Any]:
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    given = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _form(request: CountRequest) -> dict[str, Any] | None:
    """Return the `response_format`; `output_format` is the older name of the field."""
    config = request.output_config
    found = config.format if config is not None and config.format is not None else request.output_format
    if found is None or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {"schema": found.get("schema")}}


def _ignored_citations(turns: Sequence[InputMessage]) -> list[str]:
    """Return the name of an ignored field if citations of documents are enabled."""
    blocks = (block for turn in turns if not isinstance(turn.content, str) for block in turn.content)
    options = [block.citations for block in blocks if block.type == "document" and isinstance(block.citations, dict)]
    return ["citations"] if any(each.get("enabled") for each in options) else []


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "give the name of the tool to call")
    return {"type": "function", "function": {"name": choice.name}}


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormatter(Formatter):
    """A message of Anthropic's API, or the events of its content blocks."""

    endpoint = "messages"
    field_names: ClassVar = {"chat_template_kwargs.enable_thinking": "thinking"}

    def __init__(self, output: RequestOutput) -> None:
        super().__init__(output)
        self._items = OutputItems()

    def whole(self) -> dict[str, Any]:
        """See `Formatter.whole`."""
        (choice,) = self.output.choices
        for delta in choice.deltas:
            list(self._items.take(delta))
        content = [_block(item) for item in self._items.all]
        return {**self._head(), "content": content, **self._end(), "usage": self._usage(), "lade": choice.figures}

    def first(self) -> Iterator[bytes]:
        """See `Formatter.first`."""
        yield _event("message_start", message={**self._head(), "usage": {**self._usage(), "output_tokens": 0}})

    def step(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """See `Formatter.step`."""
        for change in self._items.take(delta):
            item = change.item
            if change.event == "added":
                yield _event("content_block_start", index=item.index, content_block=_block(item))
            elif change.event == "done":
                yield _event("content_block_stop", index=item.index)
            else:
                kind, member = _DELTAS[item.kind]
                yield _event("content_block_delta", index=item.index, delta={"type": kind, member: change.text})

    def last(self) -> Iterator[bytes]:
        """See `Formatter.last`."""
        yield _event("message_delta", delta=self._end(), usage=self._usage(), lade=self.output.figures())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """See `Formatter.failed`."""
        yield serialization.event(anthropic_error(error.status, error.message, self.output.request_id), "error")

    def ping(self) -> bytes:
        """See `Formatter.ping`."""
        return _event("ping")

    def too_long(self, tokens: int, context: int) -> ApiError:
        """See `Formatter.too_long`; clients parse the number."""
        return too_long("messages", f"prompt is too long: {tokens} tokens > {context - 1} maximum")

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.output.key}",
            "type": "message",
            "role": "assistant",
            "model": self.output.service.settings.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _end(self) -> dict[str, Any]:
        (choice,) = self.output.choices
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        reason = "stop_sequence" if stop is not None else _REASONS.get(choice.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """Return the token counts so far; cached prompt tokens are not counted as input."""
        used = self.output.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
        }


def _event(name: str, /, **members: Any) -> bytes:
    return serialization.event({"type": name, **members}, name)


def _block(item: OutputItem) -> dict[str, Any]:
    """Return an output item as a content block; a call's arguments as far as they are complete."""
    match item.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": item.text, "signature": ""}
        case "text":
            return {"type": "text", "text": item.text}
    assert item.call is not None  # there is no other kind
    return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": _object(item.text)}


def _object(arguments: str) -> dict[str, Any]:
    """Return the partial arguments of a call as an object; {} if they are not one."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
