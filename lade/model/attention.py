"""Attention masks of a tree step, as each architecture wants them.

What a node may see is one boolean matrix: the cache, its ancestors and itself. Layers with a sliding window or with
chunks see less of it, counted in *positions*: two nodes at the same depth lie in different slots and equally far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lade.decoding.tree import TokenTree
from lade.model.reach import Reach, everything
from lade.model.tree_mask import WORD_BITS, TreeMask, TreeSlots

Mask = torch.Tensor | dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one step over B trees; S is the number of nodes to feed in the largest one, K that of all slots.

    Attributes:
        ids: `[B, S]` int64; rows with a smaller tree are filled up with copies of their root.
        positions: `[B, S]` int64.
        lengths: `[B]`, cached tokens of each row in front of its tree.
        first: the slot where all trees begin; it lies behind the text of the longest row.
        node_positions: `[B, T]` int64, of all nodes of a tree, those fed and those cached before; K = first + T.
        ancestors: `[B, S, T]` bool, which nodes each one sees.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    lengths: Sequence[int]
    first: int
    node_positions: npt.NDArray[np.int64]
    ancestors: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device) -> StepInputs:
        """Join one tree a row; row b has `lengths[b]` cached tokens. All nodes lie behind the longest row's."""
        if len(trees) == 1:
            return cls.rest(trees[0], 0, lengths[0], device)
        rows, step = len(trees), max(map(len, trees))
        ids, depths = (_filled(columns, step) for columns in ([t.ids for t in trees], [t.depths for t in trees]))
        positions = depths + np.array(lengths)[:, None]
        ancestors = np.zeros((rows, step, step), dtype=np.bool_)
        ancestors[:, :, 0] = True  # all see the root, padding too, so that no softmax is empty
        for row, tree in enumerate(trees):
            if (size := len(tree)) > 1:
                ancestors[row, :size, :size] = tree.closure()
        return cls(_on(device, ids), _on(device, positions), tuple(lengths), max(lengths), positions, ancestors)

    @classmethod
    def rest(cls, tree: TokenTree, cached: int, length: int, device: torch.device) -> StepInputs:
        """The nodes of one tree from number `cached` on; those before are the last of `length` cached tokens.

        Here S is the number of nodes to feed, and K = length + S.
        """
        before = length - cached  # tokens in front of the tree
        positions = np.array([tree.depths])
        positions += before
        ids = np.array([tree.ids[cached:]])
        ancestors = tree.closure()[None, cached:]
        return cls(_on(device, ids), _on(device, positions[:, cached:]), (before,), before, positions, ancestors)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.ids.device

    @cached_property
    def key_positions(self) -> torch.Tensor:
        """`[B, K]` int64, position of every slot of the cache and of the step."""
        rows, nodes = self.node_positions.shape
        positions = np.empty((rows, self.first + nodes), dtype=np.int64)
        positions[:, : self.first] = np.arange(self.first)
        positions[:, self.first :] = self.node_positions
        return _on(self.device, positions)

    @cached_property
    def allowed(self) -> torch.Tensor:
        """`[B, S, K]` bool, what each node may see."""
        rows, step, nodes = self.ancestors.shape
        allowed = np.ones((rows, step, self.first + nodes), dtype=np.bool_)
        if rows > 1:
            allowed[:, :, : self.first] = (np.arange(self.first) < np.array(self.lengths)[:, None])[:, None]
        allowed[:, :, self.first :] = self.ancestors
        return _on(self.device, allowed)

    def within(self, reach: Reach) -> torch.Tensor:
        """What each node may see of what is near enough, `[B, S, K]` bool."""
        if reach == everything:
            return self.allowed
        return self.allowed & reach(self.positions[:, :, None], self.key_positions[:, None, :])

    @cached_property
    def slots(self) -> TreeSlots:
        """The same in a few words for each node, whatever K is."""
        rows, _, nodes = self.ancestors.shape
        return TreeSlots(
            lengths=_on(self.device, np.array(self.lengths, dtype=np.int32)),
            firsts=_on(self.device, np.full(rows, self.first, dtype=np.int32)),
            positions=self.positions.int(),
            node_positions=_on(self.device, self.node_positions.astype(np.int32)),
            ancestors=_on(self.device, _words(self.ancestors)),
            width=self.first + nodes,
        )


def _filled(columns: Sequence[list[int]], length: int) -> npt.NDArray[np.int64]:
    """Lists as rows `[B, length]`, the shorter ones filled up with their first number."""
    return np.array([column + column[:1] * (length - len(column)) for column in columns])


def _on(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)  # where there is nothing to do, asking takes time too


def _words(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Pack the last dimension, `T` bits, into `ceil(T / 32)` words, the lowest bit first."""
    padding = -bits.shape[-1] % WORD_BITS
    packed = np.packbits(np.pad(bits, ((0, 0), (0, 0), (0, padding))), axis=-1, bitorder="little")
    return packed.view("<i4")


@dataclass(frozen=True)
class MaskPlan:
    """How a model takes its masks.

    Attributes:
        reaches: what its layers see, by layer type.
        by_layer_type: whether the model takes a dict of masks with these types as keys; otherwise it has one type only.
        additive: whether masks are added to the scores (eager attention) or boolean (SDPA).
        compact: whether masks are `TreeMask`s, for attention that knows them.
    """

    reaches: Mapping[str, Reach]
    by_layer_type: bool
    additive: bool
    compact: bool = False

    def masks(self, inputs: StepInputs, dtype: torch.dtype) -> Mask:
        """Masks `[B, 1, S, K]` for one step; additive ones in `dtype`, the model's."""
        if self.compact:
            masks: dict[str, torch.Tensor] = {
                kind: TreeMask(inputs.slots, reach) for kind, reach in self.reaches.items()
            }
        else:
            masks = {kind: self._shape(inputs.within(reach), dtype) for kind, reach in self.reaches.items()}
        return masks if self.by_layer_type else next(iter(masks.values()))

    def _shape(self, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        allowed = allowed[:, None]  # [B, 1, S, K]
        if not self.additive:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)
