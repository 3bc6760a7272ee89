"""What a model says, taken apart: thoughts, calls of tools, and the answer itself."""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from lade.server.served_model import ServedModel

logger = logging.getLogger(__name__)

REASONING = ("reasoning_content", "reasoning", "thinking")
"""What response templates call thoughts."""


@dataclass
class Parts:
    """Parts of a message, or what is new of them.

    Attributes:
        content: of the answer.
        reasoning: of the thoughts before it.
        tool_calls: as OpenAI's API has them.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def add(self, other: Parts) -> None:
        """Append what is new."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls


class PlainParser:
    """For models that say nothing but their answer."""

    thinks = False

    def push(self, text: str) -> Parts:
        """What is new with this text."""
        return Parts(text)

    def finish(self) -> Parts:
        """What was held back."""
        return Parts()


class MarkupParser:
    """Transformers' parser for what a model says; text that it cannot parse is the answer, as it is.

    Args:
        template: a response template of transformers.
        prefix: the prompt, in which a message may have begun.
        opening: what of the message the prompt has already, where `prefix` does not tell.
        tools: that were offered.

    Attributes:
        thinks: whether the model is at its thoughts.
    """

    def __init__(self, template: dict[str, Any], prefix: str, opening: str, tools: list[Any] | None) -> None:
        self._parser: ResponseParser | None = ResponseParser(template, prefix=prefix, tools=tools)
        self._unparsed = ""
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

    def finish(self) -> Parts:
        """What was held back."""
        if self._parser is None:
            return Parts()
        try:
            _, events = self._parser.finalize()
        except ValueError as problem:
            return self._give_up(problem)
        return self._parts(events)

    def _give_up(self, problem: ValueError) -> Parts:
        logger.info("an answer does not follow its markup: %s", problem)
        self._parser, self.thinks = None, False
        return Parts(self._unparsed)

    def _parts(self, events: list[dict[str, Any]]) -> Parts:
        self._note(events)
        made = Parts()
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk" and not event["dirty"]:
                if name in REASONING:
                    made.reasoning += event["text"]
                elif name == "content":
                    made.content += event["text"]
            elif kind == "region_close" and name == "tool_calls":
                calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
                made.tool_calls += [_as_openai(call) for call in calls]
        if made:
            self._unparsed = ""
        return made

    def _note(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["field"] in REASONING:
                self.thinks = event["type"] != "region_close"


def _as_openai(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    made = {"name": str(function.get("name", "")), "arguments": text}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": made}


class Markup:
    """Which markup a model uses, by its tokenizer's response template or by the marks that its chat template has.

    Args:
        model: whose answers are parsed.
    """

    def __init__(self, model: ServedModel) -> None:
        self._own: dict[str, Any] | None = getattr(model.tokenizer, "response_template", None)
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
            return MarkupParser(self._own, prompt, "", tools)
        if not self._thinks and not (self._calls and tools):
            return PlainParser()
        fields: dict[str, Any] = {"content": {"content": "text"}}
        if self._thinks:
            thoughts = {"open_pattern": r"\s*<think>\s*", "close_pattern": r"\s*</think>\s*", "content": "text"}
            fields["reasoning_content"] = thoughts
        if self._calls and tools:
            call = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
            fields["tool_calls"] = {**call, "transform": {"type": "function", "function": "{content}"}}
        template = {"start_anchor": "\0", "fields": fields}
        opening = "<think>" if self._thinks and prompt.rstrip().endswith("<think>") else ""
        return MarkupParser(template, "", opening, tools)
