"""What a prompt has beside its text. Only prompts of text alone are decoded with trees, by multimodal models, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

NAMES = ("pixel_", "image", "video", "audio", "input_features", "input_values", "high_res_pixel_", "mm_encoder_outputs")
"""How arguments of `generate` begin that hold pictures, films, sounds, or what was made of them."""
KINDS_OF_TOKENS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""In multimodal models 0 stands for text. In others such ids have embeddings of their own."""
WHY = "the prompt has more than text in it, and only prompts of text are accelerated so far"


def names_media(name: str) -> bool:
    """Whether an argument of that name holds anything else than text."""
    return name.startswith(NAMES)


def is_empty(value: Any) -> bool:
    """Whether an argument is as good as left out, such as the `mm_encoder_outputs={}` of a text prompt."""
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def says_text(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument only says that all tokens of the prompt are text.

    Args:
        model: the causal language model.
        name: name of the argument.
        value: its value, `[B, L]`.
    """
    multimodal = model.config.get_text_config(decoder=True) is not model.config
    return multimodal and name in KINDS_OF_TOKENS and isinstance(value, torch.Tensor) and not value.any()
