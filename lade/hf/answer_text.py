"""The text of an answer while it is written, and texts that end it.

transformers' own `StopStringCriteria` prepares a table of its vocabulary for every new set of stop strings, which takes
a second. Looking for them in the text takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from lade.hf.detokenizer import Detokenizer


class AnswerText(StoppingCriteria):
    """A criterion that reads one row's new tokens as text, and ends the row with the token that completes a stop text.

    The text ends before the earliest stop text that is complete by then. What may be the beginning of one is held back
    until that is decided, and so are the first bytes of a character.

    Args:
        tokenizer: a transformers tokenizer.
        context: ids before the first new one: after them, a word may have a space before it that it would not have at
            the beginning of a text.
        stops: texts that end it, none of them empty.
        skip_special_tokens: whether special tokens have no text.

    Attributes:
        stop: the stop text that the text ends before; None where there is none.
    """

    def __init__(
        self, tokenizer: Any, context: Iterable[int], stops: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._stops = tuple(stops)
        self.stop: str | None = None
        self._held = ""
        self._pieces: list[str] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Whether the last of `input_ids` `[1, L]` completes a stop text, `[1]` bool."""
        return torch.tensor([self.add(int(input_ids[0, -1]))], device=input_ids.device)

    def add(self, token: int) -> bool:
        """Read the next token; whether a stop text is complete with it."""
        self._pieces.append(self._released(self._detokenizer.push([token])))
        return self.stop is not None

    def finish(self) -> None:
        """There are no more tokens: what was held back belongs to the last one."""
        if self.stop is None and self._pieces:
            self._pieces[-1] += self._released(self._detokenizer.flush())
            self._pieces[-1] += self._held
            self._held = ""

    def taken(self, tokens: int) -> list[str]:
        """What could be shown with each of so many tokens, the first ones that were not asked about yet.

        A piece may be empty: all pieces joined are the text.
        """
        pieces, self._pieces = self._pieces[:tokens], self._pieces[tokens:]
        return pieces

    def _released(self, piece: str) -> str:
        """What of the text held back and `piece` certainly belongs to the text; the rest is held back."""
        text = self._held + piece
        found = [(text.find(stop), len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.stop = min(found)
            self._held = ""
            return text[:end]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` may begin with, at most."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
