"""Who descends from whom in the trees of one pass, for recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from lade.decoding.tree import TokenTree
from lade.model.host_to_device import upload


class Ancestry(Protocol):
    """Who descends from whom in the trees of one pass.

    Attributes:
        size: S, nodes of each row.
        state: the text's state in the layer whose convolution came last, for cores that mixers do not pass it to.
    """

    size: int
    state: torch.Tensor | None

    def closure(self, device: torch.device) -> torch.Tensor:
        """`[B, S, S]` bool, true where the row's node is the column's node or descends from it."""
        ...

    def windows(self, width: int, cached: int, device: torch.device) -> torch.Tensor:
        """Where the last inputs of each node lie: its own, those of its ancestors, and of the text before them.

        Args:
            width: number of inputs that a convolution sees, at least 1.
            cached: number of inputs of the text that are kept, in front of those of the nodes.
            device: where the result goes.

        Returns:
            `[B, S, width]` int64, columns of the `cached + S` inputs, the node's own one last.
        """
        ...


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
