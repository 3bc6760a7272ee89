"""How much of a row's text is still what it was: rows in lock-step show what they expect to write, and take it back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

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
