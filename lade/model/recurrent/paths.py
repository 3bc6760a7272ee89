"""Decays along the paths of a tree: what is left at a node of the state of the text, or of what an ancestor wrote."""

from __future__ import annotations

import torch


def path_sums(decay: torch.Tensor, closure: torch.Tensor) -> torch.Tensor:
    """Sums `[B, H, S, D]` from the root down to each node.

    Args:
        decay: `[B, H, S, D]`, logarithms of the nodes' own decays.
        closure: `[B, S, S]` bool, see `Ancestry.closure`.
    """
    return closure[:, None].to(decay.dtype) @ decay


def decayed_products(
    readers: torch.Tensor, writers: torch.Tensor, decay: torch.Tensor, closure: torch.Tensor
) -> torch.Tensor:
    """Scalar products `[B, H, S, S]` of nodes with their ancestors and themselves, decayed in between; others are 0.

    An ancestor has decayed less than its descendants, so no exponential is greater than 1.

    Args:
        readers: `[B, H, S, K]`.
        writers: `[B, H, S, K]`.
        decay: `[B, H, S, 1 or K]`, logarithm of what is left of the text's state at each node, in all channels or in
            each.
        closure: `[B, S, S]` bool, see `Ancestry.closure`.
    """
    if decay.shape[-1] == 1:
        between = (decay - decay.mT).masked_fill(~closure[:, None], -torch.inf)
        return readers @ writers.mT * between.exp()
    channels = (decay[:, :, :, None] - decay[:, :, None]).masked_fill(~closure[:, None, ..., None], -torch.inf)
    return torch.einsum("bhik,bhjk,bhijk->bhij", readers, writers, channels.exp_())
