"""Queries in pieces: a prompt's first queries need not look at its last keys, and their weights stay in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_QUERIES = 64
"""Queries of a piece."""


@dataclass(frozen=True)
class Piece:
    """Queries that are served together, and the keys that they see.

    Attributes:
        queries: of the pass.
        slots: of the keys, from the first that any of them sees to the last.
        common: number of the first ones of these slots which every query sees.
        hidden: `[B, 1, S, N - common]` bool, true where a query does not see one of the others.
    """

    queries: slice
    slots: slice
    common: int
    hidden: torch.Tensor


def cut(allowed: torch.Tensor) -> Sequence[Piece]:
    """Cut a pass into pieces.

    Args:
        allowed: `[B, S, K]` bool, what each query sees.
    """
    step = allowed.shape[1]
    return [
        _piece(slice(first, min(first + MOST_QUERIES, step)), allowed[:, first : first + MOST_QUERIES])
        for first in range(0, step, MOST_QUERIES)
    ]


def _piece(queries: slice, allowed: torch.Tensor) -> Piece:
    """The piece of these queries, which see so much, `[B, S, K]`."""
    seen = allowed.any(1).any(0).nonzero()  # [slots, 1]
    slots = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
    shared = allowed[:, :, slots].all(1).all(0).cpu().numpy()
    common = len(shared) if shared.all() else int(shared.argmin())
    return Piece(queries, slots, common, ~allowed[:, None, :, slots][..., common:])
