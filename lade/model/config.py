"""Fields of a model's configuration: nested values, token embeddings, windows of the layers, position limits.

Drafted tokens have positions that plain decoding has not reached yet. Two mechanisms must not be affected by them: a
table of learned positions, which ends, and rotary scalings that depend on the longest position of a pass and switch all
frequencies (dynamic NTK at the model's length, longrope at the original one). So no tree crosses such a *limit*; the
token that crosses it is fed alone, as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel


def field(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """Return the value of a configuration field, or the list of the layers' values where they differ.

    Transformers raises an error if such a field (`head_dim` of Gemma 4) is read from the model's config.
    """
    try:
        return getattr(config, name, default)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError, which older versions lack
        return [getattr(layer, name, default) for layer in config.per_layer_config]


def per_layer(config: PretrainedConfig, name: str) -> list[Any]:
    """Return the value of a field for each layer; None where the field is missing."""
    value = field(config, name)
    layers = field(config, "num_hidden_layers") or 1
    return value if isinstance(value, list) and len(value) == layers else [value] * layers


def token_embeddings(model: PreTrainedModel) -> Any:
    """Return the token embeddings; the decoder's, if the encoder has others."""
    return (model.get_decoder() if model.config.is_encoder_decoder else model).get_input_embeddings()


def decoder_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the generating layers: a multimodal model's language model, or a decoder."""
    config: PretrainedConfig
    config = model.get_decoder().config if model.config.is_encoder_decoder else model.config.get_text_config(True)
    return config


LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "opt", "biogpt", "xglm", "openai-gpt"})
"""Families with learned positions: beyond the end of their table even plain decoding fails."""


CONTEXT_FIELDS = frozenset(
    """
    context_length max_context_length max_position_embeddings max_seq_len max_sequence_length model_max_length n_ctx
    n_positions seq_length
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Names of the context length in configurations."""


SLIDING, CHUNKED, FULL_ATTENTION = "sliding_attention", "chunked_attention", "full_attention"
_WINDOW_FIELDS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}


def layer_windows(config: PretrainedConfig) -> list[tuple[str, int | None]]:
    """Return type and window of each layer, as transformers' cache reads them; None for no window."""
    lengths = zip(*(per_layer(config, name) for name in _WINDOW_FIELDS.values()), strict=True)
    windows = [
        {kind: length for kind, length in zip(_WINDOW_FIELDS, own, strict=True) if isinstance(length, int)}
        for own in lengths
    ]
    kinds = field(config, "layer_types") or [next(iter(own), FULL_ATTENTION) for own in windows]
    return [(kind, own.get(kind)) for kind, own in zip(kinds, windows, strict=False)]


def window_too_short(config: PretrainedConfig) -> str:
    """Return field and value of a window of fewer than two tokens; empty if there is none.

    Transformers' cache keeps the last `window - 1` tokens as `[-window + 1:]`, which for a window of 1 is all of them:
    prompts are masked, and later tokens see everything. Shorter windows fail.
    """
    for kind, window in layer_windows(config):
        if window is not None and window < 2:
            return f"{_WINDOW_FIELDS[kind]}={window}"
    return ""


def window_lengths(config: PretrainedConfig) -> set[int]:
    """Return the lengths of the sliding windows and chunks of all layers."""
    return {window for _, window in layer_windows(config) if window is not None}


@dataclass(frozen=True)
class Positions:
    """Position limits of one model. Frequencies that change depend on the longest row of a pass.

    Attributes:
        limits: positions, ascending, that no tree crosses; the token at one is fed alone. Beyond the last one every
            token is fed alone.
        longrope_switch: the limit at which longrope changes its frequencies; some models then recompute the whole text.
        dynamic: the limit from which on dynamic NTK changes its frequencies with every token.
    """

    limits: tuple[int, ...] = ()
    longrope_switch: int | None = None
    dynamic: int | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Positions:
        """Return the limits declared by the text config of a model."""
        lengths = [field(config, name) for name in CONTEXT_FIELDS]
        length = min((value for value in lengths if isinstance(value, int)), default=None)
        switch = _longrope_switch(config)
        limits = sorted({limit for limit in (switch, length) if limit is not None and limit <= (length or limit)})
        dynamic = any("dynamic" in str(parameters.get("rope_type")) for parameters in _rope_parameters(config))
        return cls(tuple(limits), switch, length if dynamic else None)

    def room(self, cached: int) -> int | None:
        """Return how deep a tree may be whose root is at position `cached`; None for no limit."""
        if not self.limits:
            return None
        if cached in self.limits:
            return 0
        return next((limit - 1 - cached for limit in self.limits if cached < limit), 0)

    def changes_by(self, length: int) -> bool:
        """Return whether rotary frequencies change in a pass whose longest row has `length` tokens."""
        return any(limit is not None and length > limit for limit in (self.longrope_switch, self.dynamic))


def _rope_parameters(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    rope: Mapping[str, Any] = field(config, "rope_parameters") or {}
    return [rope, *(value for value in rope.values() if isinstance(value, Mapping))]  # or one dict a layer type


def _longrope_switch(config: PretrainedConfig) -> int | None:
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") in ("longrope", "su"):  # "su" in older code from a hub
            switch = parameters.get("original_max_position_embeddings")
            return int(switch or field(config, "original_max_position_embeddings") or config.max_position_embeddings)
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, such as `float32`."""
    return str(dtype).removeprefix("torch.")
