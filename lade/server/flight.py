"""What one request has the engine do."""

from __future__ import annotations

from time import perf_counter

from lade.serving.handle import Handle
from lade.serving.place import Place


class Flight:
    """What one request has the engine do, from the place that it takes in the queue to its last token.

    Attributes:
        endpoint: what was asked, "chat" or "completions".
        places: in the engine's queue, one for each answer.
        outcome: how it ended: "stop", "length", "tool_calls", "rejected", "error"; "cancelled" where its client left.
        aborted: what ended it from this side, if anything did.
        first_s: seconds until its first token; None before.
        predictions: tokens that came as was expected, and those that did not; once it has ended.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.places: list[Place] = []
        self.outcome: str | None = None
        self.aborted: Exception | None = None
        self.first_s: float | None = None
        self.predictions = (0, 0)
        self.began = perf_counter()

    @property
    def handles(self) -> list[Handle]:
        """Of the answers that are decoded or wait to be."""
        return [place.handle for place in self.places if place.handle is not None]

    @property
    def waiting(self) -> bool:
        """Whether any of its answers still waits for a row."""
        return any(place.handle is None or place.handle.queue_s is None for place in self.places)

    def saw_token(self) -> None:
        """A token has come; the first one is what counts."""
        if self.first_s is None:
            self.first_s = perf_counter() - self.began

    def abort(self, problem: Exception) -> None:
        """End it because of this."""
        self.aborted = self.aborted or problem
        self._cancel()

    def close(self) -> None:
        """Free its places and rows; without an outcome by now, its client has left."""
        if self.outcome is None:
            self.outcome = "cancelled"
        self._cancel()

    def _cancel(self) -> None:
        for place in self.places:
            place.cancel()
