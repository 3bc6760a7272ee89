"""The cache of a generation: a user's own, borrowed and given back with the new tokens, or one at fixed addresses."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lade.model.cache import TreeCache, TreeLayer
from lade.model.graph_cache import GraphCache
from lade.model.graphs import GraphRunner
from lade.model.runner import EagerRunner

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


class GraphLoan:
    """A cache of captured passes, whose buffers are borrowed from the workspace of its model.

    Args:
        cache: the one to decode with.
        heir: gets what it holds in the end; None if nobody asks for that.
    """

    def __init__(self, cache: GraphCache, heir: TreeCache | None) -> None:
        self.cache, self._heir = cache, heir

    def give_back(self) -> None:
        """Let others have the buffers."""
        if self._heir is not None:
            self.cache.hand_over(self._heir)
        self.cache.reset()


def loan_for(runner: EagerRunner, given: Cache, tokens: int, *, handed_out: bool) -> Loan | GraphLoan:
    """The loan of one generation, with a cache of the runner's own kind.

    Args:
        runner: will fill it.
        given: the user's cache, or an empty `TreeCache` of our own.
        tokens: greatest length that a row is going to have.
        handed_out: whether somebody will be given `given` in the end.
    """
    if not isinstance(runner, GraphRunner) or not isinstance(given, TreeCache):
        return Loan(given)
    return GraphLoan(runner.new_cache(tokens=tokens), given if handed_out else None)


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
