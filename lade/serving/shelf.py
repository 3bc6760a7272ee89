"""Texts whose keys and values are kept for prompts that begin like them.

Whole texts lie beside each other, each with a copy of its own, and the longest common beginning is found by comparing
ids: a few dozen texts take less than a millisecond, and nothing is ever taken for something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lade.decoding.drafting.logits_cache import Said
from lade.model.kv_cache import TreeCache

LEAST = 32
"""Tokens that texts must have in common at least, to be worth a copy."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShelvedText:
    """A text on the shelf.

    Attributes:
        scope: whose it is; None for everyone's who names no scope.
        tokens: `[L]`.
        cache: keys and values of them.
        said: what the logits said at them.
    """

    scope: str | None
    tokens: Tokens
    cache: TreeCache
    said: Said

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.tokens) * self.cache.token_bytes + self.tokens.nbytes + self.said.nbytes


class Shelf:
    """Texts of at most so many bytes; the one that was used least lately goes first.

    Args:
        max_bytes: of all texts together.

    Attributes:
        max_bytes: as given.
        nbytes: what they take.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._texts: list[ShelvedText] = []  # the one used last is the last one

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, scope: str | None, tokens: Sequence[int]) -> tuple[ShelvedText, int] | None:
        """The text of a scope that has the most first tokens in common with these, and how many; None below `LEAST`."""
        length, number = self._longest(scope, tokens)
        if length < LEAST:
            return None
        text = self._texts.pop(number)
        self._texts.append(text)
        return text, length

    def knows(self, scope: str | None, tokens: Sequence[int]) -> bool:
        """Whether `find` finds one."""
        return self._longest(scope, tokens)[0] >= LEAST

    def _longest(self, scope: str | None, tokens: Sequence[int]) -> tuple[int, int]:
        """How many first tokens a text has in common with these at most, and its number."""
        wanted = np.asarray(tokens, dtype=np.int64)
        return max(((common(text.tokens, wanted), number) for number, text in self._of(scope)), default=(0, 0))

    def lacks(self, scope: str | None, tokens: Sequence[int]) -> bool:
        """Whether no text begins with these tokens, and they are worth a place."""
        wanted = np.asarray(tokens, dtype=np.int64)
        known = any(common(text.tokens, wanted) == len(wanted) for _, text in self._of(scope))
        return len(wanted) >= LEAST and not known

    def put(self, text: ShelvedText) -> None:
        """Keep a text, in place of those that it begins with. One that is too large for the shelf is not kept."""
        if text.nbytes > self.max_bytes:
            return
        for number, other in reversed(list(self._of(text.scope))):
            if common(other.tokens, text.tokens) == len(other.tokens):
                self._drop(number)
        while self.nbytes + text.nbytes > self.max_bytes:
            self._drop(0)
        self._texts.append(text)
        self.nbytes += text.nbytes

    def clear(self) -> None:
        """Forget all."""
        self._texts.clear()
        self.nbytes = 0

    def _of(self, scope: str | None) -> list[tuple[int, ShelvedText]]:
        return [(number, text) for number, text in enumerate(self._texts) if text.scope == scope]

    def _drop(self, number: int) -> None:
        self.nbytes -= self._texts.pop(number).nbytes


def common(one: Tokens, other: Tokens) -> int:
    """How many first tokens two texts have in common."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
