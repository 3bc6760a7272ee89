"""Compact tree masks, and the inputs of a step for attention that reads them.

Models pass a 4-D mask on to their attention layers untouched. Attention that supports `TreeMask` needs none of its
entries; any torch operation gets the dense mask, which is then computed and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from lade.decoding.tree import TokenTree
from lade.model.inputs import AttentionSpan, filled, upload

WORD_BITS = 32


@dataclass(frozen=True)
class TreeSlots:
    """Slots of text and trees in the keys of a pass, and the ancestry of nodes; contiguous int32 on the device.

    Padding queries should copy the root: in a layer with a window, a position in the middle of the text would have that
    text read.
    """

    lengths: torch.Tensor  # [B], cached tokens of each row, in its first slots, at positions 0, 1, ...
    firsts: torch.Tensor  # [B], slot of each row's first node; no query sees the slots in between
    positions: torch.Tensor  # [B, S], of the queries
    node_positions: torch.Tensor  # [B, T], of all nodes of the tree, those fed now and those cached before
    ancestors: torch.Tensor  # [B, S, ceil(T / 32)]; bit t % 32 of word t // 32 is set where the query sees node t
    width: int  # K, number of slots of the keys

    def __post_init__(self) -> None:
        for name, tensor in vars(self).items():
            if isinstance(tensor, torch.Tensor) and not (tensor.dtype == torch.int32 and tensor.is_contiguous()):
                raise ValueError(f"{name} is {tensor.dtype} with strides {tensor.stride()}: give contiguous int32")

    def allowed(self, span: AttentionSpan) -> torch.Tensor:
        """Return the dense mask, `[B, S, K]` bool."""
        places, is_node = self._places()
        rows, step, _ = self.ancestors.shape
        words = self.ancestors.gather(2, (places // WORD_BITS)[:, None].expand(rows, step, -1))
        is_seen = (words >> (places % WORD_BITS)[:, None] & 1).bool() & is_node[:, None]
        is_text = self._slots() < self.lengths[:, None]
        return (is_seen | is_text[:, None]) & span(self.positions[:, :, None], self.key_positions()[:, None])

    def key_positions(self) -> torch.Tensor:
        """Return the position of every slot, `[B, K]`; arbitrary for slots that no query sees."""
        places, is_node = self._places()
        return torch.where(is_node, self.node_positions.gather(1, places), self._slots())

    def _slots(self) -> torch.Tensor:
        return torch.arange(self.width, device=self.lengths.device)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the node in every slot, `[B, K]`, and `[B, K]` bool, true where there is one."""
        nodes = self.node_positions.shape[1]
        places = self._slots() - self.firsts[:, None]
        return places.clamp(0, nodes - 1), (places >= 0) & (places < nodes)


class TreeMask(torch.Tensor):
    """Boolean mask `[B, 1, S, K]` of the nodes of trees: true where a query may see a key."""

    slots: TreeSlots  # shared by the masks of all layer types
    span: AttentionSpan  # window or chunk of the layers
    _dense: torch.Tensor | None

    @staticmethod
    def __new__(cls, slots: TreeSlots, span: AttentionSpan) -> TreeMask:  # noqa: D102
        rows, step = slots.positions.shape
        shape = (rows, 1, step, slots.width)
        mask: TreeMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=slots.positions.device
        )
        mask.slots, mask.span, mask._dense = slots, span, None
        return mask

    def __init__(self, slots: TreeSlots, span: AttentionSpan) -> None:
        super().__init__()

    def dense(self) -> torch.Tensor:
        """Return the mask as an ordinary tensor."""
        if self._dense is None:
            self._dense = self.slots.allowed(self.span)[:, None]
        return self._dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TreeMask({list(self.shape)}, {self.span})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(TreeMask, TreeMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack a closure `[B, S, T]` bool into the words of `TreeSlots.ancestors`, on its device."""
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % WORD_BITS)).unflatten(-1, (-1, WORD_BITS))
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    words: torch.Tensor = (padded.int() << places).sum(-1, dtype=torch.int32)
    return words


@dataclass(frozen=True)
class TreeInputs:
    """Tensors of one step over B trees; S is the number of nodes to feed in the largest one."""

    ids: torch.Tensor  # [B, S] int64; smaller trees are padded with copies of their root
    positions: torch.Tensor  # [B, S] int64
    slots: TreeSlots

    @classmethod
    def of(cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: int = 0) -> TreeInputs:
        """Batch one tree per row. Everything that is fed is appended after the longest row.

        Args:
            trees: one tree per row; T is the size of the largest one.
            lengths: `[B]`, cached tokens of each row.
            device: device of the tensors.
            held: number of cached tokens of a single row, the last ones, that are nodes of its tree; 0 for several
                rows.
        """
        nodes = max(map(len, trees))
        none = [0] * len(trees)
        ids, depths = (filled(each, none, nodes) for each in ([t.ids for t in trees], [t.depths for t in trees]))
        before = np.array(lengths) - held  # [B], tokens in front of the trees
        positions = depths + before[:, None]
        ancestors = np.zeros((len(trees), nodes, nodes), dtype=np.bool_)
        ancestors[:] = np.eye(nodes, dtype=np.bool_)  # all see themselves, so that no softmax is empty
        for row, tree in enumerate(trees):
            ancestors[row, : len(tree), : len(tree)] = tree.closure()
        words = pack_bits(torch.from_numpy(ancestors[:, held:])).numpy()
        small = (before, np.full_like(before, before.max()), positions)
        arrays = (ids[:, held:], positions[:, held:], *(array.astype(np.int32) for array in small), words)
        fed, places, starts, firsts, node_positions, bits = upload(arrays, device)
        queries = node_positions[:, held:]  # [B, S]
        return cls(fed, places, TreeSlots(starts, firsts, queries, node_positions, bits, int(before.max()) + nodes))

    @property
    def key_positions(self) -> torch.Tensor:
        """`[B, K]`, positions of every slot of the cache and of the step."""
        return self.slots.key_positions()

    def mask(self, span: AttentionSpan) -> TreeMask:
        """Return the mask of a layer type, `[B, 1, S, K]`: the ancestors of each node within the span."""
        return TreeMask(self.slots, span)
