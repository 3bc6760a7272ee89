"""What a model says, taken apart: thoughts, calls of tools, and the answer itself."""

from __future__ import annotations

import json
import logging
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from lade.server.call_text import WrittenCall
from lade.server.runs import Call, Parts, new_id
from lade.server.served_model import ServedModel

logger = logging.getLogger(__name__)

_CALL_MARKS = ("<tool_call>", "</tool_call>")
_AS_IT_IS = {"type": "function", "function": "{content}"}
"""What response templates say of a call that is written as `{"name": ..., "arguments": ...}`."""
_SURE = 5
"""Characters of a mark, at least, that are one and nothing else."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What response templates call thoughts."""


class PlainParser:
    """For models that say nothing but their answer."""

    thinks = False

    def push(self, text: str) -> Parts:
        """What is new with this text."""
        return Parts(text)

    def finish(self, *, cut: bool = False) -> Parts:
        """What was held back.

        Args:
            cut: whether the answer had to end before its end.
        """
        return Parts()


class MarkupParser:
    """Transformers' parser for what a model says; text that it cannot parse is the answer, as it is.

    Args:
        template: a response template of transformers.
        prefix: the prompt, in which a message may have begun.
        opening: what of the message the prompt has already, where `prefix` does not tell.
        tools: that were offered.
        marks: around calls that are JSON, which are told while they are written; None where calls are told when they
            are whole.

    Attributes:
        thinks: whether the model is at its thoughts.
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
        self._written: WrittenCall | None = None
        self.thinks = False
        self._note(self._parser.initial_events)
        if opening:
            self._note(self._parser.feed(opening))

    def push(self, text: str) -> Parts:
        """What is new with this text."""
        if self._parser is None:
            return Parts(text)
        self._unparsed += text
        try:
            events = self._parser.feed(text)
        except ValueError as problem:
            return self._give_up(problem)
        return self._parts(events)

    def finish(self, *, cut: bool = False) -> Parts:
        """What was held back; the markup of a call that was cut off is not, as it is no answer.

        Args:
            cut: whether the answer had to end before its end.
        """
        if self._parser is None:
            return Parts()
        try:
            _, events = self._parser.finalize()
        except ValueError as problem:
            given_up = self._give_up(problem)
            return Parts() if cut else given_up
        return self._parts(events, last=True, cut=cut)

    def _give_up(self, problem: ValueError) -> Parts:
        logger.info("an answer does not follow its markup: %s", problem)
        self._parser, self.thinks = None, False
        return Parts(self._unparsed)

    def _parts(self, events: list[dict[str, Any]], *, last: bool = False, cut: bool = False) -> Parts:
        self._note(events)
        made = Parts()
        for event in events:
            name, kind = event["field"], event["type"]
            if name == "tool_calls":
                made.add(self._of_calls(event, last=last, cut=cut))
            elif kind == "region_chunk" and not event["dirty"]:
                if name in REASONING:
                    made.reasoning += event["text"]
                elif name == "content" and not (cut and self._begins_call(event["text"])):
                    made.content += event["text"]
        if made:
            self._unparsed = ""
        return made

    def _of_calls(self, event: dict[str, Any], *, last: bool, cut: bool) -> Parts:
        if self._marks is None:
            return self._whole_calls(event["value"]) if event["type"] == "region_close" else Parts()
        if self._written is None:
            self._written = WrittenCall(self._calls, self._marks[0])
        if event["type"] == "region_chunk":
            return self._counted(self._written.push(event["text"]))
        if event["type"] == "region_close":
            written, self._written = self._written, None
            return self._counted(written.close("" if last else self._marks[1], cut=cut))
        return Parts()

    def _whole_calls(self, value: Any) -> Parts:
        calls = value if isinstance(value, list) else [value]
        return self._counted(Parts(tool_calls=[_call(self._calls + at, call) for at, call in enumerate(calls)]))

    def _counted(self, parts: Parts) -> Parts:
        self._calls += sum(bool(call.id) for call in parts.tool_calls)
        return parts

    def _begins_call(self, text: str) -> bool:
        """Whether a text that was held back is the beginning of a mark, and too much of it to be anything else."""
        found = text.strip()
        return self._marks is not None and len(found) >= _SURE and self._marks[0].startswith(found)

    def _note(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["field"] in REASONING:
                self.thinks = event["type"] != "region_close"


def _call(index: int, call: dict[str, Any]) -> Call:
    """A call as a response template has it."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(index, text, new_id(), str(function.get("name", "")))


class Markup:
    """Which markup a model uses, by its tokenizer's response template or by the marks that its chat template has.

    Args:
        model: whose answers are parsed.
    """

    def __init__(self, model: ServedModel) -> None:
        self._own: dict[str, Any] | None = getattr(model.tokenizer, "response_template", None)
        self._own_marks: tuple[str, str] | None = None
        if self._own is not None:
            self._own, self._own_marks = _with_calls_as_text(self._own)
        self._thinks = "<think>" in model.chat_template
        self._calls = "<tool_call>" in model.chat_template

    @property
    def has_special_tokens(self) -> bool:
        """Whether its marks may be special tokens, which have no text otherwise."""
        return self._own is not None

    @property
    def has_other_thoughts(self) -> bool:
        """Whether there are thoughts in a markup of the model's own, which no grammar knows."""
        fields = (self._own or {}).get("fields", {})
        return not self._thinks and any(name in fields for name in REASONING)

    def parser(self, prompt: str, tools: list[Any] | None) -> PlainParser | MarkupParser:
        """For one answer.

        Args:
            prompt: as the model sees it.
            tools: that were offered; without any, what looks like a call is none.
        """
        if self._own is not None:
            return MarkupParser(self._own, prompt, "", tools, self._own_marks)
        if not self._thinks and not (self._calls and tools):
            return PlainParser()
        fields: dict[str, Any] = {"content": {"content": "text"}}
        if self._thinks:
            thoughts = {"open_pattern": r"\s*<think>\s*", "close_pattern": r"\s*</think>\s*", "content": "text"}
            fields["reasoning_content"] = thoughts
        if self._calls and tools:
            opening_mark, closing_mark = _CALL_MARKS
            call = {"open_pattern": rf"\s*{opening_mark}", "close": closing_mark, "repeats": True, "content": "text"}
            fields["tool_calls"] = call
        template = {"start_anchor": "\0", "fields": fields}
        opening = "<think>" if self._thinks and prompt.rstrip().endswith("<think>") else ""
        return MarkupParser(template, "", opening, tools, _CALL_MARKS)


def _with_calls_as_text(template: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """A response template that leaves the JSON of calls as it is, and their marks; None where calls are no JSON."""
    field = template.get("fields", {}).get("tool_calls", {})
    opening, closing = field.get("open"), field.get("close")
    plain = field.get("content") == "json" and not field.get("content_args") and field.get("transform") == _AS_IT_IS
    if not (plain and isinstance(opening, str) and isinstance(closing, str)):
        return template, None
    as_text = {**field, "content": "text"}
    return {**template, "fields": {**template["fields"], "tool_calls": as_text}}, (opening, closing)
