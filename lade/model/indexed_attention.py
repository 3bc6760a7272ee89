"""Attention whose keys an indexer picks (DeepSeek V3.2 and its kin): in a tree each node picks among what it sees.

The indexer's own keys lie in the cache as a third tensor, and its mask leaves out what a node may not see. What is left
is the order of the keys: many scores are exactly 0, and which of equal ones `topk` takes depends on where they lie and
on how many keys there are. So in a pass over trees the visible scores of each node are put side by side, as they lie in
plain decoding, before any are picked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lade.model.masks import StepInputs
from lade.model.thread_override import Override, overridden

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
