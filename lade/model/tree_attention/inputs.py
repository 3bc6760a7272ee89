"""A step over trees for attention that knows `TreeMask`: no mask over the cached tokens, however many they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lade.decoding.tree import TokenTree
from lade.model.attention_span import AttentionSpan
from lade.model.host_to_device import filled, upload
from lade.model.tree_attention.tree_mask import TreeMask, TreeSlots, words_of


@dataclass(frozen=True)
class TreeInputs:
    """Tensors of one step over B trees; S is the number of nodes to feed in the largest one.

    Attributes:
        ids: `[B, S]` int64; rows with a smaller tree are filled up with copies of their root.
        positions: `[B, S]` int64.
        slots: where text and trees lie.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: TreeSlots

    @classmethod
    def of(cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: int = 0) -> TreeInputs:
        """Join one tree a row. All that is fed is appended after the longest row.

        Args:
            trees: T is the size of the largest one.
            lengths: `[B]`, cached tokens of each row.
            device: where the tensors go.
            held: how many of these tokens, the last ones, are nodes of the tree, where there is but one row: its text
                ends where they begin. Of several rows none has any.
        """
        nodes = max(map(len, trees))
        none = [0] * len(trees)
        ids, depths = (filled(each, none, nodes) for each in ([t.ids for t in trees], [t.depths for t in trees]))
        before = np.array(lengths) - held  # [B], tokens in front of the trees
        positions = depths + before[:, None]
        ancestors = np.zeros((len(trees), nodes, nodes), dtype=np.bool_)
        ancestors[:] = np.eye(nodes, dtype=np.bool_)  # all see themselves, filling too, so that no softmax is empty
        for row, tree in enumerate(trees):
            ancestors[row, : len(tree), : len(tree)] = tree.closure()
        words = words_of(torch.from_numpy(ancestors[:, held:])).numpy()
        small = (before, np.full_like(before, before.max()), positions)
        arrays = (ids[:, held:], positions[:, held:], *(array.astype(np.int32) for array in small), words)
        fed, places, starts, firsts, node_positions, bits = upload(arrays, device)
        queries = node_positions[:, held:]  # [B, S]
        return cls(fed, places, TreeSlots(starts, firsts, queries, node_positions, bits, int(before.max()) + nodes))

    @property
    def key_positions(self) -> torch.Tensor:
        """`[B, K]`, position of every slot of the cache and of the step."""
        return self.slots.key_positions()

    def mask(self, span: AttentionSpan) -> TreeMask:
        """What each node may see of what is near enough, `[B, 1, S, K]`."""
        return TreeMask(self.slots, span)
