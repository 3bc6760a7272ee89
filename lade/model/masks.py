"""Attention masks of a tree step, by architecture: spans, layer types, indexed attention.

What a node may see is one boolean matrix: the cache, its ancestors and itself. Layers with a sliding window or with
chunks see less of it, counted in *positions*: two nodes at the same depth lie in different slots and equally far.

The indexer's own keys lie in the cache as a third tensor, and its mask leaves out what a node may not see. What is left
is the order of the keys: many scores are exactly 0, and which of equal ones `topk` takes depends on where they lie and
on how many keys there are. So in a pass over trees the visible scores of each node are put side by side, as they lie in
plain decoding, before any are picked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from lade.decoding.tree import TokenTree
from lade.model import joint
from lade.model.config import field, per_layer
from lade.model.inputs import FULL, AttentionSpan, chunked, filled, sliding, upload
from lade.model.thread_patches import Override, overridden

Mask = torch.Tensor | None | dict[str, torch.Tensor | None]

TREE_ATTENTION, INVARIANT_ATTENTION = "lade_tree", "lade_invariant"
"""Attention implementations of this package, by the names that transformers knows them by."""


class Inputs(Protocol):
    """Tensors of one step over B trees.

    Attributes:
        ids: `[B, S]` int64.
        positions: `[B, S]` int64.
        key_positions: `[B, K]` int64, position of every slot of the cache and of the step.
    """

    @property
    def ids(self) -> torch.Tensor:
        """`[B, S]`, see above."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """`[B, S]`, see above."""
        ...

    @property
    def key_positions(self) -> torch.Tensor:
        """`[B, K]`, see above."""
        ...

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """Return what each node may see, `[B, 1, S, K]` bool; None for everything."""
        ...


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
            found: Inputs = joint.load("tree_attention").inputs(trees, lengths, device, sum(held or ()))
            return found
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
            placed: torch.Tensor = joint.load("cpu").placed_mask(allowed, inputs.key_positions)
            return placed
        if not self.additive:
            return allowed
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Names of the layer type, today and in older versions of transformers."""


class KeyPicks:
    """Which keys the nodes of one step pick, given their scores.

    Args:
        inputs: of the step; K slots of the cache and of the step.
    """

    def __init__(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def patch(self, indexer: nn.Module) -> AbstractContextManager[Override]:
        """While the context lasts, the indexer picks as it would for each node's text alone, when this thread calls."""

        def own(forward: Callable[..., Any]) -> Callable[..., Any]:
            def picking(*args: Any, **kwargs: Any) -> Any:
                with _Picking(self):
                    return forward(*args, **kwargs)

            return picking

        return overridden(indexer, "forward", own)

    @cached_property
    def _order(self) -> torch.Tensor:
        """`[B, S, K]` int64, slots by their position; those that a node does not see come last."""
        last = self._inputs.key_positions.max() + 1
        positions = self._inputs.key_positions[:, None].expand(self._inputs.allowed.shape)
        return positions.masked_fill(~self._inputs.allowed, last).argsort(dim=-1)

    @cached_property
    def _visible(self) -> list[tuple[int, torch.Tensor]]:
        """Each number of visible keys, with the nodes `[B, S]` bool that see so many."""
        counts = self._inputs.allowed.sum(dim=-1)
        return [(number, counts == number) for number in counts.unique().tolist()]

    def best(self, scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and slots of the best keys, as `Tensor.topk` gives them for each node's text alone.

        Args:
            scores: `[B, S, K]`.
            k: how many to pick; of a node that sees fewer, the first one stands for those that are missing.

        Returns:
            Both `[B, S, k]`.
        """
        order = self._order.to(scores.device)
        slots = order[..., :1].expand(*order.shape[:2], k).clone()
        for number, nodes in self._visible:
            here, seen = nodes.to(scores.device), order[nodes.to(order.device)][:, :number]  # [N, number]
            if number > k:
                seen = seen.gather(-1, scores[here].gather(-1, seen).topk(k, dim=-1).indices)
            found = slots[here]
            found[:, : seen.shape[1]] = seen
            slots[here] = found
        return scores.gather(-1, slots), slots


class _Picking(TorchFunctionMode):
    """Answers `topk` for what runs inside."""

    def __init__(self, picks: KeyPicks) -> None:
        super().__init__()
        self._picks = picks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        return torch.return_types.topk(self._picks.best(*args[:2]))


SLIDING, CHUNKED, FULL_ATTENTION = "sliding_attention", "chunked_attention", "full_attention"
LAYER_TYPES = frozenset({SLIDING, CHUNKED, FULL_ATTENTION}) | INDEXED
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "moe", "mlp"})
"""Of models with recurrent layers; the last two hold nothing of the text."""
_WITHOUT_ATTENTION = RECURRENT_TYPES - {"hybrid"}
_FIELDS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}


def plan_for(config: PretrainedConfig, *, by_layer_type: bool) -> MaskPlan:
    """The masks of a model with this text config.

    Args:
        config: the text config.
        by_layer_type: whether the model takes a dict of masks, one for each layer type, or one mask for all layers.

    Raises:
        ValueError: layers that take the same mask see differently far; the message is the reason, as a
            phrase that continues "it ...".
    """
    spans: dict[str, AttentionSpan | None] = {}
    layers = _layers(config)
    if by_layer_type:
        for kind in sorted({kind for kind, _ in layers}):
            window = _only(window for each, window in layers if each == kind)
            seen = FULL if window is None else chunked(window) if kind == CHUNKED else sliding(window)
            spans[kind] = None if kind in RECURRENT_TYPES else seen
    else:
        # A model that knows of no layer types does not mask by them. But the cache of plain decoding goes by them, and
        # holds the last tokens only of a layer with a window or with chunks.
        window = _only(window for _, window in layers)
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


def window_too_short(config: PretrainedConfig) -> str:
    """The field and value of a window of fewer than two tokens; empty if there is none.

    The cache of plain decoding keeps the last `window - 1` tokens as `[-window + 1:]`, which for a window of 1 are all
    of them: prompts are masked, and what follows sees everything. Shorter ones fail.
    """
    for kind, window in _layers(config):
        if window is not None and window < 2:
            return f"{_FIELDS[kind]}={window}"
    return ""


def windows_of(config: PretrainedConfig) -> set[int]:
    """Lengths of the sliding windows and chunks of the layers."""
    return {window for _, window in _layers(config) if window is not None}


def _layers(config: PretrainedConfig) -> list[tuple[str, int | None]]:
    """Type and window of each layer, as transformers' own cache reads them."""
    pairs = list(zip(_lengths(config, _FIELDS[SLIDING]), _lengths(config, _FIELDS[CHUNKED]), strict=True))
    kinds = field(config, "layer_types") or [
        SLIDING if window is not None else CHUNKED if chunk is not None else FULL_ATTENTION for window, chunk in pairs
    ]
    windows = ({SLIDING: window, CHUNKED: chunk} for window, chunk in pairs)
    return [(kind, window.get(kind)) for kind, window in zip(kinds, windows, strict=False)]


def _lengths(config: PretrainedConfig, name: str) -> list[int | None]:
    return [length if isinstance(length, int) else None for length in per_layer(config, name)]


def _only(windows: Iterable[int | None]) -> int | None:
    found = set(windows)
    if len(found) > 1:
        raise ValueError(f"takes one mask for layers that see differently far ({sorted(map(str, found))})")
    return found.pop()
