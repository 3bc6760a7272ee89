"""What a captured pass reads: tensors that stay where they are, and are refilled before each pass.

One copy brings the tokens, their positions, the lengths of the rows and each tree's ancestor closure. All else, the
attention mask over thousands of cached tokens above all, follows from these, and is computed on the device as a part of
the pass.

Trees are padded to the size of the pass, and the batch to its number of rows. The padding consists of copies of the
root that see the root only; no other node sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lade.decoding.tree import TokenTree
from lade.model.host_to_device import Layout
from lade.model.masks import StepInputs
from lade.model.position_offsets import PositionOffsets
from lade.model.tree_attention.inputs import TreeInputs
from lade.model.tree_attention.tree_mask import TreeSlots, words_of


class StaticInputs:
    """Inputs of passes over B rows of S tokens.

    Args:
        rows: B, rows of the pass.
        size: S, tokens of each row.
        device: the device of the model.
        axes: numbers that make a position; 0 where it is the slot's.

    Attributes:
        memory: uint8, holds all of these:
        ids, positions: `[B, S]` int64.
        lengths: `[B]` int64, tokens cached before the trees.
        closure: `[B, S, S]` bool, see `TokenTree.closure`.
        offsets: `[axes, B, 1]` int64, of positions from slots; None without axes.
    """

    def __init__(self, rows: int, size: int, device: torch.device, axes: int = 0) -> None:
        self.rows, self.size, self._device = rows, size, device
        numbers = [(np.int64, (rows, size)), (np.int64, (rows, size)), (np.int64, (rows,))]
        self._layout = Layout([*numbers, (np.bool_, (rows, size, size)), (np.int64, (axes, rows, 1))])
        self.memory = self._layout.memory(device)
        self.ids, self.positions, self.lengths, self.closure, offsets = self._layout.tensors(self.memory)
        self.offsets = offsets if axes else None

    def fill(self, trees: Sequence[TokenTree], lengths: Sequence[int], offsets: PositionOffsets | None = None) -> None:
        """Bring in one tree a row, at most B of them, none larger than S; row b has `lengths[b]` cached tokens."""
        staged = self._layout.memory(self._device, staged=True)
        ids, positions, starts, closure, shifts = self._layout.arrays(staged)
        if offsets:
            shifts[:, : len(trees)] = offsets.array()
        for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            size = len(tree)
            ids[row], starts[row] = tree.ids[0], length
            ids[row, :size] = tree.ids
            positions[row, :size] = tree.depths
            positions[row] += length
            closure[row, :size, :size] = tree.closure()
            closure[row, size:, 0] = True
        closure[len(trees) :, :, 0] = True
        self.memory.copy_(staged, non_blocking=True)

    def slots(self) -> torch.Tensor:
        """Where the nodes go in the cache, `[B, S]` int64: after what their row holds."""
        return self.lengths[:, None] + torch.arange(self.size, device=self._device)

    def step(self, keys: int) -> StepInputs:
        """Inputs of a pass that reads the first `keys` slots of each row, K in all."""
        slots = torch.arange(keys, device=self._device)
        place = slots - self.lengths[:, None]  # [B, K] number of the node in each slot; cached tokens lie before 0
        node = place.clamp(0, self.size - 1)
        fed = (place >= 0) & (place < self.size)
        seen = self.closure.gather(2, node[:, None].expand(-1, self.size, -1))  # [B, S, K]
        real = self.closure.diagonal(dim1=1, dim2=2)[..., None]  # [B, S, 1]; padding does not see itself
        return StepInputs(
            ids=self.ids,
            positions=self.positions,
            key_positions=torch.where(fed, self.positions.gather(1, node), slots),
            allowed=torch.where(fed[:, None], seen, (place < 0)[:, None] & real),
        )

    def tree_step(self, keys: int) -> TreeInputs:
        """The same for attention that knows `TreeMask`; padding sees the cached text, too."""
        lengths, positions = self.lengths.int(), self.positions.int()
        slots = TreeSlots(lengths, lengths, positions, positions, words_of(self.closure), keys)
        return TreeInputs(self.ids, self.positions, slots)
