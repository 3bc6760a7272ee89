"""A tree pass through recurrent layers: ancestry, causal convolutions, decays, state folding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers.activations import ACT2FN

from lade.decoding.tree import TokenTree
from lade.model.cache_layers import Ancestry
from lade.model.inputs import upload


class TreePass:
    """Ancestry of the trees of one forward pass; smaller trees are padded with copies of their root.

    Args:
        trees: `[B]`, one tree per row; S is the largest size.

    Attributes:
        parents: `[B, S]` int64; -1 for roots and padding.
        depths: `[B, S]` int64.
        size, state: see `Ancestry`.
    """

    def __init__(self, trees: Sequence[TokenTree]) -> None:
        shape = len(trees), max(map(len, trees))
        self.size = shape[1]
        self.parents = np.full(shape, -1)
        self.depths = np.zeros(shape, dtype=np.int64)
        self.state: torch.Tensor | None = None
        closure = np.zeros((*shape, shape[1]), dtype=np.bool_)
        closure[:] = np.eye(shape[1], dtype=np.bool_)
        for row, tree in enumerate(trees):
            size = len(tree)
            self.parents[row, :size], self.depths[row, :size] = tree.parents, tree.depths
            closure[row, :size, :size] = tree.closure()
        self._closure = closure
        self._on_device: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    def closure(self, device: torch.device) -> torch.Tensor:
        """See `Ancestry.closure`."""
        key = device, 0, 0
        if key not in self._on_device:
            self._on_device[key] = upload([self._closure], device)[0]
        return self._on_device[key]

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """See `Ancestry.windows`."""
        key = device, width, cached
        if key not in self._on_device:
            nodes = np.broadcast_to(np.arange(self.parents.shape[1]), self.parents.shape)
            columns = [nodes]  # -1 is the last input of the text, -2 the one before
            for _ in range(width - 1):
                node = columns[-1]
                parent = np.take_along_axis(self.parents, np.maximum(node, 0), axis=1)
                columns.append(np.where(node >= 0, parent, node - 1))
            self._on_device[key] = upload([np.stack(columns[::-1], axis=-1) + cached], device)[0]
        return self._on_device[key]


def gather_columns(inputs: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gather columns of inputs, `[B, ..., C]`.

    Args:
        inputs: `[B, L, C]`, contiguous, so that whole columns are copied.
        columns: `[B, ...]` int64, column indices below L.
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
    """Compute the causal convolution `[B, C, S]` of each node along its ancestors.

    Args:
        tree_pass: ancestry of the trees.
        original: function of transformers that is replaced; unused.
        hidden_states: `[B, C, L]`, the last inputs of the text, then those of the nodes, as returned by
            `RecurrentLayer`.
        weight: `[C, width]` filter.
        bias: `[C]`; None for none.
        activation: name of the activation function; None for none.
        kwargs: other arguments of the original, ignored.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)  # 16-bit results are rounded once, as in the original
    inputs, weights = hidden_states.mT.to(exact).contiguous(), weight.to(exact).mT.contiguous()  # [B, L, C], [width, C]
    cached = inputs.shape[1] - tree_pass.size
    windows = tree_pass.windows(len(weights), cached, inputs.device)  # [B, S, width]
    sums = gather_columns(inputs, windows[..., -1]) * weights[-1]
    for place, own in enumerate(weights[:-1]):
        sums.addcmul_(gather_columns(inputs, windows[..., place]), own)
    if bias is not None:
        sums += bias
    outputs = sums.to(weight.dtype)
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.to(hidden_states.dtype).mT


def path_sums(decay: torch.Tensor, closure: torch.Tensor) -> torch.Tensor:
    """Return sums `[B, H, S, D]` from the root down to each node.

    Args:
        decay: `[B, H, S, D]`, log decays of the nodes.
        closure: `[B, S, S]` bool, see `Ancestry.closure`.
    """
    return closure[:, None].to(decay.dtype) @ decay


def decayed_products(
    readers: torch.Tensor, writers: torch.Tensor, decay: torch.Tensor, closure: torch.Tensor
) -> torch.Tensor:
    """Return decayed dot products `[B, H, S, S]` of nodes with their ancestors and themselves; other entries are 0.

    An ancestor has decayed less than its descendants, so no exponential exceeds 1.

    Args:
        readers: `[B, H, S, K]` queries, or keys of the reading nodes.
        writers: `[B, H, S, K]` keys of the ancestors.
        decay: `[B, H, S, 1 or K]`, log decay of the text's state at each node, for all channels or per channel.
        closure: `[B, S, S]` bool, see `Ancestry.closure`.
    """
    if decay.shape[-1] == 1:
        between = (decay - decay.mT).masked_fill(~closure[:, None], -torch.inf)
        return readers @ writers.mT * between.exp()
    channels = (decay[:, :, :, None] - decay[:, :, None]).masked_fill(~closure[:, None, ..., None], -torch.inf)
    return torch.einsum("bhik,bhjk,bhijk->bhij", readers, writers, channels.exp_())


class Folding(Protocol):
    """Returned by a core instead of the final state; the mixer passes it on to the cache layer."""

    def fold(self, state: torch.Tensor, last: torch.Tensor) -> None:
        """Fold a path into a state, in place.

        Args:
            state: `[B, ...]`, state of the text before the tree; updated to include the path.
            last: `[B]` int64, last node of each row's path.
        """
        ...


@dataclass(frozen=True)
class LinearFolding:
    """Folding of linear attention: the state decays, and each node of the path adds its key times its value.

    Attributes:
        keys: `[B, H, S, K]` keys of the nodes.
        values: `[B, H, S, V]`, values that the nodes add at their keys.
        decay: `[B, H, S, 1 or K]`, log decay of the text's state at each node.
        closure: `[B, S, S]` bool, see `Ancestry.closure`.
        value_first: true if states are `[B, H, V, K]` rather than `[B, H, K, V]`.
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
        """Return itself: some mixers convert the final state, but foldings keep their dtype."""
        return self


def is_folding(thing: object) -> bool:
    """Return True if a mixer passes on a `Folding` rather than a state."""
    return hasattr(thing, "fold")
