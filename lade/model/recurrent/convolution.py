"""Causal convolutions over the paths of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.activations import ACT2FN

from lade.model.recurrent.tree_pass import Ancestry


def columns_of(inputs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What lies in some columns, `[B, ..., C]`.

    Args:
        inputs: `[B, L, C]`, contiguous, so that whole columns are copied.
        columns: `[B, ...]` int64, below L.
    """
    rows, length, channels = inputs.shape
    if rows > 1:
        columns = columns + length * torch.arange(rows, device=columns.device).view(-1, *[1] * (columns.ndim - 1))
    return inputs.view(-1, channels).index_select(0, columns.flatten()).view(*columns.shape, channels)


def convolution(
    tree_pass: Ancestry,
    original: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The causal convolution `[B, C, S]` of each node with its ancestors.

    Args:
        tree_pass: the trees.
        original: the function of transformers, which is not called: it would compute whole texts.
        hidden_states: `[B, C, L]`, the text's last inputs and those of the nodes, as `RecurrentLayer` gives them.
        weight: `[C, width]`.
        bias: `[C]`.
        activation: name of what is applied to the sums.
        kwargs: of the original, without a meaning here.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)  # 16 bits are rounded once, as in the original
    inputs, weights = hidden_states.mT.to(exact).contiguous(), weight.to(exact).mT.contiguous()  # [B, L, C], [width, C]
    cached = inputs.shape[1] - tree_pass.size
    windows = tree_pass.windows(len(weights), cached, inputs.device)  # [B, S, width]
    sums = columns_of(inputs, windows[..., -1]) * weights[-1]
    for place, own in enumerate(weights[:-1]):
        sums.addcmul_(columns_of(inputs, windows[..., place]), own)
    if bias is not None:
        sums += bias
    outputs = sums.to(weight.dtype)
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.to(hidden_states.dtype).mT
