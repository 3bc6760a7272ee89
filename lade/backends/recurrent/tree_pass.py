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
    """The trees of one forward pass; rows with fewer nodes than the largest are filled up with copies of their root.

    Args:
        trees: `[B]`, one for each row, S being the largest size.

    Attributes:
        parents: `[B, S]` int64; -1 for roots, and for what rows are filled up with.
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
            columns = [nodes]  # -1 is the last input of the text, -2 the one before it
            for _ in range(width - 1):
                node = columns[-1]
                parent = np.take_along_axis(self.parents, np.maximum(node, 0), axis=1)
                columns.append(np.where(node >= 0, parent, node - 1))
            self._on_device[key] = upload([np.stack(columns[::-1], axis=-1) + cached], device)[0]
        return self._on_device[key]


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
