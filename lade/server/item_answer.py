"""What `/v1/responses` and `/v1/messages` have in common: a chat's answer as a list, told by events with names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from lade.server import sse
from lade.server.chat import ChatAnswer
from lade.server.choice import Choice, Piece
from lade.server.errors import ApiError
from lade.server.exchange import Exchange
from lade.server.runs import Change, Runs
from lade.server.schemas import ChatRequest, Decoding
from lade.server.service import Service

Event = tuple[str, dict[str, Any]]
"""Its name, and what it says besides."""


class ItemAnswer(ChatAnswer):
    """The one answer to a conversation, as runs of thoughts, text, and calls of tools.

    Whole or streamed, it goes through the same list: what a stream tells piece by piece is what the whole one has.

    Attributes:
        runs: of the answer so far.
    """

    def __init__(self, service: Service, exchange: Exchange, body: ChatRequest, asked: Decoding) -> None:
        super().__init__(service, exchange, body, asked)
        self.runs = Runs()

    @abstractmethod
    def message(self) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def first(self) -> Iterator[Event]:
        """What a stream begins with, when there is a token."""

    @abstractmethod
    def told(self, change: Change) -> Iterator[Event]:
        """What a stream says of a change."""

    @abstractmethod
    def last(self) -> Iterator[Event]:
        """What a stream ends with."""

    @abstractmethod
    def broken(self, error: ApiError) -> Iterator[Event]:
        """What a stream ends with that cannot go on."""

    def encoded(self, event: Event) -> bytes:
        """An event as it is sent."""
        name, others = event
        return sse.event({"type": name, **others}, name)

    async def _whole(self) -> dict[str, Any]:
        async for found in self._steps(None):
            if found is not None:
                list(self._changes(found[1]))
        self.ended()
        return self.message()

    def _first(self) -> Iterator[bytes]:
        return map(self.encoded, self.first())

    def _chunks(self, choice: Choice, piece: Piece) -> Iterator[bytes]:
        return (self.encoded(event) for change in self._changes(piece) for event in self.told(change))

    def _last(self) -> Iterator[bytes]:
        return map(self.encoded, self.last())

    def _broken(self, error: ApiError) -> Iterator[bytes]:
        return map(self.encoded, self.broken(error))

    def _changes(self, piece: Piece) -> Iterator[Change]:
        yield from self.runs.take(piece.parts)
        if piece.step is None:
            yield from self.runs.finish()
