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
    """Tensors of one step over B trees; S is the largest number of nodes to feed, K = max(P) + S.

    Attributes:
        ids: `[B, S]` int64; rows with fewer nodes are filled up with copies of their root.
        positions: `[B, S]` int64.
        key_positions: `[B, K]` int64, position of every slot of the cache and of the step.
        allowed: `[B, S, K]` bool, what each node may see.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def of(
        cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: Sequence[int] | None = None
    ) -> StepInputs:
        """Join one tree a row. All that is fed lies behind the longest row.

        Args:
            trees: S is the largest number of nodes to feed.
            lengths: `[B]`, cached tokens of each row.
            held: `[B]`, how many of these tokens, the last ones, are nodes of the row's tree (its first ones, which are
                not fed again); none unless given.
            device: where the tensors go.
        """
        held = held or [0] * len(trees)
        if len(trees) == 1:
            return cls._alone(trees[0], lengths[0], held[0], device)
        rows, first = len(trees), max(lengths)
        step = max(len(tree) - own for tree, own in zip(trees, held, strict=True))
        before = (np.array(lengths) - np.array(held))[:, None]  # [B, 1], tokens in front of the trees
        ids, depths = (_filled(columns, held, step) for columns in ([t.ids for t in trees], [t.depths for t in trees]))
        positions = depths + before
        slots, nodes = np.arange(first), np.arange(step)
        key_positions = np.concatenate([np.broadcast_to(slots, (rows, first)), positions], axis=1)
        allowed = np.zeros((rows, step, first + step), dtype=np.bool_)
        allowed[:, :, :first] = (slots < before)[:, None]
        allowed[:, nodes, first + nodes] = True  # all see themselves, padding too, so that no softmax is empty
        for row, (tree, own) in enumerate(zip(trees, held, strict=True)):
            if len(tree) > 1:
                closure, size = tree.closure()[own:], len(tree) - own
                allowed[row, :size, first : first + size] = closure[:, own:]
                allowed[row, :size, lengths[row] - own : lengths[row]] = closure[:, :own]
                key_positions[row, lengths[row] - own : lengths[row]] = before[row] + tree.depths[:own]
        return cls(*upload((ids, positions, key_positions, allowed), device))

    @classmethod
    def _alone(cls, tree: TokenTree, length: int, held: int, device: torch.device) -> StepInputs:
        """The same for a single row, where nothing needs filling up."""
        before = length - held
        key_positions = np.arange(before + len(tree))
        positions = key_positions[before:]
        positions[:] = tree.depths
        positions += before
        allowed = np.ones((len(tree) - held, before + len(tree)), dtype=np.bool_)
        allowed[:, before:] = tree.closure()[held:]
        rows = (np.array(tree.ids[held:]), positions[held:], key_positions, allowed)
        return cls(*upload([array[None] for array in rows], device))

    def within(self, reach: Reach) -> torch.Tensor:
        """What each node may see of what is near enough, `[B, S, K]` bool."""
        if reach is everything:
            return self.allowed
        return self.allowed & reach(self.positions[:, :, None], self.key_positions[:, None, :])


def _filled(columns: Sequence[list[int]], held: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Lists as rows `[B, length]`, without what is held of them; the shorter ones filled up with their first number."""
    rows = zip(columns, held, strict=True)
    return np.array([column[own:] + column[:1] * (length - len(column) + own) for column, own in rows], dtype=np.int64)


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
