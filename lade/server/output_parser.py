"""Parsers of generated text into reasoning, tool calls and content.

`MarkupParser` wraps transformers' response parser; `StreamedCall` streams the JSON of a call while it is written;
`Markup` chooses the parser of a model.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from lade.server.served_model import ServedModel

_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_SCALAR_END = re.compile(r"[\s,}\]]")
_Reading = Generator[None]
"""Coroutine that resumes with each new text and returns after what it parses."""


@dataclass
class ToolCall:
    """A tool call, or an increment of one.

    Attributes:
        index: index among the tool calls of the answer.
        arguments: arguments as JSON text.
        id, name: id for the client and name of the function; "" in an increment of a call that has begun.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""

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


class CallParser:
    """Incremental parser of a tool call's JSON object; arguments are passed on verbatim.

    Attributes:
        name: name of the function; None until it is complete.
        has_arguments: True once the arguments have begun.
        failed: True if the text is no call: not an object, or one without a name. Later text is ignored.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = self.ended = self.failed = False
        self._rest, self._unsent = "", ""
        self._reading = self._call()
        next(self._reading)

    def push(self, text: str) -> str:
        """Parse more text and return the new part of the arguments; "" until the name is known."""
        if self.ended or self.failed:
            return ""
        self._rest += text
        try:
            next(self._reading)
        except StopIteration:
            self.ended = True
        except ValueError:
            self.failed = True
        if self.name is None:
            return ""
        new, self._unsent = self._unsent, ""
        return new

    def _call(self) -> _Reading:
        yield from self._take("{")
        while (yield from self._next()) != "}":
            key = yield from self._string()
            yield from self._take(":")
            if key == "arguments" and not self.has_arguments:
                yield from self._arguments()
            elif key == "name" and self.name is None:
                self.name = yield from self._string()
            else:
                yield from self._value(lambda _: None)
            if (yield from self._next()) != "}":
                yield from self._take(",")
        if self.name is None:
            raise ValueError("a call needs a name")

    def _arguments(self) -> _Reading:
        """Pass on an object verbatim; arguments written as a JSON string are decoded once complete."""
        if (yield from self._next()) == "{":
            self.has_arguments = True
            yield from self._value(self._emit)
            return
        pieces = list[str]()
        yield from self._value(pieces.append)
        whole = "".join(pieces)
        value = json.loads(whole, strict=False)
        self.has_arguments = True
        self._emit(value if isinstance(value, str) else whole)

    def _emit(self, text: str) -> None:
        self._unsent += text

    def _string(self) -> Generator[None, None, str]:
        pieces = list[str]()
        if (yield from self._next()) != '"':
            raise ValueError("expected a string")
        yield from self._value(pieces.append)
        return str(json.loads("".join(pieces), strict=False))

    def _next(self) -> Generator[None, None, str]:
        """Return the next non-space character without consuming it."""
        while not (rest := self._rest.lstrip()):
            self._rest = ""
            yield
        self._rest = rest
        return rest[0]

    def _take(self, mark: str) -> _Reading:
        if (yield from self._next()) != mark:
            raise ValueError(f"expected {mark}")
        self._rest = self._rest[1:]

    def _value(self, take: Callable[[str], None]) -> _Reading:
        """Pass on a value of any type, piece by piece."""
        if (yield from self._next()) not in '"{[':
            yield from self._scalar(take)
            return
        depth, quoted = 0, False
        while True:
            seen = 0
            for found in _MARKS.finditer(self._rest):
                mark, seen = found[0], found.end()
                if mark == '"':
                    quoted = not quoted
                elif not quoted:
                    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
                if depth <= 0 and not quoted:
                    self._consume(seen, take)
                    return
            half = self._rest.endswith("\\") and seen < len(self._rest)  # the escaped character is still to come
            self._consume(len(self._rest) - half, take)
            yield

    def _scalar(self, take: Callable[[str], None]) -> _Reading:
        while True:
            found = _SCALAR_END.search(self._rest)
            self._consume(found.start() if found else len(self._rest), take)
            if self._rest:
                return
            yield

    def _consume(self, end: int, take: Callable[[str], None]) -> None:
        take(self._rest[:end])
        self._rest = self._rest[end:]


class StreamedCall:
    """A tool call in progress, streamed once its name is known and its arguments have begun."""

    def __init__(self, index: int, opening: str) -> None:
        self._index, self._text = index, CallParser()
        self._held: str | None = opening  # None once any of it was returned
        self._is_call = False

    def push(self, text: str) -> Parts:
        """Return the new parts; text that cannot be a call is content."""
        arguments = self._text.push(text)
        if self._held is None:
            if not self._is_call:
                return Parts(text)
            return Parts(tool_calls=[ToolCall(self._index, arguments)]) if arguments else Parts()
        self._held += text
        if self._text.failed:
            return self._as_content("")
        return self._begin(arguments) if self._text.name is not None and self._text.has_arguments else Parts()

    def close(self, closing: str, *, cut: bool) -> Parts:
        """Return the parts at the end of the call, with its closing tag; an incomplete call is dropped if truncated."""
        if self._held is None:
            return Parts() if self._is_call else Parts(closing)
        if self._text.ended:
            return self._begin("{}")
        if cut:
            return Parts() if self._text.name is None else self._begin("")
        return self._as_content(closing)

    def _begin(self, arguments: str) -> Parts:
        self._held, self._is_call = None, True
        return Parts(tool_calls=[ToolCall(self._index, arguments, _new_id(), self._text.name or "")])

    def _as_content(self, closing: str) -> Parts:
        held, self._held = self._held or "", None
        return Parts(held + closing)


logger = logging.getLogger(__name__)

_CALL_MARKS = ("<tool_call>", "</tool_call>")
_JSON_CALL = {"type": "function", "function": "{content}"}
"""Response templates' description of a call written as `{"name": ..., "arguments": ...}`."""
_MIN_PARTIAL_TAG = 5
"""Minimum length of a partial tag that is nothing else."""
_SPACES = r"\s{0,64}"
"""Spaces around tags, dropped. The bound keeps the search linear."""
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
            return self._counted(Parts(tool_calls=[_call(self._calls + at, call) for at, call in enumerate(calls)]))
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


def _call(index: int, call: dict[str, Any]) -> ToolCall:
    """Return a call parsed by a response template."""
    function = call.get("function", call)
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
