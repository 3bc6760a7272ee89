"""Recycled logits: the likeliest next tokens by context, whether they were accepted or not.

Every row of logits of a pass is paid for. Its best tokens are kept under the last tokens of the node's text, and looked
up where these tokens come up again. Source of the idea: Token Recycling, arXiv 2408.08696.
"""

from __future__ import annotations

from collections.abc import Sequence

from lade.decoding.beams.tree import Follow


class Recycler:
    """Maps the last 1 to `orders` tokens of a text to the likeliest next tokens seen last after them.

    Args:
        orders: length of the longest context.
        max_contexts: contexts of each length, the least recently learned goes first. It bounds the memory.
    """

    def __init__(self, orders: int = 3, max_contexts: int = 65_536) -> None:
        self.orders, self._max_contexts = orders, max_contexts
        self._tables: list[dict[tuple[int, ...], Sequence[Follow]]] = [{} for _ in range(orders)]

    def learn(self, text: Sequence[int], follows: Sequence[Follow]) -> None:
        """Enter what follows `text` (of which the last `orders` tokens count), the likeliest first."""
        for order, table in enumerate(self._tables[: len(text)], start=1):
            context = tuple(text[-order:])
            table.pop(context, None)  # taken out and put in again, an entry of a dictionary is the most recent
            table[context] = follows
            if len(table) > self._max_contexts:
                del table[next(iter(table))]

    def lookup(self, text: Sequence[int]) -> Sequence[Follow]:
        """What followed the longest known end of `text`; empty if even its last token is new."""
        for order in range(min(self.orders, len(text)), 0, -1):
            follows = self._tables[order - 1].get(tuple(text[-order:]))
            if follows is not None:
                return follows
        return ()
