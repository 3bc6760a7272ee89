"""Messages of Anthropic's API as messages of the chat API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lade.server.as_chat import chat_request
from lade.server.errors import invalid, unsupported
from lade.server.messages.schemas import (
    Block,
    CountRequest,
    MessagesRequest,
    OutputConfig,
    Thinking,
    Tool,
    ToolChoice,
    Turn,
)
from lade.server.schemas import ChatRequest

_BILLING = "x-anthropic-billing-header"
"""Begins a block that is another one with each request, and would keep a prompt from being found again."""
_REFUSED = {
    "mcp_servers": "no server is asked for tools: give tools that the client runs",
    "container": "nothing is run here: leave it out",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Messages = list[dict[str, Any]]


def as_chat(asked: CountRequest) -> ChatRequest:
    """The chat request that asks for the same.

    Raises:
        ApiError: a block that cannot be shown to the model, or something that this server does not do.
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
    """System text and turns as messages: results of tools have messages of their own.

    Instructions amid a conversation, which few templates take, are what the user says there.
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


def _assistant(turn: Turn, names: dict[str, str], place: str) -> dict[str, Any]:
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


def _add_user(made: Messages, turn: Turn, names: dict[str, str], place: str) -> None:
    """What a user says, and what tools have returned, in the order of the blocks; turns of one user are one."""
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
    """The text of a document, below its title and what is said about it, and apart from what follows."""
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


def _function(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": parameters, **strict}}


def _form(asked: CountRequest) -> dict[str, Any] | None:
    """The form of the answer as a `response_format`; `output_format` is the older name of it."""
    config = asked.output_config
    found = config.format if config is not None and config.format is not None else asked.output_format
    if found is None or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {"schema": found.get("schema")}}


def _dropped_options(config: OutputConfig | None) -> dict[str, str]:
    """What is said of the output besides its form, such as how much effort it is worth, to be named as ignored."""
    return {f"output_config.{name}": "" for name in (config and config.model_extra) or ()}


def _dropped_citations(turns: Sequence[Turn]) -> dict[str, str]:
    """Citations of documents, where they are wanted, to be named as ignored."""
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
    """As the templates that know of it call it; a budget is not kept to."""
    return {} if asked is None else {"enable_thinking": asked.type != "disabled"}
