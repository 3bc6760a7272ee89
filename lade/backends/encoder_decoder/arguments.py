"""Encoder outputs of a prepared generation, and the runner of its decoder."""

from __future__ import annotations

from typing import Any

import torch

from lade.backends.encoder_decoder.runner import Encoded, EncoderDecoderRunner
from lade.model.config import token_embeddings
from lade.model.masks import MaskPlan
from lade.model.prepared import Prepared

ENCODER_KWARGS = frozenset({"encoder_outputs", "attention_mask", "inputs_embeds"})
"""What of the prepared arguments concerns the encoder alone."""


def has_encoder(prepared: Prepared) -> bool:
    """Whether the model is an encoder-decoder model."""
    return bool(prepared.model.config.is_encoder_decoder)


def runner_on_encoded(prepared: Prepared, plan: MaskPlan) -> EncoderDecoderRunner:
    """The runner of such a generation, for each prompt once."""
    kwargs, beams = prepared.model_kwargs, prepared.beams
    encoded = Encoded(kwargs["encoder_outputs"], kwargs.get("attention_mask"))
    if beams > 1:
        encoded = encoded.rows(range(0, len(encoded), beams))
    return EncoderDecoderRunner(prepared.model, plan, prepared.generation_config, encoded, prepared.facts)


def source_of(prepared: Prepared, number: int) -> list[int]:
    """The text that the encoder has read for one row, without padding; empty where it is none of the decoder's tokens.

    Args:
        prepared: the generation.
        number: of the row, among all that are decoded.
    """
    inputs = prepared.inputs_tensor
    if not has_encoder(prepared) or inputs is None or inputs.ndim != 2 or torch.is_floating_point(inputs):
        return []
    if not _share_vocabulary(prepared.model):
        return []
    repeats = len(prepared.input_ids) // len(inputs)  # for beams, or several answers to a prompt
    ids, mask = inputs[number // repeats], prepared.model_kwargs.get("attention_mask")
    if mask is not None:
        ids = ids[mask[number].to(ids.device) != 0]
    vocabulary = token_embeddings(prepared.model).weight.shape[0]
    return ids.tolist() if ids.numel() and int(ids.min()) >= 0 and int(ids.max()) < vocabulary else []


def _share_vocabulary(model: Any) -> bool:
    """Whether an id means the same to encoder and decoder, as far as their embeddings tell."""
    encoder, decoder = model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()
    if getattr(model.config, "share_encoder_decoder_embeddings", None) is False:
        return False
    return encoder is not None and encoder.weight.shape == decoder.weight.shape
