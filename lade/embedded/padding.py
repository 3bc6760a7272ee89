"""Pad a Llama with layers that add zero, so that it costs as much as a larger model and writes the same text."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaForCausalLM

from lade.errors import ConfigError

LAYERS = 20  # added ones: with those of a small model about as many as published models of this size have
_WIDTH_STEP = 64  # kernels like round widths
_NOISE = 0.035  # uniform within ± this: a standard deviation of 0.02, as in fresh models


@torch.no_grad()
def pad(model: LlamaForCausalLM, params: float) -> LlamaForCausalLM:
    """Return a copy of the model with about as many parameters as wanted and bit for bit the same logits.

    The copy has `LAYERS` more layers with wide feed-forward parts. Their `o_proj` and `down_proj` are zero, so that
    each adds 0.0 to the hidden state; all their other weights are noise. Zeros are read and multiplied like any number.

    Args:
        model: the model, which is left as it is.
        params: wanted number of parameters, met within 2 % from 5 million more than the model's on.

    Returns:
        A model in evaluation mode. It goes by the same checkpoint, so an MTP layer of the model serves it, too.

    Raises:
        ConfigError: the model is not smaller than `params`.

    >>> large = pad(small, 100e6)
    """
    config: Any = model.config
    per_layer = (params - model.num_parameters()) / LAYERS
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    attention = 2 * hidden * heads * config.head_dim
    width = round((per_layer - attention) / (3 * hidden) / _WIDTH_STEP) * _WIDTH_STEP
    if width < _WIDTH_STEP:
        least = model.num_parameters() + LAYERS * (attention + 3 * hidden * _WIDTH_STEP)
        raise ConfigError("params", params, f"the model has {model.num_parameters():,}, give at least {least:,}")
    padded: Any = copy.deepcopy(model)
    wide = copy.deepcopy(config)
    wide.intermediate_size = width
    generator = torch.Generator(model.device).manual_seed(0)
    for index in range(config.num_hidden_layers, config.num_hidden_layers + LAYERS):
        padded.model.layers.append(_zero_layer(type(padded.model.layers[0]), wide, index, model, generator))
    padded.config.num_hidden_layers += LAYERS
    return padded.eval()  # type: ignore[no-any-return]


def _zero_layer(
    kind: type[torch.nn.Module], config: Any, index: int, model: LlamaForCausalLM, generator: torch.Generator
) -> torch.nn.Module:
    """Return a layer that adds 0.0 to the hidden state."""
    layer = kind(config, index).to(model.device, model.dtype)
    for name, weight in layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif weight.dim() == 2:
            weight.uniform_(-_NOISE, _NOISE, generator=generator)
    return layer
