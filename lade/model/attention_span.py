"""How far back a layer sees, counted in positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpan:
    """Which keys are near enough to a query, by their positions; by default all of them.

    Attributes:
        window: the last so many positions, the query's own included.
        chunk: the positions of the query's own chunk; chunks of so many positions lie side by side.
    """

    window: int | None = None
    chunk: int | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """(query positions `[B, S, 1]`, key positions `[B, 1, K]`) -> bool `[B, S, K]`: is the key near enough?"""
        if self.window:
            return query - key < self.window
        if self.chunk:
            return query // self.chunk == key // self.chunk
        return torch.ones(1, 1, 1, dtype=torch.bool, device=query.device)


FULL = AttentionSpan()
"""Full attention: no key is too far."""


def sliding(window: int) -> AttentionSpan:
    """The last `window` positions, the query's own included."""
    return AttentionSpan(window=window)


def chunked(size: int) -> AttentionSpan:
    """The positions of the query's own chunk."""
    return AttentionSpan(chunk=size)
