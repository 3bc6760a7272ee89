"""Output items of an answer: reasoning, text, tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["thought", "text", "call"]


def new_id() -> str:
    """Of a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass
class Call:
    """A call of a tool, or what is new of one.

    Attributes:
        index: its number among the calls of the answer.
        arguments: JSON.
        id: its name for the client; "" where more is told of a call that has begun.
        name: of the function; likewise.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""

    @property
    def whole(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    @property
    def delta(self) -> dict[str, Any]:
        """What a stream says of what is new."""
        return {"index": self.index, **(self.whole if self.id else {"function": {"arguments": self.arguments}})}


@dataclass
class Parts:
    """Parts of a message, or what is new of them.

    Attributes:
        content: of the answer.
        reasoning: of the thoughts before it.
        tool_calls: in their order; of what is new, the first one may go on with the last one before.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def add(self, other: Parts) -> None:
        """Append what is new."""
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.tool_calls:
            if self.tool_calls and self.tool_calls[-1].index == call.index:
                self.tool_calls[-1].arguments += call.arguments
            else:
                self.tool_calls.append(replace(call))


@dataclass
class Run:
    """A stretch of an answer that is all of one kind.

    Attributes:
        index: its place among the runs of the answer.
        kind: what it is.
        text: of it so far; of a call its arguments, as JSON.
        call: the call, where it is one; its arguments are `text`.
        ended: whether it is whole.
    """

    index: int
    kind: Kind
    text: str = ""
    call: Call | None = None
    ended: bool = False


@dataclass(frozen=True)
class Change:
    """What has happened to a run.

    Attributes:
        what: "begun", "grown" or "ended".
        run: the run, as it is afterwards.
        text: what has been added, where it has grown.
    """

    what: Literal["begun", "grown", "ended"]
    run: Run
    text: str = ""


class Runs:
    """The runs of one answer while it is written: one is open at a time, the last one.

    Attributes:
        all: in their order.
    """

    def __init__(self) -> None:
        self.all: list[Run] = []

    def take(self, parts: Parts) -> Iterator[Change]:
        """What new parts of a message change; what goes on with a call, then thoughts, text, and calls that begin."""
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
        """What the end of the answer changes; one that says nothing has an empty text."""
        if not self.all:
            yield from self._begin("text")
        yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].kind != kind:
            yield from self._begin(kind)
        yield self._grown(text)

    def _begin(self, kind: Kind, call: Call | None = None) -> Iterator[Change]:
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
