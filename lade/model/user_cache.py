"""A user's own cache: whether a generation can start from it, and how it gets the new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from lade.model.cache_layers import TreeLayer
from lade.model.facts import CACHE_NAMES, ModelFacts
from lade.model.kv_cache import TreeCache

_INDEXED_LAYER: Any = getattr(cache_utils, "DynamicIndexedLayer", None)  # not in every version
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, _INDEXED_LAYER, StaticLayer, StaticSlidingWindowLayer)


def can_borrow(cache: Any) -> bool:
    """Whether a generation can start from what this cache holds: ours, and transformers' own on the model's device."""
    if isinstance(cache, TreeCache):
        return True
    ours = isinstance(cache, DynamicCache | StaticCache) and not cache.offloading
    return ours and all(type(layer) in _LAYERS for layer in cache.layers)


def lacks_indexer(cache: Any, facts: ModelFacts) -> bool:
    """Whether a user's cache has no place for what the indexers of the model keep; plain decoding fails with it."""
    if isinstance(cache, TreeCache) or not facts.indexers:
        return False
    return not any(hasattr(layer, "update_indexer") for layer in cache.layers)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments of `model.generate`; None for none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def begin_plainly(cache: Any, model: nn.Module) -> None:
    """Let plain decoding work on a user's cache: recurrent layers find their states in one of ours only if they are in.

    Args:
        cache: the user's; None for none.
        model: the model inside any wrapper.
    """
    recurrence = ModelFacts.of(model).recurrence if isinstance(cache, TreeCache) else None
    if recurrence is not None:
        if recurrence.forgets:  # what it holds would be left out, without a word
            cache.reset()
        if not cache.layers:
            cache.layers += recurrence.layers()
        cache.begin()


def why_unfit(cache: Cache, length: int, max_length: int) -> str:
    """Why plain decoding from a cache that passes `can_borrow` cannot be repeated; empty where it can.

    Args:
        cache: the user's, for a single row.
        length: tokens of the prompt.
        max_length: greatest length of the text.
    """
    slots = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    if slots and min(slots) < max_length - 1:  # the last token is not fed
        return f"it has slots for {min(slots)} tokens, and the text may get {max_length - 1}: make it larger"
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin) and layer.is_initialized]
    held = sorted({int(layer.get_seq_length()) for layer in layers})
    rows = {len(layer.lengths) if isinstance(layer, TreeLayer) else layer.keys.shape[0] for layer in layers}
    if len(held) > 1:
        return f"its layers hold from {held[0]} to {held[-1]} tokens, as an interrupted pass leaves it: reset it"
    if held and held[0] >= length:
        return f"it holds {held[0]} tokens and the prompt has {length}, of which one at least has to be fed: crop it"
    if rows - {1}:
        return f"it holds {max(rows)} rows, and there is one prompt"
    return ""


class BorrowedCache(TreeCache):
    """Begins with what a user's cache holds, and gives it back with the tokens that came after.

    Args:
        cache: the user's; it is left alone until `give_back`.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self._users_cache, self._borrowed_tokens = cache, int(cache.get_seq_length())
        layers: list[Any] = cache.layers if self._borrowed_tokens else []
        for number, layer in enumerate(layers):
            tokens = int(layer.get_seq_length())
            self.update(_full_length(layer.keys, tokens), _full_length(layer.values, tokens), number)
            if getattr(layer, "indexer_keys", None) is not None:
                self.update_indexer(layer.indexer_keys, number)
        self._borrowed_layers = self.layers[:1]

    def give_back(self, tokens: int) -> None:
        """Let the user's cache hold the first tokens of the row, and none after them, which may be rejected guesses.

        Args:
            tokens: number of tokens to keep; every layer of this cache holds them.
        """
        # Where the first layer is another one, the model has recomputed the text, with other frequencies.
        recomputed = bool(self._borrowed_layers) and self.layers[:1] != self._borrowed_layers
        start = 0 if recomputed else self._borrowed_tokens
        with _all_or_nothing(self._users_cache):
            for number, layer in enumerate(self.layers if tokens > start else ()):
                if not start and self._borrowed_tokens:
                    self._users_cache.layers[number].reset()
                assert layer.keys is not None and layer.values is not None
                keys, values = (states[:, :, start:tokens].clone() for states in (layer.keys, layer.values))
                self._users_cache.update(keys, values, number)
                if layer.indexer_keys is not None:
                    self._users_cache.update_indexer(layer.indexer_keys[:, 0, start:tokens].clone(), number)


def borrow(cache: Cache) -> TreeCache:
    """The cache to decode with, given a user's that passes `can_borrow`; a `TreeCache` is used as it is."""
    return cache if isinstance(cache, TreeCache) else BorrowedCache(cache)


@contextmanager
def _all_or_nothing(cache: Cache) -> Iterator[None]:
    """Restore a cache after an error, so that its layers never differ in length.

    A dynamic one replaces its tensors and never writes to them, so references to the old ones suffice. A static one
    writes: its length has to be copied, and its keys where they are moved along with a window.
    """
    layers = list(cache.layers)
    before = [_copied(layer) for layer in layers]
    try:
        yield
    except BaseException:
        cache.layers[:] = layers
        for layer, fields in zip(layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(fields)
        raise


def _copied(layer: Any) -> dict[str, Any]:
    """The attributes of a layer, those that it writes to copied."""
    copied = dict(vars(layer))
    written = ["cumulative_length"] if isinstance(layer, StaticLayer) else []
    if isinstance(layer, StaticSlidingWindowLayer) and layer.is_initialized:
        written += ["keys", "values"]
    for name in written:
        if isinstance(copied.get(name), torch.Tensor):
            copied[name] = copied[name].clone()
    return copied


def _full_length(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """States `[B, H, T, D]` of the last T tokens with zeros for those before, and nothing for slots after them.

    A layer with a sliding window has dropped them because no later token sees them, and our masks show them to none.
    """
    states = states[:, :, :tokens]
    return torch.nn.functional.pad(states, (0, 0, tokens - states.shape[2], 0))
