"""The cache of a generation: a user's own, borrowed and given back with the new tokens, or one at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lade.model.cuda_graphs.fallback_cache import GraphCache
from lade.model.cuda_graphs.runner import GraphRunner
from lade.model.kv_cache import TreeCache, TreeLayer
from lade.model.runner import EagerRunner

LENDERS = (DynamicLayer, DynamicSlidingWindowLayer)


def can_lend(cache: Any) -> bool:
    """Whether a generation can begin with what this cache holds: ours, and dynamic ones on the model's device."""
    if isinstance(cache, TreeCache):
        return True
    return isinstance(cache, DynamicCache) and not cache.offloading and all(type(la) in LENDERS for la in cache.layers)


def why_unfit(cache: Cache, length: int) -> str:
    """Why plain decoding from a cache that passes `can_lend` cannot be repeated; empty where it can.

    Args:
        cache: the user's, for a single row.
        length: tokens of the prompt.
    """
    layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "is_initialized", False)]
    held = sorted({layer.get_seq_length() for layer in layers})
    rows = {len(layer.lengths) if isinstance(layer, TreeLayer) else layer.keys.shape[0] for layer in layers}
    if len(held) > 1:
        return f"its layers hold from {held[0]} to {held[-1]} tokens, as an interrupted pass leaves it: reset it"
    if held and held[0] >= length:
        return f"it holds {held[0]} tokens and the prompt has {length}, of which one at least has to be fed: crop it"
    if rows - {1}:
        return f"it holds {max(rows)} rows, and there is one prompt"
    return ""


class Loan:
    """The cache to decode with, and how the user's own gets what came in.

    Args:
        cache: the user's; a `TreeCache` is used as it is.
    """

    def __init__(self, cache: Cache) -> None:
        self._lender = cache
        self.cache = cache if isinstance(cache, TreeCache) else _borrowed(cache)
        self._borrowed_layers, self._borrowed_tokens = list(self.cache.layers), self.cache.get_seq_length()

    def give_back(self, tokens: int) -> None:
        """Let the user's cache hold the first tokens of the row, and none after them, which may be rejected guesses.

        Args:
            tokens: how many; every layer of the borrowed cache holds them.
        """
        if self._lender is self.cache:
            self.cache.crop_to(tokens)
        elif self._borrowed_layers and self.cache.layers[:1] != self._borrowed_layers[:1]:
            self._hand_over(0, tokens)  # the model has recomputed the text, with other frequencies
        else:
            self._hand_over(self._borrowed_tokens, tokens)

    def _hand_over(self, start: int, end: int) -> None:
        """Let the user's cache hold the borrowed one's tokens from `start` on, after those before."""
        with _all_or_nothing(self._lender):
            for index, layer in enumerate(self.cache.layers if end > start else ()):
                if not start and self._borrowed_tokens:
                    self._lender.layers[index].reset()
                keys, values = (_tensor(states)[:, :, start:end].clone() for states in (layer.keys, layer.values))
                self._lender.update(keys, values, index)


class GraphLoan:
    """A cache of captured passes, whose buffers are borrowed from the workspace of its model.

    Args:
        cache: the one to decode with.
        heir: gets what it holds in the end; None if nobody asks for that.
    """

    def __init__(self, cache: GraphCache, heir: TreeCache | None) -> None:
        self.cache, self._heir = cache, heir

    def give_back(self, tokens: int) -> None:
        """Release the buffers; where `tokens`, those of the row, are not 0, the heir gets what they hold."""
        if self._heir is not None and tokens:
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


@contextmanager
def _all_or_nothing(cache: Cache) -> Iterator[None]:
    """Restore a dynamic cache after an error, so that its layers never differ in length.

    Such a cache replaces its tensors and never writes to them, so references to the old ones suffice.
    """
    layers = list(cache.layers)
    before = [dict(vars(layer)) for layer in layers]
    try:
        yield
    except BaseException:
        cache.layers[:] = layers
        for layer, fields in zip(layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(fields)
        raise


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


def _tensor(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None
    return states
