"""Patches for models that count cache slots where a tree counts positions.

In plain decoding a token's slot in the cache is its position. In a tree several nodes share a position and lie in
slots of their own, so whatever a model derives from slots is patched to use the positions for the length of a pass:

- ALiBi biases (bloom) grow with the key's slot;
- the attention temperature of layers without rotary embedding (llama4) grows with the query's slot;
- indexers (DeepSeek V3.2) pick keys among slots, see `lade.model.masks`.
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
    """Patches the parts of one model that count slots; most models have none."""

    def __init__(self, facts: ModelFacts) -> None:
        model = facts.model
        self._alibi = model.base_model if hasattr(model.base_model, "build_alibi_tensor") else None
        tempered = _has_temperature(facts.text_config)
        layers = facts.having("attn_temperature_tuning") if tempered else ()
        self._tempered = [layer for layer in layers if _scales_queries(layer)]
        self._indexers = facts.indexers

    @property
    def picked_keys(self) -> int | None:
        """How many keys a token sees, which are picked by a score among all that a pass has; None for all."""
        return min((indexer.index_topk for indexer in self._indexers), default=None)

    def __bool__(self) -> bool:
        """Whether there is anything to patch."""
        return self._alibi is not None or bool(self._tempered) or bool(self._indexers)

    @contextmanager
    def patched_for(self, inputs: Inputs) -> Iterator[None]:
        """While the context lasts, they use the positions in `inputs` when this thread calls them.

        Raises:
            UnsupportedModelError: they were not called, or not by this thread.
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
                    "call the model as it is, or use plain model.generate",
                )


def padding_counts_from(config: PretrainedConfig) -> int | None:
    """The length of text from which plain decoding counts left padding, too, and depends on it; None for never."""
    if _has_temperature(config):
        return int(config.floor_scale)
    if not INDEXED.isdisjoint(
        field(config, "layer_types") or ()
    ):  # which of equal scores are picked depends on the slots
        return int(config.index_topk) + 1
    return Positions.of(config).longrope_switch  # models that then drop their cache look at the number of slots


def _has_temperature(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "attn_temperature_tuning", False))


def _scales_queries(layer: Any) -> bool:
    return bool(layer.attn_temperature_tuning) and not layer.use_rope


def _biased_by_position(decoder: Any, key_positions: torch.Tensor) -> AbstractContextManager[Override]:
    def own(build: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def build_alibi_tensor(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
            ones = torch.ones_like(key_positions)  # as many as slots: no position is beyond its slot
            by_position = build(ones, num_heads, dtype)  # [B * heads, 1, positions]
            columns = key_positions.repeat_interleave(num_heads, dim=0)[:, None]  # [B * heads, 1, K]
            return by_position.gather(2, columns)

        return build_alibi_tensor

    return overridden(decoder, "build_alibi_tensor", own)


@contextmanager
def _tempered_by_position(layer: Any, inputs: Inputs) -> Iterator[Override]:
    """The layer multiplies each query by a factor; here its projection is multiplied by the right one instead."""
    positions = inputs.positions.float()
    factor = torch.log1p(torch.floor((positions + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
    factor = factor[..., None]  # [B, S, 1]

    def multiply(output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = output * factor.to(output.device)
        return scaled.to(output.dtype)

    with hooked(layer.q_proj, after=multiply), overridden(layer, "attn_temperature_tuning", lambda _: False) as flag:
        yield flag
