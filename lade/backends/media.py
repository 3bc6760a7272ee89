"""Prefill of prompts with images, videos or audio.

The model's own class is asked, without a pass, what plain decoding would feed in its first step after the prompt. A
tree can be fed instead only if that is a token, its position and the cache, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from lade.errors import UnsupportedArgumentError
from lade.model.config import Positions
from lade.model.facts import CACHE, as_cache
from lade.model.kv_cache import PositionOffsets, TreeCache
from lade.model.prefill import MEDIA, PreparedPrompts
from lade.model.prepared import TOKEN_TYPE_ARGUMENTS, Prepared, PromptTexts, is_unset

_WHAT = "a prompt with more than text in it"
REMEDY = 'use plain model.generate, or lookahead="auto", which falls back to it'
STEP = frozenset(
    {"input_ids", "attention_mask", "position_ids", CACHE, "cache_position"}
    | {"use_cache", "logits_to_keep", "return_dict"}
)
"""Arguments that a step of plain decoding feeds to any model."""
PIXEL_PLACEMENT = frozenset(
    {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_position_ids", "video_position_ids"}
)
"""Arguments that place pixels in the text. A step without pixels, whose position is given, ignores them."""


def media_prompts(prepared: Prepared, texts: PromptTexts) -> PreparedPrompts:
    """Return the prompts for prefill.

    Args:
        prepared: prepared generation, whose prompts contain more than text.
        texts: token ids of the prompts.

    Raises:
        UnsupportedArgumentError: plain decoding feeds more than the text after the prompt as well.
    """
    limits = Positions.of(prepared.model.config.get_text_config(decoder=True))
    switch, longest = limits.longrope_switch, prepared.generation_config.max_length
    if switch is not None and texts.width <= switch < longest + texts.width - texts.shown:
        _refuse(_WHAT, f"beyond {switch} tokens this model recomputes the text, without it")
    following = _first_step(prepared, texts)
    for name, value in following.items():
        if name in STEP | PIXEL_PLACEMENT or is_unset(value):
            continue
        if name not in TOKEN_TYPE_ARGUMENTS or value[:, -1:].any():
            _refuse(name, "plain decoding feeds it with each token, and its values for a tree are unknown")
    arguments = {name: value for name, value in prepared.model_kwargs.items() if name != CACHE}
    offsets = _offsets(prepared, following.get("position_ids"), texts)
    if offsets and (switch is not None or limits.dynamic is not None):
        _refuse(_WHAT, "the rotary frequencies of this model depend on positions that differ from cache slots")
    columns, readable = texts.columns, texts.shown == texts.width and not texts.has_gaps
    return PreparedPrompts(prepared.input_ids, arguments, columns, texts.width, readable, offsets, prepared.beams)


def _first_step(prepared: Prepared, texts: PromptTexts) -> dict[str, Any]:
    """Return the model's arguments in the first step of plain decoding after the prompt."""
    model: Any = prepared.model
    ids, cache = prepared.input_ids, TreeCache.of_length(texts.width)
    outputs = CausalLMOutputWithPast(**as_cache(cache))
    kwargs = model._update_model_kwargs_for_generation(outputs, {**prepared.model_kwargs, CACHE: cache})
    with_next = torch.cat([ids, ids[:, -1:] if texts.shown else ids.new_zeros(len(ids), 1)], dim=1)
    step: dict[str, Any] = model.prepare_inputs_for_generation(with_next, next_sequence_length=1, **kwargs)
    return step


def _offsets(prepared: Prepared, position: torch.Tensor | None, texts: PromptTexts) -> PositionOffsets:
    """Return how far the position of the next token, `[B, 1]` or `[axes, B, 1]`, differs from the length of its row."""
    if position is None:
        if "position_ids" in prepared.facts.accepts:
            _refuse(_WHAT, "the model does not take the positions after it as an argument")
        return PositionOffsets()
    axes = position[..., -1].reshape(-1, position.shape[-2])[:, :: prepared.beams]  # [axes, P], or [axes, 1]
    rows = axes.T.expand(len(texts), -1).tolist()
    offsets = [tuple(at - len(text) for at in row) for row, text in zip(rows, texts.ids, strict=True)]
    if not any(map(any, offsets)):
        return PositionOffsets()
    if position.ndim != 3:
        _refuse("position_ids", "positions beyond the text are known only if they count up from 0")
    return PositionOffsets(tuple(offsets))


def _refuse(what: str, why: str) -> None:
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding: {why}", REMEDY)


class MediaBackend:
    """Prompts with images, videos or audio, see `lade.model.registry`."""

    prompts = staticmethod(media_prompts)


BACKEND = MediaBackend()
MEDIA.fill(BACKEND)
