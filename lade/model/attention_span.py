"""How far back a layer sees, counted in positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpan:
    """Which keys a layer's queries see, by their positions; by default all of them.

    Attributes:
        window: number of positions seen, ending with the query's own.
        chunk: size of the chunks that positions are divided into; a query sees its own chunk.
    """

    window: int | None = None
    chunk: int | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """(query positions `[B, S, 1]`, key positions `[B, 1, K]`) -> bool `[B, S, K]`: is the key within the span?"""
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
