"""How an accepted path goes into the state of a recurrent layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Folding(Protocol):
    """Takes the place of the final state that a core returns; the mixer hands it on to the cache layer."""

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """Have a state take in a path, in place.

        Args:
            state: `[B, ...]`, of the text before the tree; then of the text with the path.
            last: `[B]` int64, the node that the path of each row ends with.
        """
        ...


@dataclass(frozen=True)
class LinearFolding:
    """Folds the nodes of a linear attention: the state decays, and each node of the path adds its key times its value.

    Attributes:
        keys: `[B, H, S, K]`.
        values: `[B, H, S, V]`, what each node adds at its key.
        decay: `[B, H, S, 1 or K]`, logarithm of what is left of the text's state at each node.
        closure: `[B, S, S]` bool, see `Ancestry.closure`.
        value_first: whether states are `[B, H, V, K]`, and not `[B, H, K, V]`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    decay: torch.Tensor
    closure: torch.Tensor
    value_first: bool = False

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """See `Folding.fold`."""
        rows = torch.arange(len(last), device=last.device)
        own = self.decay[rows, :, last][:, :, None]  # [B, H, 1, 1 or K]
        on_path = self.closure[rows, last][:, None, :, None]  # [B, 1, S, 1]
        weights = (own - self.decay).masked_fill(~on_path, -torch.inf).exp()  # [B, H, S, 1 or K]
        added = (self.keys * weights).mT @ self.values  # [B, H, K, V]
        left = own.exp().mT  # [B, H, 1 or K, 1]
        if self.value_first:
            added, left = added.mT, left.mT
        if state.dtype == added.dtype:
            state.mul_(left).add_(added)
        else:  # rounded once
            state.copy_(left * state + added)

    def to(self, *args: Any, **kwargs: Any) -> LinearFolding:
        """Itself: some mixers convert the final state, which keeps its type here."""
        return self


def is_folding(thing: object) -> bool:
    """Whether a mixer hands on a `Folding`, and not a state."""
    return hasattr(thing, "fold")
