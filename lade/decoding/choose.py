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

    def look_ahead(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """What would follow each node of one step, without waiting for the device.

        Args:
            logits: `[S, V]`, one row a node, in the model's dtype.
            depths: `[S]`, of the nodes.

        Returns:
            `[S]` ids on the device; None where that is the argmax, or has to be asked node by node.
        """
        ...

    def open(self, logits: torch.Tensor, picks: Sequence[int], tokens: Sequence[int]) -> Choose:
        """Get ready for the nodes of one step.

        Args:
            logits: `[S, V]`, one row a node, in the model's dtype.
            picks: `[S]`, what `look_ahead` has found; where that was nothing, the argmax at each node.
            tokens: the row's prompt and output so far; it grows while the walk goes on.

        Returns:
            A function from a node to the token that follows it.
        """
        ...


class Greedy:
    """The argmax, found for all nodes at once."""

    def look_ahead(self, logits: torch.Tensor, depths: Sequence[int]) -> None:
        """See `Chooser.look_ahead`."""

    def open(self, logits: torch.Tensor, picks: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `Chooser.open`."""
        return picks.__getitem__
