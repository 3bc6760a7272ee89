"""Incremental detokenization and stop strings.

transformers' `StopStringCriteria` scans the whole vocabulary for every new set of stop strings. Searching the decoded
text does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lade.hf.processors import TokenCriterion

_INCOMPLETE = "\ufffd"  # decoded from a character whose last bytes are missing
_LONGEST_HELD = 48  # a longer run of these will never become valid characters
_TAIL_TOKENS, _LONG_TOKENS, _LONGEST_TOKENS = 8, 64, 256


class Detokenizer:
    """Turns token ids into text as they come, such as those of the steps that `lade.stream` yields.

    >>> text = lade.Detokenizer(tokenizer, inputs["input_ids"][0].tolist())
    >>> for step in lade.stream(model, **inputs, max_new_tokens=200):
    ...     print(text.push(step.tokens), end="")
    >>> print(text.flush())

    It decodes a short window of the latest ids, so the cost of a step does not grow with the text. Whether a token
    starts with a space depends on the ones before it, so the window is decoded as a whole and only the new part is
    returned. A character whose bytes are spread over several tokens is held back until it is complete.

    Args:
        tokenizer: the transformers tokenizer that decodes the ids.
        context: ids before the first one pushed: after them a word may begin with a space that it would not have at the
            beginning of a text.
        skip_special_tokens: leave out the text of special tokens.
    """

    def __init__(self, tokenizer: Any, context: Iterable[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        before, size = list(context), _TAIL_TOKENS
        self._ids = before[-size:]
        while not self._decode() and size < len(before):  # special tokens only, which decode to nothing
            size *= 2
            self._ids = before[-size:]
        self._shown = self._decode()  # part of the window's text that was returned

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens and return the text that became complete, which may be empty."""
        self._ids += tokens
        text = self._decode()
        if not text.startswith(self._shown):  # some tokenizers retract a run of bytes while it is incomplete
            return self.flush() if len(self._ids) > _LONGEST_TOKENS else ""
        complete = max(len(text.rstrip(_INCOMPLETE)), len(text) - _LONGEST_HELD, len(self._shown))
        piece = text[len(self._shown) : complete]
        self._shown = text[:complete]
        if len(self._ids) > (2 * _TAIL_TOKENS if complete == len(text) else _LONG_TOKENS):
            self._shorten(held=text[complete:])
        return piece

    def flush(self) -> str:
        """Return the text held back, however incomplete."""
        text = self._decode()
        piece = text[len(self._shown) :]
        self._ids, self._shown = [], ""
        return piece

    def whole(self, tokens: Iterable[int]) -> str:
        """Return the text of these tokens, complete or not."""
        return self.push(tokens) + self.flush()

    def _shorten(self, held: str) -> None:
        """Drop the first ids of the window, at a place where the rest decodes to the same text as before."""
        text = self._shown + held
        for size in range(_TAIL_TOKENS, 8 * _TAIL_TOKENS):
            tail = self._decode(self._ids[-size:])
            if len(tail) > len(held) and text.endswith(tail):
                self._ids, self._shown = self._ids[-size:], tail[: len(tail) - len(held)]
                return
        # There is none within a character, or among special tokens, where the next word would lose its space.
        if len(self._ids) > _LONGEST_TOKENS and not held:
            self._ids, self._shown = [], ""

    def _decode(self, ids: list[int] | None = None) -> str:
        text: str = self._tokenizer.decode(self._ids if ids is None else ids, skip_special_tokens=self._skip)
        return text


class AnswerText(TokenCriterion):
    """A criterion that decodes one row's new tokens, and ends the row at the token that completes a stop text.

    The text ends before the earliest stop text that is complete by then. A possible beginning of a stop text is held
    back until it is decided, and so are the first bytes of a character.

    Args:
        tokenizer, context, skip_special_tokens: see `Detokenizer`.
        stops: non-empty texts that end the answer.

    Attributes:
        stop: the stop text found; None as long as there is none.
    """

    def __init__(
        self, tokenizer: Any, context: Iterable[int], stops: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._stops = tuple(stops)
        self.stop: str | None = None
        self._held = ""
        self._pieces: list[str] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether the last of `input_ids` `[1, L]` completes a stop text, `[1]` bool."""
        return torch.tensor([self.add(int(input_ids[0, -1]))], device=input_ids.device)

    def add(self, token: int) -> bool:
        """Add the next token; return whether it completes a stop text."""
        self._pieces.append(self._released(self._detokenizer.push([token])))
        return self.stop is not None

    def finish(self) -> None:
        """Assign the text still held back to the last token: no more tokens follow."""
        if self.stop is None and self._pieces:
            self._pieces[-1] += self._released(self._detokenizer.flush())
            self._pieces[-1] += self._held
            self._held = ""

    def taken(self, tokens: int) -> list[str]:
        """Remove and return the text of the next `tokens` tokens, one piece per token, which may be empty."""
        pieces, self._pieces = self._pieces[:tokens], self._pieces[tokens:]
        return pieces

    def _released(self, piece: str) -> str:
        """Return the part of the pending text plus `piece` that is certainly text; the rest is held back."""
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
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
