"""What a memory file holds, and which part of it a smaller memory takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from lade.decoding.contexts import MASKS, ORDERS

Table = dict[int, bytes]


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        old: a table for each order, context -> row; those that have not been used lately, the oldest first.
        young: the others.
        weights: the mixer's, see `Mixer`.
        max_bytes: of the memory that was saved.
        fingerprint: of the tokenizer that the tokens are of; None if nobody has said.
    """

    old: list[Table]
    young: list[Table]
    weights: list[list[float]]
    max_bytes: int
    fingerprint: str | None

    def newest(self, half: int) -> tuple[list[Table], list[Table]]:
        """The newest contexts, at most `half` in the old tables and as many in the young ones.

        A short table is kept whole before a long one is. A context goes if its shorter end does, since nobody would
        find it.
        """
        young = [_last(table, share) for table, share in zip(self.young, _shares(self.young, half), strict=True)]
        rest = [
            {**old, **dict(islice(table.items(), len(table) - len(kept)))}
            for old, table, kept in zip(self.old, self.young, young, strict=True)
        ]
        old = [_last(table, share) for table, share in zip(rest, _shares(rest, half), strict=True)]
        for longer in range(1, len(ORDERS)):
            mask, known = MASKS[longer - 1], old[longer - 1].keys() | young[longer - 1].keys()
            for tables in (old, young):
                tables[longer] = {key: row for key, row in tables[longer].items() if key & mask in known}
        return old, young


def _shares(tables: Sequence[Table], limit: int) -> list[int]:
    """How many of each table are kept: as many of each as of the others, but of a short one all."""
    shares = [0] * len(tables)
    by_length = sorted(range(len(tables)), key=lambda i: len(tables[i]))
    for place, i in enumerate(by_length):
        shares[i] = min(len(tables[i]), limit // (len(tables) - place))
        limit -= shares[i]
    return shares


def _last(table: Table, count: int) -> Table:
    return dict(islice(table.items(), len(table) - count, None))
