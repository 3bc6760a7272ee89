"""An answer as a list of what it consists of: thoughts, text, calls of tools, in the order in which they were said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lade.server.message_parts import Parts

Kind = Literal["thought", "text", "call"]


@dataclass
class Run:
    """A stretch of an answer that is all of one kind.

    Attributes:
        index: its place among the runs of the answer.
        kind: what it is.
        text: of it so far; of a call its arguments, as JSON.
        call: the call, as OpenAI's chat API has it.
        ended: whether it is whole.
    """

    index: int
    kind: Kind
    text: str = ""
    call: dict[str, Any] = field(default_factory=dict)
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
        """What new parts of a message change; they are thoughts, then text, then calls."""
        if parts.reasoning:
            yield from self._grow("thought", parts.reasoning)
        if parts.content:
            yield from self._grow("text", parts.content)
        for call in parts.tool_calls:
            yield from self._begin("call", call)
            yield self._grown(call["function"]["arguments"])

    def finish(self) -> Iterator[Change]:
        """What the end of the answer changes; one that says nothing has an empty text."""
        if not self.all:
            yield from self._begin("text")
        yield from self._end()

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].kind != kind:
            yield from self._begin(kind)
        yield self._grown(text)

    def _begin(self, kind: Kind, call: dict[str, Any] | None = None) -> Iterator[Change]:
        yield from self._end()
        self.all.append(Run(len(self.all), kind, call=call or {}))
        yield Change("begun", self.all[-1])

    def _grown(self, text: str) -> Change:
        self.all[-1].text += text
        return Change("grown", self.all[-1], text)

    def _end(self) -> Iterator[Change]:
        if self.all and not self.all[-1].ended:
            self.all[-1].ended = True
            yield Change("ended", self.all[-1])
