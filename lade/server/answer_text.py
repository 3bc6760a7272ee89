"""Tokens as the text that a client sees: cut before a stop text, whose beginning is never shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lade.hf.detokenizer import Detokenizer


class AnswerText:
    """The text of an answer while it grows.

    Args:
        detokenizer: makes text of tokens.
        stops: the text ends before the first of any of these.

    Attributes:
        stopped_by: the one it ended before, if any.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, tokens: Iterable[int]) -> str:
        """What can be shown with these tokens."""
        return self._shown(self._detokenizer.push(tokens), ends=False)

    def finish(self) -> str:
        """What was held back."""
        return self._shown(self._detokenizer.flush(), ends=True)

    def _shown(self, piece: str, *, ends: bool) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        held = 0 if ends else longest_beginning(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that a stop text may begin with."""
    most = min(len(text), max(map(len, stops), default=1) - 1)
    for size in range(most, 0, -1):
        tail = text[len(text) - size :]
        if any(stop.startswith(tail) for stop in stops):
            return size
    return 0
