"""Caches as users know them: one of their own, continued and given back, and those that output objects carry."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, cache_utils
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
from lade.model.facts import CACHE, ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.prepared import USER_CACHES, Prepared

_INDEXED_LAYER: Any = getattr(cache_utils, "DynamicIndexedLayer", None)  # missing in older versions
_OF_TEXT = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, _INDEXED_LAYER, StaticLayer, StaticSlidingWindowLayer)


def can_borrow(cache: Any) -> bool:
    """Return whether a generation can continue this cache: a `TreeCache`, or transformers' own without offloading."""
    if isinstance(cache, TreeCache):
        return True
    is_known = isinstance(cache, DynamicCache | StaticCache) and not cache.offloading
    return is_known and all(type(layer) in _LAYERS for layer in cache.layers)


def lacks_indexer(cache: Any, facts: ModelFacts) -> bool:
    """Return whether a user's cache cannot hold the indexer keys of the model; plain decoding fails with it too."""
    if isinstance(cache, TreeCache) or not facts.indexers:
        return False
    return not any(hasattr(layer, "update_indexer") for layer in cache.layers)


def prepare_for_plain(cache: Any, model: nn.Module) -> None:
    """Prepare a user's cache for plain decoding: a `TreeCache` needs the recurrent layers of the model added."""
    recurrence = ModelFacts.of(model).recurrence if isinstance(cache, TreeCache) else None
    if recurrence is not None:
        if recurrence.forgets:  # its content would be ignored silently
            cache.reset()
        if not cache.layers:
            cache.layers += recurrence.layers()
        cache.begin()


def unfit_reason(cache: Cache, length: int, max_length: int) -> str:
    """Return the reason why a cache that passes `can_borrow` does not fit the generation; empty if it does.

    The generation has one row, with a prompt of `length` tokens, and at most `max_length` with the prompt included.
    """
    slots = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    if slots and min(slots) < max_length - 1:  # the last token is not fed
        return f"it has slots for {min(slots)} tokens, and the text may need {max_length - 1}: make it larger"
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin) and layer.is_initialized]
    held = sorted({int(layer.get_seq_length()) for layer in layers})
    rows = {len(layer.lengths) if isinstance(layer, TreeLayer) else layer.keys.shape[0] for layer in layers}
    if len(held) > 1:
        return f"its layers hold from {held[0]} to {held[-1]} tokens, as after an interrupted pass: reset it"
    if held and held[0] >= length:
        return f"it holds {held[0]} tokens and the prompt has {length}, at least one of which must be fed: crop it"
    if rows - {1}:
        return f"it holds {max(rows)} rows, and there is one prompt"
    return ""


class BorrowedCache(TreeCache):
    """Starts with the content of a user's cache, which is unchanged until `give_back` adds the new tokens."""

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
        """Append the new tokens to the user's cache, up to `tokens` in all, without rejected drafts after them."""
        # If the first layer was replaced, the model has recomputed the text, with other frequencies.
        recomputed = bool(self._borrowed_layers) and self.layers[:1] != self._borrowed_layers
        start = 0 if recomputed else self._borrowed_tokens
        with _all_or_nothing(self._users_cache):
            if not start and self._borrowed_tokens and tokens:
                for layer in self._users_cache.layers:
                    layer.reset()
            if tokens > start:
                fill(self._users_cache, self, start, tokens)


def fill(cache: Cache, source: TreeCache, start: int = 0, end: int | None = None) -> None:
    """Append tokens of another cache, from `start` to before `end`; None for all, of rows of one length."""
    rows = len(source.lengths)
    for number, layer in enumerate(source.attending):
        assert layer.keys is not None and layer.values is not None
        end = layer.get_seq_length() if end is None else end
        keys, values = (states[:rows, :, start:end].clone() for states in (layer.keys, layer.values))
        cache.update(keys, values, number)
        if layer.indexer_keys is not None:
            cache.update_indexer(layer.indexer_keys[:rows, 0, start:end].clone(), number)


@contextmanager
def _all_or_nothing(cache: Cache) -> Iterator[None]:
    """Restore a cache after an error, so that its layers never differ in length.

    A dynamic cache replaces its tensors and never writes to them, so references to the old ones suffice. A static one
    writes in place: its length has to be copied, and its keys if they are shifted along with a window.
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
    """Return the attributes of a layer, with copies of those that it writes to."""
    copied = dict(vars(layer))
    written = ["cumulative_length"] if isinstance(layer, StaticLayer) else []
    if isinstance(layer, StaticSlidingWindowLayer) and layer.is_initialized:
        written += ["keys", "values"]
    for name in written:
        if isinstance(copied.get(name), torch.Tensor):
            copied[name] = copied[name].clone()
    return copied


def _full_length(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return states `[B, H, T, D]` of the last T tokens with zeros for those before, without slots after them.

    A layer with a sliding window has dropped the first tokens because no later token sees them; our masks hide them.
    """
    states = states[:, :, :tokens]
    return torch.nn.functional.pad(states, (0, 0, tokens - states.shape[2], 0))


def output_cache(prepared: Prepared, ids: torch.Tensor, ours: Cache | None) -> Cache | None:
    """Return the cache of an output object: the user's, or one as transformers has made it, with the keys of ours.

    Rows of ours are of one length. Without ours, in a batch, a pass over its texts fills it when it is read: plain
    decoding has padding in it, and what it feeds to rows that have ended before others. None for batches with media
    inputs. The ids `[B, L]` are those that `model.generate` returns.
    """
    if ours is not None:
        if (made := prepared.output_cache) is None:
            return ours
        assert isinstance(ours, TreeCache)
        fill(made, ours)
        return made
    if prepared.output_cache is None or prepared.model_kwargs.keys() - {prepared.cache_name, *_OF_TEXT}:
        return None
    given = prepared.model_kwargs.get("attention_mask")
    mask = torch.ones_like(prepared.input_ids) if given is None else given
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    kind = prepared.generation_config.cache_implementation
    cache: Any = UnreadCache(partial(_cache_after, prepared.model, kind, ids[:, :-1], mask[:, :-1]))
    return cache  # type: ignore[no-any-return]


def _cache_after(model: Any, kind: str | None, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
    """Return the cache of plain decoding after it was fed these texts, `[B, L]` with their mask."""
    asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "pad_token_id": 0, "cache_implementation": kind}
    stand_in = copy.copy(model)  # without the model's own settings, such as beams and stop strings
    stand_in.generation_config = GenerationConfig(**asked)
    cache: Cache = type(model).generate(stand_in, ids, attention_mask=mask)[CACHE]
    return cache


class UnreadCache(DynamicCache):
    """A cache that is filled when it is first read, and is of transformers' kind from then on."""

    def __init__(self, fill: Callable[[], Cache]) -> None:
        self._fill = fill

    def __getattr__(self, name: str) -> Any:
        if "_fill" not in vars(self) or name.startswith("__"):
            raise AttributeError(name)
        self._read()
        return getattr(self, name)

    def _read(self) -> None:
        made = vars(self).pop("_fill")()
        vars(self).update(vars(made))
        self.__class__ = type(made)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle what it becomes."""
        self._read()
        return self.__reduce_ex__(protocol)


class UserCacheBackend:
    """A user's own KV cache, see `lade.model.registry`."""

    can_borrow = staticmethod(can_borrow)
    lacks_indexer = staticmethod(lacks_indexer)
    unfit_reason = staticmethod(unfit_reason)
    prepare_for_plain = staticmethod(prepare_for_plain)
    borrow = BorrowedCache
    fill = staticmethod(fill)
    output_cache = staticmethod(output_cache)


USER_CACHES.fill(UserCacheBackend())
