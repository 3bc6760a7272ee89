"""Choosers: what turns the logits at a node into a token.

A chooser is asked once per emitted token, in the order of the text. So processors with a memory of their own see what
they would see in plain decoding, and a generator is drawn from just as often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Choose = Callable[[int], int]


class Chooser(Protocol):
    """Decides which token follows, given the logits."""

    def open(self, logits: torch.Tensor, picks: Sequence[int], tokens: Sequence[int]) -> Choose:
        """Get ready for the nodes of one step.

        Args:
            logits: `[S, V]`, one row a node, in the model's dtype.
            picks: `[S]`, the argmax at each node.
            tokens: the row's prompt and output so far; it grows while the walk goes on.

        Returns:
            A function from a node to the token that follows it.
        """


class Greedy:
    """The argmax, found for all nodes at once."""

    def open(self, logits: torch.Tensor, picks: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `Chooser.open`."""
        return picks.__getitem__
