"""What `model.generate` returns: ids, or an output object with them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lade.backends.encoder_decoder.runner import DecoderCache
from lade.hf.encoder_decoder import has_encoder
from lade.hf.prepared import Prepared
from lade.hf.processors import Record

Output = torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput


def output_of(prepared: Prepared, written: list[list[int]], record: Record, cache: Cache | None = None) -> Output:
    """What `model.generate` returns, given the new tokens of each row.

    Args:
        prepared: has the prompts, and says whether an output object is wanted and what a row that ended early is
            padded with.
        written: the new tokens of each row.
        record: scores and logits for the output object.
        cache: the cache for the output object; None for none.
    """
    prompts, config = prepared.input_ids, prepared.generation_config
    longest = max(map(len, written))
    pad: Any = config._pad_token_tensor  # which is the end of sequence where there is no pad_token_id
    pad = None if pad is None else int(pad)
    new = [tokens + [pad] * (longest - len(tokens)) for tokens in written]
    ids = torch.cat([prompts, prompts.new_tensor(new)], dim=1)
    if not config.return_dict_in_generate:
        return ids
    fields: dict[str, Any] = {"sequences": ids, "scores": record.scores, "logits": record.logits}
    if has_encoder(prepared):
        pair = cache.dynamic_pair() if isinstance(cache, DecoderCache) else None
        return GenerateEncoderDecoderOutput(**fields, past_key_values=pair)
    return GenerateDecoderOnlyOutput(**fields, past_key_values=cache)


def record_for(generation_config: GenerationConfig, top: int | None = None) -> Record:
    """An empty record of what the output object is to have; see `Record` for `top`."""
    wanted = generation_config.return_dict_in_generate
    return Record(
        scores=() if wanted and generation_config.output_scores else None,
        logits=() if wanted and generation_config.output_logits else None,
        top=top,
    )
