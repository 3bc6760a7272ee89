"""A user's cache, borrowed for a generation: what it holds is used, and it is given back with the new tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lade.model.cache import TreeCache, TreeLayer

LENDERS = (DynamicLayer, DynamicSlidingWindowLayer)


def can_lend(cache: Any) -> bool:
    """Whether a generation can begin with what this cache holds: ours, and dynamic ones on the model's device."""
    if isinstance(cache, TreeCache):
        return True
    return isinstance(cache, DynamicCache) and not cache.offloading and all(type(la) in LENDERS for la in cache.layers)


class Loan:
    """The cache to decode with, and how the user's own gets what came in.

    Args:
        cache: the user's; a `TreeCache` is used as it is.
    """

    def __init__(self, cache: Cache) -> None:
        self._lender = cache
        self.cache = cache if isinstance(cache, TreeCache) else _borrowed(cache)
        self._borrowed_tokens = self.cache.get_seq_length()

    def give_back(self) -> None:
        """Append to the user's cache what it does not hold yet; with a `TreeCache` there is nothing to do."""
        if self._lender is self.cache:
            return
        start, end = self._borrowed_tokens, self.cache.get_seq_length()
        for index, layer in enumerate(self.cache.layers if end > start else ()):
            assert layer.keys is not None and layer.values is not None
            self._lender.update(layer.keys[:, :, start:end].clone(), layer.values[:, :, start:end].clone(), index)
        self._borrowed_tokens = end


def _borrowed(cache: Cache) -> TreeCache:
    borrowed = TreeCache()
    if not cache.get_seq_length():
        return borrowed
    layers: list[Any] = cache.layers
    for layer in layers:
        states = [_full_length(states, layer.get_seq_length()) for states in (layer.keys, layer.values)]
        borrowed.layers.append(TreeLayer())
        borrowed.layers[-1].update(*states)
    return borrowed


def _full_length(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """States `[B, H, T, D]` of the last T tokens with zeros for those before.

    A layer with a sliding window has dropped them because no later token sees them, and our masks show them to none.
    """
    return torch.nn.functional.pad(states, (0, 0, tokens - states.shape[2], 0))
