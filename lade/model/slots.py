"""Models that count cache slots where a tree counts positions, and what is done about it.

In plain decoding a token's slot in the cache is its position. In a tree several nodes share a position and lie in
slots of their own, so whatever a model derives from slots must be told the positions for the length of a pass:

- ALiBi biases (bloom) grow with the key's slot;
- the attention temperature of layers without rotary embedding (llama4) grows with the query's slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lade.model.attention import Inputs
from lade.model.positions import Positions


class SlotCounters:
    """The parts of one model that count slots; most models have none."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._alibi = model.base_model if hasattr(model.base_model, "build_alibi_tensor") else None
        tempered = _has_temperature(model.config.get_text_config(decoder=True))
        layers = model.modules() if tempered else ()
        self._tempered = [layer for layer in layers if _scales_queries(layer)]

    @contextmanager
    def told(self, inputs: Inputs) -> Iterator[None]:
        """While it lasts, they go by the positions in `inputs`."""
        with ExitStack() as stack:
            if self._alibi is not None:
                stack.enter_context(_biased_by_position(self._alibi, inputs.key_positions))
            if self._tempered:
                stack.enter_context(_tempered_by_position(self._tempered, inputs.positions))
            yield


def padding_counts_from(config: PretrainedConfig) -> int | None:
    """The length of text from which plain decoding counts left padding, too, and depends on it; None for never."""
    if _has_temperature(config):
        return int(config.floor_scale)
    return Positions.of(config).switch  # models that then drop their cache look at the number of slots


def _has_temperature(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "attn_temperature_tuning", False))


def _scales_queries(layer: Any) -> bool:
    return bool(getattr(layer, "attn_temperature_tuning", False)) and not layer.use_rope


@contextmanager
def _biased_by_position(decoder: Any, key_positions: torch.Tensor) -> Iterator[None]:
    build = decoder.build_alibi_tensor

    def build_alibi_tensor(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        ones = torch.ones_like(key_positions)  # as many as slots: no position is beyond its slot
        by_position: torch.Tensor = build(ones, num_heads, dtype)  # [B * heads, 1, positions]
        columns = key_positions.repeat_interleave(num_heads, dim=0)[:, None]  # [B * heads, 1, K]
        return by_position.gather(2, columns)

    decoder.build_alibi_tensor = build_alibi_tensor
    try:
        yield
    finally:
        del decoder.build_alibi_tensor


@contextmanager
def _tempered_by_position(layers: Sequence[Any], positions: torch.Tensor) -> Iterator[None]:
    """These layers multiply each query by a factor; here its projection is multiplied by the right one instead."""
    with ExitStack() as stack:
        for layer in layers:
            factor = torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
            hook = layer.q_proj.register_forward_hook(_times(factor[..., None]))  # [B, S, 1]
            stack.callback(hook.remove)
            stack.callback(setattr, layer, "attn_temperature_tuning", layer.attn_temperature_tuning)
            layer.attn_temperature_tuning = False
        yield


def _times(factor: torch.Tensor) -> Callable[..., torch.Tensor]:
    def multiply(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return (output * factor.to(output.device)).to(output.dtype)

    return multiply
