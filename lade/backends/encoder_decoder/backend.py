"""The encoder-decoder backend: encoder outputs of a prepared generation, and the runner of its decoder."""

from __future__ import annotations

from typing import Any

import torch

from lade.backends.encoder_decoder.runner import Encoded, EncoderDecoderRunner
from lade.model.config import token_embeddings
from lade.model.masks import MaskPlan
from lade.model.prepared import ENCODERS, Prepared
from lade.model.runner import ENCODED_RUNNERS


def runner_on_encoded(prepared: Prepared, plan: MaskPlan) -> EncoderDecoderRunner:
    """Return the runner for the encoder outputs of a prepared generation, with one row per prompt."""
    kwargs, beams = prepared.model_kwargs, prepared.beams
    encoded = Encoded(kwargs["encoder_outputs"], kwargs.get("attention_mask"))
    if beams > 1:
        encoded = encoded.rows(range(0, len(encoded), beams))
    return EncoderDecoderRunner(prepared.model, plan, prepared.generation_config, encoded, prepared.facts)


def source_of(prepared: Prepared, number: int) -> list[int]:
    """Return the encoder's input ids for one row, without padding; empty if they are not tokens of the decoder.

    Args:
        prepared: the prepared generation of the call.
        number: index of the row among all decoded rows.
    """
    inputs = prepared.inputs_tensor
    if inputs is None or inputs.ndim != 2 or torch.is_floating_point(inputs):
        return []
    if not _share_vocabulary(prepared.model):
        return []
    repeats = len(prepared.input_ids) // len(inputs)  # beams, or several sequences per prompt
    ids, mask = inputs[number // repeats], prepared.model_kwargs.get("attention_mask")
    if mask is not None:
        ids = ids[mask[number].to(ids.device) != 0]
    vocabulary = token_embeddings(prepared.model).weight.shape[0]
    return ids.tolist() if ids.numel() and int(ids.min()) >= 0 and int(ids.max()) < vocabulary else []


def _share_vocabulary(model: Any) -> bool:
    """Return True if encoder and decoder use the same token ids, judging by their embeddings."""
    encoder, decoder = model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()
    if getattr(model.config, "share_encoder_decoder_embeddings", None) is False:
        return False
    return encoder is not None and encoder.weight.shape == decoder.weight.shape


class EncoderDecoderBackend:
    """Token trees in the decoder of an encoder-decoder model, see `lade.model.registry`."""

    source_of = staticmethod(source_of)
    runner_on_encoded = staticmethod(runner_on_encoded)


BACKEND = EncoderDecoderBackend()
ENCODERS.fill(BACKEND)
ENCODED_RUNNERS.fill(BACKEND)
