"""Suffix index of a row's text: each token linked to its previous occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from lade.decoding.kernels.layout import Ints

_TAKEN_BACK = 128
"""Tokens at the end of a row that may be other ones the next time."""


def same_beginning(known: list[int], tokens: Sequence[int], before: int = 0) -> int:
    """With how many of the tokens that are known a text begins; only the last `_TAKEN_BACK` are compared.

    Args:
        known: the text as it was.
        tokens: the text as it is.
        before: number of tokens at the beginning of `known` that are not in `tokens`.
    """
    count = len(known) - before
    late = max(0, min(count, len(tokens)) - _TAKEN_BACK)
    rest = known[before + late :]
    if rest == list(tokens[late:count]):
        return count
    pairs = zip(rest, tokens[late:], strict=False)
    return late + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


_ROOM = 1024  # tokens, at first


class EarlierText:
    """The text of one row, which grows; its last tokens may be taken back, in another list of them.

    Attributes:
        text: `[T]`, ids; those that have been read come first.
        links: `[T]`, the number of the token before each that is the same one, -1 where there is none.
    """

    def __init__(self) -> None:
        self.text: Ints = np.zeros(_ROOM, np.int32)
        self.links: Ints = np.zeros(_ROOM, np.int32)
        self._known: list[int] = []
        self._tokens: Sequence[int] = ()
        self._latest: dict[int, int] = {}  # number of each token where it stood last

    def read(self, tokens: Sequence[int]) -> None:
        """Read what is new in a text that begins with the one that was read before, but for some tokens at its end.

        A list that was read the last time has grown since, and that is all: it is not looked through again.
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
        """Forget all tokens but the first ones."""
        for number in range(len(self._known) - 1, kept - 1, -1):
            before = int(self.links[number])
            if before < 0:
                del self._latest[self._known[number]]
            else:
                self._latest[self._known[number]] = before
        del self._known[kept:]
