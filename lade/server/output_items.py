"""Output items of an answer: reasoning, text and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["thought", "text", "call"]


def new_id() -> str:
    """Return a new id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass
class ToolCall:
    """A tool call, or an increment of one.

    Attributes:
        index: index among the tool calls of the answer.
        arguments: arguments as JSON text.
        id: id for the client; "" in an increment of a call that has begun.
        name: name of the function; "" in an increment of a call that has begun.
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
    """Parts of a message, or their increments.

    Attributes:
        content: text of the answer.
        reasoning: text of the reasoning.
        tool_calls: tool calls in order; in an increment the first may continue the previous call.
    """

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


@dataclass
class Run:
    """An output item: a stretch of the answer of one kind.

    Attributes:
        index: index among the items of the answer.
        kind: kind of the item.
        text: text so far; the arguments as JSON for a call.
        call: the tool call without its arguments; None for other kinds.
        ended: True if the item is complete.
    """

    index: int
    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    ended: bool = False


@dataclass(frozen=True)
class Change:
    """A change of an output item.

    Attributes:
        what: "begun", "grown" or "ended".
        run: the item after the change.
        text: text added by "grown".
    """

    what: Literal["begun", "grown", "ended"]
    run: Run
    text: str = ""


class Runs:
    """The output items of an answer in progress; only the last one is open.

    Attributes:
        all: the items in order.
    """

    def __init__(self) -> None:
        self.all: list[Run] = []

    def take(self, parts: Parts) -> Iterator[Change]:
        """Add parts of a message and yield the changes: a continued call, reasoning, text, new calls."""
        calls = list(parts.tool_calls)
        if calls and not calls[0].id:
            yield self._grown(calls.pop(0).arguments)
        if parts.reasoning:
            yield from self._grow("thought", parts.reasoning)
        if parts.content:
            yield from self._grow("text", parts.content)
        for call in calls:
            yield from self._begin("call", call)
            if call.arguments:
                yield self._grown(call.arguments)

    def finish(self) -> Iterator[Change]:
        """Close the last item and yield the changes; an empty answer gets an empty text."""
        if not self.all:
            yield from self._begin("text")
        yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].kind != kind:
            yield from self._begin(kind)
        yield self._grown(text)

    def _begin(self, kind: Kind, call: ToolCall | None = None) -> Iterator[Change]:
        yield from self._end()
        self.all.append(Run(len(self.all), kind, call=call))
        yield Change("begun", self.all[-1])

    def _grown(self, text: str) -> Change:
        self.all[-1].text += text
        return Change("grown", self.all[-1], text)

    def _end(self) -> Iterator[Change]:
        if self.all and not self.all[-1].ended:
            self.all[-1].ended = True
            yield Change("ended", self.all[-1])
