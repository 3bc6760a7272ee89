"""How large the buffers of a cache are made for what is to lie in them."""

from __future__ import annotations

from typing import Protocol

from lade.model.shapes import batch_bucket, key_bucket, step_bucket

AHEAD_TOKENS = 4096
"""Slots beyond a text that static buffers begin with at most: a request may allow far more tokens than it will get."""
_LEAST_AHEAD = 256


class Sizing(Protocol):
    """Of one kind of cache."""

    def rows(self, rows: int) -> int:
        """Rows of buffers that hold so many."""
        ...

    def slots(self, tokens: int, tree: int) -> int:
        """Slots of a row that has so many tokens, and behind them those of a tree."""
        ...

    def ahead(self, tokens: int) -> int:
        """Tokens to make room for beyond those that there are, so that buffers are seldom replaced."""
        ...


class Exact:
    """Of buffers that are as large as it takes."""

    def rows(self, rows: int) -> int:
        """See `Sizing.rows`."""
        return rows

    def slots(self, tokens: int, tree: int) -> int:
        """See `Sizing.slots`."""
        return tokens + tree

    def ahead(self, tokens: int) -> int:
        """See `Sizing.ahead`."""
        return max(_LEAST_AHEAD, tokens // 2)


class Bucketed:
    """Of buffers that passes of few shapes work on: the last slot stays zero, and what is captured goes with them."""

    def rows(self, rows: int) -> int:
        """See `Sizing.rows`."""
        return batch_bucket(rows)

    def slots(self, tokens: int, tree: int) -> int:
        """See `Sizing.slots`."""
        return key_bucket(tokens + step_bucket(tree) + 1)

    def ahead(self, tokens: int) -> int:
        """See `Sizing.ahead`."""
        return max(AHEAD_TOKENS, tokens)
