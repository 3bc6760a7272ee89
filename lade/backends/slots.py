"""Patches for models that use cache slots where a tree needs positions.

In plain decoding a token's slot in the cache equals its position. In a tree several nodes share a position but have
different slots, so every computation on slots is patched to use positions during a pass:

- ALiBi biases (bloom) grow with the key's slot;
- the attention temperature of layers without rotary embedding (llama4) grows with the query's slot;
- indexers (DeepSeek V3.2) select keys by slot. Their keys are a third tensor in the cache, and their mask hides the
  keys that a node may not see. What remains is the order of keys: many scores are exactly 0, and which of several ties
  `topk` selects depends on their order and number. So in a pass over trees the visible scores of each node are first
  arranged as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lade.errors import UnsupportedModelError
from lade.model.config import field
from lade.model.facts import ModelFacts
from lade.model.inputs import INDEXED, Inputs, StepInputs
from lade.model.module_changes import Override, hooked, overridden
from lade.model.runner import SLOTS


class SlotPatches:
    """Patches the parts of one model that use slots."""

    _enough: Callable[[Iterable[object]], bool] = staticmethod(any)  # of the parts have to be called

    def __init__(self, facts: ModelFacts) -> None:
        self._alibi = facts.model.base_model if facts.has_alibi else None
        layers = facts.having("attn_temperature_tuning") if _has_temperature(facts) else ()
        self._tempered = [layer for layer in layers if layer.attn_temperature_tuning and not layer.use_rope]
        self._indexers = facts.indexers

    def __bool__(self) -> bool:
        """Return whether the model needs patches."""
        return self._alibi is not None or bool(self._tempered) or bool(self._indexers)

    @contextmanager
    def patched_for(self, inputs: Inputs) -> Iterator[None]:
        """Patch calls by this thread, while the context lasts, to use the positions in `inputs`.

        Raises:
            UnsupportedModelError: the patched parts were not called, or not by this thread.
        """
        with ExitStack() as stack:
            overrides = [stack.enter_context(patch) for patch in self._patches(inputs)]
            yield
            if not self._enough(override.used for override in overrides):
                raise UnsupportedModelError(
                    "its layers were not called from the decoding thread, so they did not see a tree's positions",
                    "call the model directly, or use plain model.generate",
                )

    def _patches(self, inputs: Inputs) -> list[AbstractContextManager[Override]]:
        patches = list[AbstractContextManager[Override]]()
        patches += [_tempered_by_position(layer, inputs) for layer in self._tempered]
        if self._alibi is not None:
            patches.append(_biased_by_position(self._alibi, inputs.key_positions))
        if self._indexers:
            assert isinstance(inputs, StepInputs)
            patches += map(KeyPicks(inputs).patch, self._indexers)
        return patches


def padding_matters_from(facts: ModelFacts) -> int | None:
    """Return the text length from which plain decoding depends on left padding; None if it never does."""
    config: Any = facts.text_config
    if _has_temperature(facts):
        return int(config.floor_scale)
    if not INDEXED.isdisjoint(field(config, "layer_types") or ()):  # how ties are broken depends on the slots
        return int(config.index_topk) + 1
    return None


def _has_temperature(facts: ModelFacts) -> bool:
    return bool(getattr(facts.text_config, "attn_temperature_tuning", False))


def _biased_by_position(decoder: Any, key_positions: torch.Tensor) -> AbstractContextManager[Override]:
    def own(build: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def build_alibi_tensor(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
            ones = torch.ones_like(key_positions)  # one per slot suffices: no position exceeds its slot
            by_position = build(ones, num_heads, dtype)  # [B * heads, 1, positions]
            columns = key_positions.repeat_interleave(num_heads, dim=0)[:, None]  # [B * heads, 1, K]
            return by_position.gather(2, columns)

        return build_alibi_tensor

    return overridden(decoder, "build_alibi_tensor", own)


@contextmanager
def _tempered_by_position(layer: Any, inputs: Inputs) -> Iterator[Override]:
    """Scale queries by position: the layer's own scaling is switched off, and its query projection scaled instead."""
    positions = inputs.positions.float()
    factor = torch.log1p(torch.floor((positions + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
    factor = factor[..., None]  # [B, S, 1]

    def multiply(output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = output * factor.to(output.device)
        return scaled.to(output.dtype)

    with hooked(layer.q_proj, after=multiply), overridden(layer, "attn_temperature_tuning", lambda _: False) as flag:
        yield flag


class KeyPicks(TorchFunctionMode):
    """The keys that indexers select for the nodes of one step: replaces `topk` in the code inside."""

    def __init__(self, inputs: StepInputs) -> None:
        super().__init__()
        self._inputs = inputs

    def patch(self, indexer: nn.Module) -> AbstractContextManager[Override]:
        """Patch an indexer for this thread, while the context lasts, to select keys as for each node's text alone."""

        def own(forward: Callable[..., Any]) -> Callable[..., Any]:
            def picking(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return forward(*args, **kwargs)

            return picking

        return overridden(indexer, "forward", own)

    @cached_property
    def _order(self) -> torch.Tensor:
        """Slots in the order of their positions, `[B, S, K]` int64; those hidden from a node come last."""
        last = self._inputs.key_positions.max() + 1
        positions = self._inputs.key_positions[:, None].expand(self._inputs.allowed.shape)
        return positions.masked_fill(~self._inputs.allowed, last).argsort(dim=-1)

    @cached_property
    def _visible(self) -> list[tuple[int, torch.Tensor]]:
        """Each number of visible keys, with a mask `[B, S]` of the nodes that see that many."""
        counts = self._inputs.allowed.sum(dim=-1)
        return [(number, counts == number) for number in counts.unique().tolist()]

    def best(self, scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and slots `[B, S, k]` of the top keys, as `Tensor.topk` gives them for each node's text alone.

        The indexer's scores are `[B, S, K]`. Where a node sees fewer than k keys, its first one fills the rest.
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        return torch.return_types.topk(self.best(*args[:2]))


class SlotsBackend:
    """Layers that compute with cache slots, see `lade.model.registry`."""

    padding_matters_from = staticmethod(padding_matters_from)

    def patches(self, facts: ModelFacts) -> SlotPatches | None:
        """Return the patches for a model; None if no part of it needs any."""
        return SlotPatches(facts) or None


SLOTS.fill(SlotsBackend())
