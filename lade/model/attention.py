"""Attention masks of a tree step, as each architecture wants them.

What a node may see is one boolean matrix: the cache, its ancestors and itself. Layers with a sliding window or with
chunks see less of it, counted in *positions*: two nodes at the same depth lie in different slots and equally far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lade.decoding.tree import TokenTree
from lade.model.staging import upload

Mask = torch.Tensor | dict[str, torch.Tensor]
Reach = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(query positions `[B, S, 1]`, key positions `[B, 1, K]`) -> bool `[B, S, K]`: is the key near enough?"""


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one step over B trees; S is the largest tree's size, K = max(P) + S.

    Attributes:
        ids: `[B, S]` int64; rows with a smaller tree are filled up with copies of their root.
        positions: `[B, S]` int64.
        key_positions: `[B, K]` int64, position of every slot of the cache and of the step.
        allowed: `[B, S, K]` bool, what each node may see.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def of(cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device) -> StepInputs:
        """Join one tree a row; row b has `lengths[b]` cached tokens. All nodes lie behind the longest row's."""
        if len(trees) == 1:
            return cls.rest(trees[0], 0, lengths[0], device)
        rows, step, first = len(trees), max(map(len, trees)), max(lengths)
        cached = np.array(lengths)[:, None]  # [B, 1]
        ids, depths = (_filled(columns, step) for columns in ([t.ids for t in trees], [t.depths for t in trees]))
        positions = depths + cached
        slots = np.arange(first)
        key_positions = np.concatenate([np.broadcast_to(slots, (rows, first)), positions], axis=1)
        allowed = np.zeros((rows, step, first + step), dtype=np.bool_)
        allowed[:, :, :first] = (slots < cached)[:, None]
        allowed[:, :, first] = True  # all see the root, padding too, so that no softmax is empty
        for row, tree in enumerate(trees):
            if (size := len(tree)) > 1:
                allowed[row, :size, first : first + size] = tree.closure()
        return cls(*upload((ids, positions, key_positions, allowed), device))

    @classmethod
    def rest(cls, tree: TokenTree, cached: int, length: int, device: torch.device) -> StepInputs:
        """The nodes of one tree from number `cached` on; those before are the last of `length` cached tokens.

        Here S is the number of nodes to feed, and K = length + S.
        """
        before = length - cached  # tokens in front of the tree
        key_positions = np.arange(before + len(tree))
        positions = key_positions[before:]
        positions[:] = tree.depths
        positions += before
        allowed = np.ones((len(tree) - cached, before + len(tree)), dtype=np.bool_)
        allowed[:, before:] = tree.closure()[cached:]
        rows = (np.array(tree.ids[cached:]), positions[cached:], key_positions, allowed)
        return cls(*upload([array[None] for array in rows], device))

    def within(self, reach: Reach) -> torch.Tensor:
        """What each node may see of what is near enough, `[B, S, K]` bool."""
        if reach is everything:
            return self.allowed
        return self.allowed & reach(self.positions[:, :, None], self.key_positions[:, None, :])


def _filled(columns: Sequence[list[int]], length: int) -> npt.NDArray[np.int64]:
    """Lists as rows `[B, length]`, the shorter ones filled up with their first number."""
    return np.array([column + column[:1] * (length - len(column)) for column in columns])


def everything(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Full attention: no key is too far."""
    return torch.ones(1, 1, 1, dtype=torch.bool, device=query.device)


def sliding(window: int) -> Reach:
    """The last `window` positions, the query's own included."""
    return lambda query, key: query - key < window


def chunked(size: int) -> Reach:
    """The positions of the query's own chunk."""
    return lambda query, key: query // size == key // size


@dataclass(frozen=True)
class MaskPlan:
    """How a model takes its masks.

    Attributes:
        reaches: what its layers see, by layer type.
        by_layer_type: whether the model takes a dict of masks with these types as keys; otherwise it has one type only.
        additive: whether masks are added to the scores (eager attention) or boolean (SDPA).
    """

    reaches: Mapping[str, Reach]
    by_layer_type: bool
    additive: bool

    def masks(self, inputs: StepInputs, dtype: torch.dtype) -> Mask:
        """Masks `[B, 1, S, K]` for one step; additive ones in `dtype`, the model's."""
        masks = {kind: self._shape(inputs.within(reach), dtype) for kind, reach in self.reaches.items()}
        return masks if self.by_layer_type else next(iter(masks.values()))

    def _shape(self, allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        allowed = allowed[:, None]  # [B, 1, S, K]
        if not self.additive:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)
