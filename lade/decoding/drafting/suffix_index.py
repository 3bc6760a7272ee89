"""Suffix index of a row's text: each token linked to its previous occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lade.decoding.kernels.layout import Ints

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
    """

    def __init__(self) -> None:
        self.text: Ints = np.zeros(_ROOM, np.int32)
        self.links: Ints = np.zeros(_ROOM, np.int32)
        self._known: list[int] = []
        self._tokens: Sequence[int] = ()
        self._latest: dict[int, int] = {}  # index of the last occurrence of each token

    def read(self, tokens: Sequence[int]) -> None:
        """Index the new tokens of a text that equals the last one but for some tokens at the end of that.

        A list passed before is assumed to have only grown since, and is not compared again.
        """
        if tokens is not self._tokens:
            self._take_back(same_beginning(self._known, tokens))
            self._tokens = tokens
        same = len(self._known)
        if len(tokens) > len(self.text):
            more = 2 * len(tokens) - len(self.text)
            self.text, self.links = (
                np.concatenate([each, np.zeros(more, np.int32)]) for each in (self.text, self.links)
            )
        for number, token in enumerate(tokens[same:], start=same):
            self.text[number], self.links[number] = token, self._latest.get(token, -1)
            self._latest[token] = number
        self._known += tokens[same:]

    def _take_back(self, kept: int) -> None:
        """Remove all tokens after the first `kept`."""
        for number in range(len(self._known) - 1, kept - 1, -1):
            before = int(self.links[number])
            if before < 0:
                del self._latest[self._known[number]]
            else:
                self._latest[self._known[number]] = before
        del self._known[kept:]
