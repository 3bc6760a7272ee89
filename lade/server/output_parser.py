"""Parsers of generated text into reasoning, tool calls and content.

`MarkupParser` wraps transformers' response parser; `StreamedCall` streams the JSON of a call while it is written;
`Markup` chooses the parser of a model.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser

from lade.server.served_model import ServedModel

_HEAD = re.compile(r'\s*(\{\s*(["}]|$)|$)')  # of a text that may be a call
_NAME = re.compile(r'"name"\s*:\s*"(?:[^"\\]|\\.)*"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*(?=\{)')
_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)


@dataclass
class ToolCall:
    """A tool call, or an increment of one."""

    index: int  # among the tool calls of the answer
    arguments: str = ""  # as JSON
    id: str = ""  # for the client; "" in an increment of a call that has begun
    name: str = ""  # of the function; "" as well

    @property
    def whole(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @property
    def delta(self) -> dict[str, Any]:
        """The increment in OpenAI's streaming format."""
        return {"index": self.index, **(self.whole if self.id else {"function": {"arguments": self.arguments}})}


@dataclass
class Parts:
    """Parts of a message, or their increments, in which the first tool call may continue the previous one."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def add(self, other: Parts) -> None:
        """Append an increment."""
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.tool_calls:
            if self.tool_calls and self.tool_calls[-1].index == call.index:
                self.tool_calls[-1].arguments += call.arguments
            else:
                self.tool_calls.append(replace(call))


class StreamedCall:
    """A tool call in progress: a JSON object, whose arguments are passed on verbatim once its name is known.

    A call that has its arguments as a JSON string, or before its name, is returned when it is complete.
    """

    def __init__(self, index: int, opening: str) -> None:
        self._index, self._opening = index, opening
        self._text = ""  # of which nothing was returned yet
        self._state: Literal["head", "arguments", "rest", "no call"] = "head"
        self._depth, self._quoted = 0, False  # within the arguments

    def push(self, text: str) -> Parts:
        """Return the new parts; text that cannot be a call is content."""
        self._text += text
        if self._state == "head":
            return self._begin()
        if self._state == "arguments":
            arguments = self._arguments()
            return Parts(tool_calls=[ToolCall(self._index, arguments)]) if arguments else Parts()
        return self._as_content("") if self._state == "no call" else Parts()

    def close(self, closing: str, *, cut: bool) -> Parts:
        """Return the parts at the end of the call, with its closing tag; an incomplete call is dropped if truncated."""
        if self._state in ("arguments", "rest"):
            return Parts()
        if (call := _json_call(self._text)) is not None:
            return Parts(tool_calls=[_tool_call(self._index, call)])
        if not cut:
            return self._as_content(closing)
        name = _NAME.search(self._text)
        if name is not None and (call := _json_call(self._text[: name.end()] + "}")) is not None:
            return Parts(tool_calls=[ToolCall(self._index, "", _new_id(), call["name"])])
        return Parts()

    def _begin(self) -> Parts:
        """Return the call once its name is known and its arguments have begun."""
        if not _HEAD.match(self._text):
            return self._as_content("")
        found = _ARGUMENTS.search(self._text)
        call = None if found is None else _json_call(self._text[: found.end()] + "{}}")
        if found is None or call is None:
            return Parts()
        self._state, self._text = "arguments", self._text[found.end() :]
        return Parts(tool_calls=[ToolCall(self._index, self._arguments(), _new_id(), call["name"])])

    def _arguments(self) -> str:
        """Return the text of the arguments so far, up to their end."""
        end = 0
        for found in _MARKS.finditer(self._text):
            mark, end = found[0], found.end()
            if mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
            if self._depth == 0:
                self._state = "rest"
                return self._text[:end]
        half = self._text.endswith("\\") and end < len(self._text)  # the escaped character is still to come
        end = len(self._text) - half
        text, self._text = self._text[:end], self._text[end:]
        return text

    def _as_content(self, closing: str) -> Parts:
        text = f"{self._opening}{self._text}{closing}"
        self._state, self._opening, self._text = "no call", "", ""
        return Parts(text)


def _json_call(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text begins with; None if it is incomplete or has no name."""
    try:
        call, _ = _DECODER.raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


logger = logging.getLogger(__name__)

_CALL_MARKS = ("<tool_call>", "</tool_call>")
_JSON_CALL = {"type": "function", "function": "{content}"}
"""Response templates' description of a call written as `{"name": ..., "arguments": ...}`."""
_MIN_PARTIAL_TAG = 5  # minimum length of a partial tag that is nothing else
_SPACES = r"\s{0,64}"  # spaces around tags, dropped. The bound keeps the search linear
_THOUGHTS = {
    "open_pattern": f"{_SPACES}<think>{_SPACES}",
    "close_pattern": f"{_SPACES}</think>{_SPACES}",
    "content": "text",
}
_CALLS = {"open_pattern": f"{_SPACES}{_CALL_MARKS[0]}", "close": _CALL_MARKS[1], "repeats": True, "content": "text"}
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of reasoning in response templates."""


class PlainParser:
    """Parser of models without markup."""

    in_reasoning = False

    def push(self, text: str) -> Parts:
        """Return the new parts."""
        return Parts(text)

    def finish(self, *, cut: bool = False) -> Parts:
        """Return held-back parts; `cut` if the answer was truncated."""
        return Parts()


class MarkupParser:
    """Wrapper of transformers' response parser; text that it cannot parse becomes content.

    Args:
        template: a response template of transformers.
        prefix: the prompt, in which the message may have begun.
        opening: beginning of the message in the prompt, if `prefix` does not contain it.
        tools: the tools of the request; None for none.
        marks: tags around JSON calls, which are streamed; None to emit calls when complete.
    """

    def __init__(
        self,
        template: dict[str, Any],
        prefix: str,
        opening: str,
        tools: list[Any] | None,
        marks: tuple[str, str] | None = None,
    ) -> None:
        self._parser: ResponseParser | None = ResponseParser(template, prefix=prefix, tools=tools)
        self._marks = marks
        self._unparsed = ""
        self._calls = 0
        self._written: StreamedCall | None = None
        self.in_reasoning = False
        self._track_reasoning(self._parser.initial_events)
        if opening:
            self._track_reasoning(self._parser.feed(opening))

    def push(self, text: str) -> Parts:
        """Return the new parts."""
        if self._parser is None:
            return Parts(text)
        self._unparsed += text
        try:
            events = self._parser.feed(text)
        except ValueError as problem:
            return self._give_up(problem)
        return self._parts(events)

    def finish(self, *, cut: bool = False) -> Parts:
        """Return held-back parts, without the markup of a call if the answer was truncated."""
        if self._parser is None:
            return Parts()
        try:
            _, events = self._parser.finalize()
        except ValueError as problem:
            given_up = self._give_up(problem)
            return Parts() if cut else given_up
        return self._parts(events, last=True, cut=cut)

    def _give_up(self, problem: ValueError) -> Parts:
        logger.info("output does not match the model's markup: %s", problem)
        self._parser, self.in_reasoning = None, False
        return Parts(self._unparsed)

    def _parts(self, events: list[dict[str, Any]], *, last: bool = False, cut: bool = False) -> Parts:
        self._track_reasoning(events)
        made = Parts()
        for event in events:
            name, kind = event["field"], event["type"]
            if name == "tool_calls":
                made.add(self._call_parts(event, last=last, cut=cut))
            elif kind == "region_chunk" and not event["dirty"]:
                if name in REASONING:
                    made.reasoning += event["text"]
                elif name == "content" and not (cut and self._begins_call(event["text"])):
                    made.content += event["text"]
        if made:
            self._unparsed = ""
        return made

    def _call_parts(self, event: dict[str, Any], *, last: bool, cut: bool) -> Parts:
        if self._marks is None:
            if event["type"] != "region_close":
                return Parts()
            calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
            made = [_tool_call(self._calls + at, call.get("function", call)) for at, call in enumerate(calls)]
            return self._counted(Parts(tool_calls=made))
        if self._written is None:
            self._written = StreamedCall(self._calls, self._marks[0])
        if event["type"] == "region_chunk":
            return self._counted(self._written.push(event["text"]))
        if event["type"] == "region_close":
            written, self._written = self._written, None
            return self._counted(written.close("" if last else self._marks[1], cut=cut))
        return Parts()

    def _counted(self, parts: Parts) -> Parts:
        self._calls += sum(bool(call.id) for call in parts.tool_calls)
        return parts

    def _begins_call(self, text: str) -> bool:
        """Return True if held-back text is an unambiguous beginning of the call's tag."""
        found = text.strip()
        return self._marks is not None and len(found) >= _MIN_PARTIAL_TAG and self._marks[0].startswith(found)

    def _track_reasoning(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["field"] in REASONING:
                self.in_reasoning = event["type"] != "region_close"


def _tool_call(index: int, function: dict[str, Any]) -> ToolCall:
    """Return a complete call."""
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(index, text, _new_id(), str(function.get("name", "")))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Markup:
    """Chooses the parser of a model, by its response template or by the tags in its chat template."""

    def __init__(self, model: ServedModel) -> None:
        self._own, self._own_marks = _with_calls_as_text(getattr(model.tokenizer, "response_template", None))
        self._has_reasoning = "<think>" in model.chat_template
        self._calls = "<tool_call>" in model.chat_template

    @property
    def has_special_tokens(self) -> bool:
        """True if tags may be special tokens, which have no text otherwise."""
        return self._own is not None

    @property
    def has_other_reasoning(self) -> bool:
        """True if reasoning has a markup of its own, which no grammar covers."""
        fields = (self._own or {}).get("fields", {})
        return not self._has_reasoning and any(name in fields for name in REASONING)

    def parser(self, prompt: str, tools: list[Any] | None) -> PlainParser | MarkupParser:
        """Return the parser of one answer to a rendered prompt; without tools, calls are not parsed."""
        if self._own is not None:
            return MarkupParser(self._own, prompt, "", tools, self._own_marks)
        if not self._has_reasoning and not (self._calls and tools):
            return PlainParser()
        fields: dict[str, Any] = {"content": {"content": "text"}}
        if self._has_reasoning:
            fields["reasoning_content"] = _THOUGHTS
        if self._calls and tools:
            fields["tool_calls"] = _CALLS
        template = {"start_anchor": "\0", "fields": fields}
        opening = "<think>" if self._has_reasoning and prompt.rstrip().endswith("<think>") else ""
        return MarkupParser(template, "", opening, tools, _CALL_MARKS)


def _with_calls_as_text(template: dict[str, Any] | None) -> tuple[dict[str, Any] | None, tuple[str, str] | None]:
    """Return a response template with JSON calls left as text, and their tags; None if calls are not JSON."""
    if template is None:
        return None, None
    field = template.get("fields", {}).get("tool_calls", {})
    opening, closing = field.get("open"), field.get("close")
    plain = field.get("content") == "json" and not field.get("content_args") and field.get("transform") == _JSON_CALL
    if not (plain and isinstance(opening, str) and isinstance(closing, str)):
        return template, None
    as_text = {**field, "content": "text"}
    return {**template, "fields": {**template["fields"], "tool_calls": as_text}}, (opening, closing)
