"""Patches for models that use cache slots where a tree needs positions.

In plain decoding a token's slot in the cache equals its position. In a tree several nodes share a position but have
different slots, so every computation on slots is patched to use positions during a pass:

- ALiBi biases (bloom) grow with the key's slot;
- the attention temperature of layers without rotary embedding (llama4) grows with the query's slot;
- indexers (DeepSeek V3.2) select keys by slot, see `lade.model.masks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig

from lade.errors import UnsupportedModelError
from lade.model.config import Positions, field
from lade.model.facts import ModelFacts
from lade.model.masks import INDEXED, Inputs, KeyPicks, StepInputs
from lade.model.thread_patches import Override, hooked, overridden


class SlotPatches:
    """Patches the parts of one model that use slots; most models have none."""

    def __init__(self, facts: ModelFacts) -> None:
        model = facts.model
        self._alibi = model.base_model if hasattr(model.base_model, "build_alibi_tensor") else None
        tempered = _has_temperature(facts.text_config)
        layers = facts.having("attn_temperature_tuning") if tempered else ()
        self._tempered = [layer for layer in layers if _scales_queries(layer)]
        self._indexers = facts.indexers

    @property
    def picked_keys(self) -> int | None:
        """Number of keys that an indexer selects for a token; None without indexers."""
        return min((indexer.index_topk for indexer in self._indexers), default=None)

    def __bool__(self) -> bool:
        """Return whether the model needs patches."""
        return self._alibi is not None or bool(self._tempered) or bool(self._indexers)

    @contextmanager
    def patched_for(self, inputs: Inputs) -> Iterator[None]:
        """Patch calls by this thread, while the context lasts, to use the positions in `inputs`.

        Raises:
            UnsupportedModelError: the patched parts were not called, or not by this thread.
        """
        if not self:
            yield
            return
        with ExitStack() as stack:
            overrides = [stack.enter_context(_tempered_by_position(layer, inputs)) for layer in self._tempered]
            if self._alibi is not None:
                overrides.append(stack.enter_context(_biased_by_position(self._alibi, inputs.key_positions)))
            if self._indexers:
                assert isinstance(inputs, StepInputs)
                picks = KeyPicks(inputs)
                overrides += [stack.enter_context(picks.patch(indexer)) for indexer in self._indexers]
            yield
            if not any(override.used for override in overrides):
                raise UnsupportedModelError(
                    "its layers were not called by the thread that decodes, and do not see a tree's positions",
                    "call the model without the wrapper, or use plain model.generate",
                )


def padding_matters_from(config: PretrainedConfig) -> int | None:
    """Return the text length from which plain decoding depends on left padding; None if it never does."""
    if _has_temperature(config):
        return int(config.floor_scale)
    if not INDEXED.isdisjoint(field(config, "layer_types") or ()):  # how ties are broken depends on the slots
        return int(config.index_topk) + 1
    return Positions.of(config).longrope_switch  # models that drop their cache there count slots


def _has_temperature(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "attn_temperature_tuning", False))


def _scales_queries(layer: Any) -> bool:
    return bool(layer.attn_temperature_tuning) and not layer.use_rope


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
