"""Attention masks of a tree step, by architecture: spans and layer types.

The base mask is one boolean matrix: a node sees the cache, its ancestors and itself. Layers with a sliding window or
chunks see less, counted in *positions*: two nodes at the same depth are in different slots but equally far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from transformers import PretrainedConfig

from lade.decoding.tree import TokenTree
from lade.model.config import CHUNKED, FULL_ATTENTION, SLIDING, layer_windows
from lade.model.inputs import FULL, AttentionSpan, chunked, filled, sliding, upload
from lade.model.registry import Role

Mask = torch.Tensor | None | dict[str, torch.Tensor | None]

TREE_ATTENTION, INVARIANT_ATTENTION = "lade_tree", "lade_invariant"
"""Names under which this package registers its attention implementations with transformers."""


class Inputs(Protocol):
    """Tensors of one step over B trees.

    Attributes:
        ids: `[B, S]` int64.
        positions: `[B, S]` int64.
        key_positions: `[B, K]` int64, position of every slot of the cache and of the step.
    """

    @property
    def ids(self) -> torch.Tensor:
        """Token ids, `[B, S]`."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens, `[B, S]`."""
        ...

    @property
    def key_positions(self) -> torch.Tensor:
        """Position of every slot, `[B, K]`."""
        ...

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """Return the slots that each node may see, `[B, 1, S, K]` bool; None if it sees all."""
        ...


class _TreeMasks(Protocol):
    def inputs(self, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: int) -> Inputs: ...


class _PlacedMasks(Protocol):
    def placed_mask(self, allowed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...


TREE_MASKS: Role[_TreeMasks] = Role("tree masks")
PLACED_MASKS: Role[_PlacedMasks] = Role("placed masks")


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one step over B trees; S is the largest number of nodes to feed, K = max(P) + S.

    Attributes:
        ids: `[B, S]` int64; rows with fewer nodes are padded with copies of their root.
        positions: `[B, S]` int64.
        key_positions: `[B, K]` int64, position of every slot of the cache and of the step.
        allowed: `[B, S, K]` bool, the slots that each node may see.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor
    allowed: torch.Tensor

    @classmethod
    def of(
        cls, trees: Sequence[TokenTree], lengths: Sequence[int], device: torch.device, held: Sequence[int] | None = None
    ) -> StepInputs:
        """Combine one tree per row; the tokens fed are appended after the longest row.

        Args:
            trees: B trees; S is the largest number of nodes to feed.
            lengths: `[B]`, cached tokens of each row.
            device: device of the tensors.
            held: `[B]`, number of cached tokens, the last ones, that are the first nodes of the row's tree and are not
                fed again; None for zeros.
        """
        held = held or [0] * len(trees)
        if len(trees) == 1:
            return cls._of_single_row(trees[0], lengths[0], held[0], device)
        rows, first = len(trees), max(lengths)
        step = max(len(tree) - own for tree, own in zip(trees, held, strict=True))
        before = (np.array(lengths) - np.array(held))[:, None]  # [B, 1], tokens in front of the trees
        ids, depths = (filled(columns, held, step) for columns in ([t.ids for t in trees], [t.depths for t in trees]))
        positions = depths + before
        slots, nodes = np.arange(first), np.arange(step)
        key_positions = np.concatenate([np.broadcast_to(slots, (rows, first)), positions], axis=1)
        allowed = np.zeros((rows, step, first + step), dtype=np.bool_)
        allowed[:, :, :first] = (slots < before)[:, None]
        allowed[:, nodes, first + nodes] = True  # padding sees itself too, so that no softmax is empty
        for row, (tree, own) in enumerate(zip(trees, held, strict=True)):
            if len(tree) > 1:
                closure, size = tree.closure()[own:], len(tree) - own
                allowed[row, :size, first : first + size] = closure[:, own:]
                allowed[row, :size, lengths[row] - own : lengths[row]] = closure[:, :own]
                key_positions[row, lengths[row] - own : lengths[row]] = before[row] + tree.depths[:own]
        return cls(*upload((ids, positions, key_positions, allowed), device))

    @classmethod
    def _of_single_row(cls, tree: TokenTree, length: int, held: int, device: torch.device) -> StepInputs:
        """Build the tensors for a single row, which needs no padding."""
        before, size = length - held, len(tree)
        key_positions = np.arange(before + size)[None]
        positions = key_positions[:, before:]
        positions[:] = tree.depths
        positions += before
        allowed = np.ones((1, size - held, before + size), dtype=np.bool_)
        allowed[:, :, before:] = tree.closure()[held:]
        return cls(*upload((np.array([tree.ids[held:]]), positions[:, held:], key_positions, allowed), device))

    def mask(self, span: AttentionSpan) -> torch.Tensor:
        """Return the slots within `span` that each node may see, `[B, 1, S, K]` bool."""
        if span == FULL:
            return self.allowed[:, None]
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])
        return (self.allowed & near)[:, None]


@dataclass(frozen=True)
class MaskPlan:
    """The mask format of a model.

    Attributes:
        spans: attention span by layer type; None for layers without a mask, such as recurrent ones.
        by_layer_type: whether the model takes a dict of masks keyed by layer type; otherwise it has one type only.
        additive: whether masks are added to the scores (eager attention) or boolean (SDPA).
        compact: whether its attention takes a `TreeMask`.
        placed: whether its attention needs a `PlacedMask`.
        pads: whether no token affects those before it, so that prompts may be padded on the right.
    """

    spans: Mapping[str, AttentionSpan | None]
    by_layer_type: bool
    additive: bool
    compact: bool = False
    placed: bool = False
    pads: bool = False

    @cached_property
    def attends(self) -> bool:
        """True if any layer takes a mask."""
        return any(span is not None for span in self.spans.values())

    def inputs(
        self,
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        device: torch.device,
        held: Sequence[int] | None = None,
    ) -> Inputs:
        """Build the inputs of one step over one tree per row, see `StepInputs.of`.

        In a batch whose rows hold nodes, these are not adjacent to those fed, which a `TreeMask` cannot express: such
        steps use dense masks, which every attention implementation takes.
        """
        if self.compact and (len(trees) == 1 or not any(held or ())):
            return TREE_MASKS.load().inputs(trees, lengths, device, sum(held or ()))
        return StepInputs.of(trees, lengths, device, held)

    def masks(self, inputs: Inputs, dtype: torch.dtype) -> Mask:
        """Return the masks `[B, 1, S, K]` of one step; additive ones in `dtype`, the model's."""
        masks = {kind: None if span is None else self._shaped(inputs, span, dtype) for kind, span in self.spans.items()}
        return masks if self.by_layer_type else next(iter(masks.values()))

    def _shaped(self, inputs: Inputs, span: AttentionSpan, dtype: torch.dtype) -> torch.Tensor | None:
        allowed = inputs.mask(span)
        if allowed is None:
            return None
        if self.placed:
            return PLACED_MASKS.load().placed_mask(allowed, inputs.key_positions)
        if not self.additive:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Names of the layer type in current and older versions of transformers."""


LAYER_TYPES = frozenset({SLIDING, CHUNKED, FULL_ATTENTION}) | INDEXED
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "moe", "mlp"})
"""Layer types of models with recurrent layers; the last two keep no state."""
_WITHOUT_ATTENTION = RECURRENT_TYPES - {"hybrid"}


def plan_for(config: PretrainedConfig, *, by_layer_type: bool) -> MaskPlan:
    """Return the mask format of a model with this text config.

    Args:
        config: text config of the model.
        by_layer_type: whether the model takes a dict of masks, one per layer type, or one mask for all layers.

    Raises:
        ValueError: layers that share a mask have different spans; the message is the reason, a phrase to follow "it".
    """
    spans: dict[str, AttentionSpan | None] = {}
    layers = layer_windows(config)
    if by_layer_type:
        for kind in sorted({kind for kind, _ in layers}):
            window = _common_window(window for each, window in layers if each == kind)
            seen = FULL if window is None else chunked(window) if kind == CHUNKED else sliding(window)
            spans[kind] = None if kind in RECURRENT_TYPES else seen
    else:
        # A model without layer types in its masks does not mask by them. But transformers' cache follows them, and
        # keeps only the last tokens for a layer with a window or with chunks.
        window = _common_window(window for _, window in layers)
        attends = any(kind not in _WITHOUT_ATTENTION for kind, _ in layers)
        spans["attention"] = None if not attends else FULL if window is None else sliding(window)
    backend = config._attn_implementation
    return MaskPlan(
        spans,
        by_layer_type,
        additive=backend not in ("sdpa", TREE_ATTENTION, INVARIANT_ATTENTION),
        compact=backend == TREE_ATTENTION,
        placed=backend == INVARIANT_ATTENTION,
    )


def _common_window(windows: Iterable[int | None]) -> int | None:
    found = set(windows)
    if len(found) > 1:
        raise ValueError(f"takes one mask for layers with different windows ({sorted(map(str, found))})")
    return found.pop()
