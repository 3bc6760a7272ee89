"""The embeddings of the tokens that a text is made of."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


def token_embeddings(model: PreTrainedModel) -> Any:
    """Where the tokens of a text are looked up; those of the decoder, if the encoder has others."""
    return (model.get_decoder() if model.config.is_encoder_decoder else model).get_input_embeddings()


def config_of_text(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of the layers that write the text: of a multimodal model's language model, or of a decoder."""
    config: PretrainedConfig
    config = model.get_decoder().config if model.config.is_encoder_decoder else model.config.get_text_config(True)
    return config
