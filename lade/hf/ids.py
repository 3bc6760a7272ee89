"""Which ids a model can be fed, and which of them are special."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.model.config import token_embeddings


def vocabulary_of(model: PreTrainedModel) -> int:
    """V: ids below it can be fed."""
    return int(token_embeddings(model).weight.shape[0])


def special_ids(generation_config: GenerationConfig) -> set[int]:
    """Ids after which nothing is drafted: end of sequence and padding."""
    return ids_of(generation_config.eos_token_id) | ids_of(generation_config.pad_token_id)


def placeholder_ids(model: PreTrainedModel) -> set[int]:
    """Ids that stand for images, videos and sounds in the prompts of a multimodal model; no text has them."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    return {value for name in names if isinstance(value := getattr(model.config, name, None), int)}


def ids_of(tokens: Any) -> set[int]:
    """One id, several, or None, as `generate` takes them."""
    several = tokens.flatten().tolist() if isinstance(tokens, torch.Tensor) else tokens
    return {int(token) for token in (several if isinstance(several, list) else [several]) if token is not None}
