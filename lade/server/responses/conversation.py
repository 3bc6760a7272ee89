"""Items of `/v1/responses` as messages of the chat API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lade.server.as_chat import chat_request
from lade.server.errors import invalid, unsupported
from lade.server.responses.schemas import InputItem, InputPart, ResponsesRequest
from lade.server.responses.tools import Tools, flat_name
from lade.server.schemas import ChatRequest

_LOGPROBS = "message.output_text.logprobs"
_NOT_KEPT = {
    "prompt": "prompts are not kept here: send instructions and input",
    "previous_response_id": "answers are not kept: send all items in input",
    "conversation": "conversations are not kept: send all items in input",
    "background": "answers are not kept: wait for this one, or stream it",
    "top_logprobs": "logprobs are for /v1/chat/completions",
    "max_tool_calls": "no tool is called here, so none can be counted: leave it out",
}
Messages = list[dict[str, Any]]


def as_chat(asked: ResponsesRequest) -> ChatRequest:
    """The chat request that asks for the same.

    Raises:
        ApiError: something that would have to be kept, or an item that is none.
    """
    extra = asked.model_extra or {}
    for name, remedy in _NOT_KEPT.items():
        if extra.get(name):
            raise unsupported(name, f"{name}: {remedy}")
    if asked.n != 1:
        raise unsupported("n", "n: a response is one answer: ask /v1/chat/completions")
    if _LOGPROBS in (asked.include or ()):
        raise unsupported("include", f"include: {_LOGPROBS}: logprobs are for /v1/chat/completions")
    tools = Tools(asked.tools)
    return chat_request(
        asked,
        messages=messages_of(asked),
        tools=tools.functions or None,
        tool_choice=_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        max_completion_tokens=asked.max_output_tokens,
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        response_format=_format(asked),
        **{f"tools.{kind}": "" for kind in tools.dropped},
    )


def messages_of(asked: ResponsesRequest) -> Messages:
    """Instructions and items as messages; what an assistant thought, said and called in one go is one of them."""
    made: Messages = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    if isinstance(asked.input, str):
        return [*made, {"role": "user", "content": asked.input}]
    names: dict[str, str] = {}
    for number, item in enumerate(asked.input):
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
                why = f"{place}: an item of type {item.type!r} is not served: send messages, function calls and outputs"
                raise unsupported(f"{place}.type", why)
    return made


def _add_message(made: Messages, item: InputItem, place: str) -> None:
    role = _required(item, "role", place) if item.type == "message" else "user"  # what another agent says
    if item.content is None:
        raise invalid(f"{place}.content", f"{place}.content: a message needs a text, or parts: give one")
    content = _content(item.content, f"{place}.content")
    if role == "assistant":
        _assistant(made, "content", "tool_calls")["content"] = content
    else:
        made.append({"role": role, "content": content})


def _assistant(made: Messages, *taken: str) -> dict[str, Any]:
    """The last message if it is the assistant's and has none of these fields yet, else a new one."""
    last = made[-1] if made else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        made.append({"role": "assistant", "content": None})
    return made[-1]


def _call(item: InputItem, place: str) -> dict[str, Any]:
    """A call; that of a custom tool, made with another server, has one text for arguments."""
    call_id, name = _required(item, "call_id", place), flat_name(_required(item, "name", place), item.namespace)
    if item.type == "custom_tool_call":
        arguments = json.dumps({"input": _required(item, "input", place)}, ensure_ascii=False)
    else:
        arguments = _required(item, "arguments", place)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_message(item: InputItem, names: dict[str, str], place: str) -> dict[str, Any]:
    call_id = _required(item, "call_id", place)
    if item.output is None:
        raise invalid(f"{place}.output", f"{place}.output: give what the function returned, as text")
    name = {"name": names[call_id]} if call_id in names else {}
    content = _content(item.output, f"{place}.output")
    return {"role": "tool", "tool_call_id": call_id, **name, "content": content}


def _required(item: InputItem, name: str, place: str) -> str:
    value: str | None = getattr(item, name)
    if value is None:
        raise invalid(f"{place}.{name}", f"{place}.{name}: an item of type {item.type!r} needs one: give it")
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
            where = f"{place}[{number}]"
            why = f"a part of type {part.type[:40]!r} is not served: send input_text, or input_image with a URL"
            raise unsupported(where, f"{where}: {why}")
    return made


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": flat_name(choice.get("name"), choice.get("namespace"))}}
    return choice


def _format(asked: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as a `response_format`, which has what describes a schema one level deeper."""
    found = None if asked.text is None else asked.text.format
    if found is None or found.get("type") != "json_schema":
        return found
    return {"type": "json_schema", "json_schema": {name: found[name] for name in found if name != "type"}}
