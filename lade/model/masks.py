"""Attention masks of a tree step, as each architecture wants them.

What a node may see is one boolean matrix: the cache, its ancestors and itself. Layers with a sliding window or with
chunks see less of it, counted in *positions*: two nodes at the same depth lie in different slots and equally far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lade.decoding.tree import TokenTree
from lade.model.attention_span import FULL, AttentionSpan
from lade.model.host_to_device import filled, upload
from lade.model.invariant_attention.placed_mask import PlacedMask
from lade.model.root_inputs import RootInputs
from lade.model.tree_attention.inputs import TreeInputs

Mask = torch.Tensor | None | dict[str, torch.Tensor | None]


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
        """Join one tree a row. All that is fed is appended after the longest row.

        Args:
            trees: one for each row; S is the largest number of nodes to feed.
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
        ids, depths = (filled(columns, held, step) for columns in ([t.ids for t in trees], [t.depths for t in trees]))
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
        """The same for a single row, which needs no padding."""
        before = length - held
        key_positions = np.arange(before + len(tree))
        positions = key_positions[before:]
        positions[:] = tree.depths
        positions += before
        allowed = np.ones((len(tree) - held, before + len(tree)), dtype=np.bool_)
        allowed[:, before:] = tree.closure()[held:]
        rows = (np.array(tree.ids[held:]), positions[held:], key_positions, allowed)
        return cls(*upload([array[None] for array in rows], device))

    def mask(self, span: AttentionSpan) -> torch.Tensor:
        """What each node may see of what is near enough, `[B, 1, S, K]` bool."""
        if span == FULL:
            return self.allowed[:, None]
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])
        return (self.allowed & near)[:, None]


@dataclass(frozen=True)
class MaskPlan:
    """How a model takes its masks.

    Attributes:
        spans: how far back the layers see, by layer type; None for those that take no mask, such as recurrent ones.
        by_layer_type: whether the model takes a dict of masks with these types as keys; otherwise it has one type only.
        additive: whether masks are added to the scores (eager attention) or boolean (SDPA).
        compact: whether its attention knows `TreeMask`.
        placed: whether its attention wants a `PlacedMask`.
        pads: whether nothing that stands behind a token reaches it, so that prompts may be padded there.
    """

    spans: Mapping[str, AttentionSpan | None]
    by_layer_type: bool
    additive: bool
    compact: bool = False
    placed: bool = False
    pads: bool = False

    @property
    def attends(self) -> bool:
        """Whether any layer takes a mask."""
        return any(span is not None for span in self.spans.values())

    def inputs(
        self,
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        device: torch.device,
        held: Sequence[int] | None = None,
    ) -> Inputs:
        """One step over one tree a row, see `StepInputs.of`.

        In a batch whose rows hold nodes these do not lie beside those fed, which a `TreeMask` cannot say: it gets
        dense masks, which all attention knows.
        """
        if self.compact and (len(trees) == 1 or not any(held or ())):
            return TreeInputs.of(trees, lengths, device, sum(held or ()))
        return StepInputs.of(trees, lengths, device, held)

    def masks(self, inputs: Inputs, dtype: torch.dtype) -> Mask:
        """Masks `[B, 1, S, K]` for one step; additive ones in `dtype`, the model's."""
        masks = {kind: None if span is None else self._shaped(inputs, span, dtype) for kind, span in self.spans.items()}
        return masks if self.by_layer_type else next(iter(masks.values()))

    def _shaped(self, inputs: Inputs, span: AttentionSpan, dtype: torch.dtype) -> torch.Tensor | None:
        allowed = inputs.mask(span)
        if allowed is None:
            return None
        if self.placed:
            return PlacedMask.of(allowed, inputs.key_positions)
        if not self.additive:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


Inputs = StepInputs | RootInputs | TreeInputs
"""Of one step: `ids`, `positions` and `key_positions`, and a `mask` for each span."""
