"""Prefill of prompts with images, videos or audio.

What plain decoding would feed in its first step after the prompt is asked of the model's own class, without a pass.
Only where that is a token, its position and the cache, and nothing else, can a tree be fed in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from lade.errors import UnsupportedArgumentError
from lade.model.backend import Backend
from lade.model.config import Positions
from lade.model.kv_cache import PositionOffsets, TreeCache
from lade.model.prefill import PreparedPrompts
from lade.model.prepared import TOKEN_TYPE_ARGUMENTS, Prepared, PromptTexts, is_unset

_WHAT = "a prompt with more than text in it"
REMEDY = 'use plain model.generate, or lookahead="auto", which falls back to it'
STEP = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position"}
    | {"use_cache", "logits_to_keep", "return_dict"}
)
"""What a step of plain decoding feeds, as all models take it."""
OF_PIXELS = frozenset(
    {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_position_ids", "video_position_ids"}
)
"""What says where pixels belong. A step without pixels, which is given its position, does not look at it."""


def media_prompts(prepared: Prepared, texts: PromptTexts) -> PreparedPrompts:
    """The prompts as they are to be prefilled.

    Args:
        prepared: what `generate` has prepared; its prompts have more than text in them.
        texts: of the prompts.

    Raises:
        UnsupportedArgumentError: plain decoding feeds something beside the text, also after the prompt.
    """
    limits = Positions.of(prepared.model.config.get_text_config(decoder=True))
    switch, longest = limits.longrope_switch, prepared.generation_config.max_length
    if switch is not None and texts.width <= switch < longest + texts.width - texts.shown:
        _refuse(_WHAT, f"beyond {switch} tokens this model computes the text again, without it")
    following = _first_step(prepared, texts)
    for name, value in following.items():
        if name in STEP | OF_PIXELS or is_unset(value):
            continue
        if name not in TOKEN_TYPE_ARGUMENTS or value[:, -1:].any():
            _refuse(name, "plain decoding feeds it with each token, and its values for a tree are not known")
    arguments = {name: value for name, value in prepared.model_kwargs.items() if name != "past_key_values"}
    offsets = _offsets(prepared, following.get("position_ids"), texts)
    if offsets and (switch is not None or limits.dynamic is not None):
        _refuse(_WHAT, "the frequencies of this model go by positions that are not its slots")
    columns, readable = texts.columns, texts.shown == texts.width and not texts.has_gaps
    return PreparedPrompts(prepared.input_ids, arguments, columns, texts.width, readable, offsets, prepared.beams)


def _first_step(prepared: Prepared, texts: PromptTexts) -> dict[str, Any]:
    """The arguments of the model in the first step of plain decoding after the prompt."""
    model: Any = prepared.model
    ids, cache = prepared.input_ids, TreeCache.of_length(texts.width)
    outputs = CausalLMOutputWithPast(past_key_values=cache)
    kwargs = model._update_model_kwargs_for_generation(outputs, {**prepared.model_kwargs, "past_key_values": cache})
    with_next = torch.cat([ids, ids[:, -1:] if texts.shown else ids.new_zeros(len(ids), 1)], dim=1)
    step: dict[str, Any] = model.prepare_inputs_for_generation(with_next, next_sequence_length=1, **kwargs)
    return step


def _offsets(prepared: Prepared, position: torch.Tensor | None, texts: PromptTexts) -> PositionOffsets:
    """How far the position of the next token, `[B, 1]` or `[axes, B, 1]`, lies from the length of its row."""
    if position is None:
        if "position_ids" in prepared.facts.accepts:
            _refuse(_WHAT, "the model keeps the positions after it to itself")
        return PositionOffsets()
    axes = position[..., -1].reshape(-1, position.shape[-2])[:, :: prepared.beams]  # [axes, P], or [axes, 1]
    rows = axes.T.expand(len(texts), -1).tolist()
    offsets = [tuple(at - len(text) for at in row) for row, text in zip(rows, texts.ids, strict=True)]
    if not any(map(any, offsets)):
        return PositionOffsets()
    if position.ndim != 3:
        _refuse("position_ids", "positions ahead of the text are known only where they count on from 0")
    return PositionOffsets(tuple(offsets))


def _refuse(what: str, why: str) -> None:
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding: {why}", REMEDY)


class MediaBackend(Backend):
    """Prompts with images, videos or audio; see `lade.model.joint`."""

    prompts = staticmethod(media_prompts)


BACKEND = MediaBackend()
