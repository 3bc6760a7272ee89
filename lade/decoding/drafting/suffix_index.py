"""Suffix index of a row's text: each token linked to its previous occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lade.decoding.kernels.growth import index_text, take_back
from lade.decoding.kernels.layout import Ints
from lade.decoding.kernels.work import IndexedText, no_tokens

_TAKEN_BACK = 128
"""Maximum number of tokens at the end of a row that may change between two calls."""


def same_beginning(known: list[int], tokens: Sequence[int], before: int = 0) -> int:
    """Return the length of the common prefix of two texts; only the last `_TAKEN_BACK` tokens are compared.

    Args:
        known: the former text.
        tokens: the present text.
        before: number of tokens at the beginning of `known` that are not in `tokens`.
    """
    count = len(known) - before
    late = max(0, min(count, len(tokens)) - _TAKEN_BACK)
    rest = known[before + late :]
    if rest == list(tokens[late:count]):
        return count
    pairs = zip(rest, tokens[late:], strict=False)
    return late + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


_ROOM = 1024  # initial capacity in tokens


class EarlierText:
    """The growing text of one row; its last tokens may be replaced.

    Attributes:
        text: `[T]` ids; unused capacity comes last.
        links: `[T]`, index of the previous occurrence of each token, -1 for none.
        latest: `[2 T, 2]` hash table of the index of each token's last occurrence: token and index, which is -1 for a
            token that occurs no more, and -2 in free slots.
        length: number of tokens.
    """

    length: int

    def __init__(self) -> None:
        self._tokens: Sequence[int] = ()
        self._begin_anew(_ROOM)

    def read(self, tokens: Sequence[int]) -> None:
        """Index the new tokens of a text that equals the last one but for some tokens at the end of that.

        A list passed before is assumed to have only grown since, and is not compared again.
        """
        if tokens is not self._tokens:
            self._take_back(tokens)
            self._tokens = tokens
        if len(tokens) > len(self.text):
            self._begin_anew(2 * len(tokens))
        if len(tokens) > self.length:
            index_text(self._indexed, np.array(tokens[self.length :], dtype=np.int64), self.length)
            self.length = len(tokens)

    def _begin_anew(self, room: int) -> None:
        """Begin anew with arrays for that many tokens."""
        self.length = self._removed = 0
        self.text: Ints = np.zeros(room, np.int32)
        self.links: Ints = np.zeros(room, np.int32)
        self.latest: Ints = no_tokens(room)
        self._indexed: IndexedText = IndexedText(self.text, self.links, self.latest)

    def _take_back(self, tokens: Sequence[int]) -> None:
        """Remove the last tokens from the first one on that differs from a new text's."""
        late = max(0, min(self.length, len(tokens)) - _TAKEN_BACK)
        kept = late + same_beginning(self.text[late : self.length].tolist(), tokens[late:])
        self._removed += self.length - kept
        if self._removed >= len(self.text):  # tokens that occur no more still take slots of `latest`
            self._begin_anew(len(self.text))
            return
        take_back(self._indexed, kept, self.length)
        self.length = kept
