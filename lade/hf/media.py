"""What a prompt has beside its text: images, videos, sounds, and what says where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

NAMES = ("pixel_", "image", "video", "audio", "input_features", "input_values", "high_res_pixel_", "mm_encoder_outputs")
"""How arguments of `generate` begin that hold pictures, films, sounds, or what was made of them."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""That are opened. Pillow knows dozens more; for EPS it has Ghostscript run the program that such a file is."""
KINDS_OF_TOKENS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
"""In multimodal models 0 stands for text. In others such ids have embeddings of their own."""


def names_media(name: str) -> bool:
    """Whether an argument of that name holds anything else than text."""
    return name.startswith(NAMES)


def is_empty(value: Any) -> bool:
    """Whether an argument is as good as left out, such as the `mm_encoder_outputs={}` of a text prompt."""
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def holds_media(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of `generate`, or what it made of them, hold images, videos or sounds."""
    return any(names_media(name) and not is_empty(value) for name, value in arguments.items())


def says_text(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument only says that all tokens of the prompt are text.

    Args:
        model: the causal language model.
        name: name of the argument.
        value: its value, `[B, L]`.
    """
    return _says_kinds(model, name, value) and not value.any()


def has_more_than_text(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether a prompt has more than text in it, or only says so of some tokens, whose features are cached already.

    Args:
        model: the causal language model.
        arguments: what `generate` has prepared.
    """
    marked = (value.any() for name, value in arguments.items() if _says_kinds(model, name, value))
    return holds_media(arguments) or any(marked)


def _says_kinds(model: PreTrainedModel, name: str, value: Any) -> bool:
    if name not in KINDS_OF_TOKENS or not isinstance(value, torch.Tensor):
        return False
    return model.config.get_text_config(decoder=True) is not model.config  # else it is not multimodal
