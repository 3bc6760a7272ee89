"""Causal convolutions over the paths of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lade.model.recurrent.tree_pass import TreePass


def windows_of(inputs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What lies in some columns, `[B, C, ...]`.

    Args:
        inputs: `[B, C, L]`.
        columns: `[B, ...]` int64, below L.
    """
    rows, channels, _ = inputs.shape
    index = columns.reshape(rows, 1, -1).expand(rows, channels, -1)
    return inputs.gather(-1, index).view(rows, channels, *columns.shape[1:])


def convolution(
    tree_pass: TreePass,
    original: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The causal convolution `[B, C, S]` of each node with its ancestors.

    Args:
        tree_pass: the trees.
        original: the function of transformers.
        hidden_states: `[B, C, S * width]`, the windows of the nodes one after the other, as `RecurrentLayer` makes
            them: of each, the last output is the node's.
        weight: `[C, width]`.
        args: passed on.
        kwargs: passed on.
    """
    width = weight.shape[-1]
    return original(hidden_states, weight, *args, **kwargs)[:, :, width - 1 :: width]
