"""Models of many architectures, as small as toys: random weights, a vocabulary of 48 tokens, no special ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.5, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def small_model(kind: str, dtype: torch.dtype = torch.float32, attention: str | None = None, **fields: Any) -> Any:
    """A model of a type that transformers knows, with the same weights each time.

    Args:
        kind: the model type.
        dtype: of the weights.
        attention: the implementation; transformers chooses if there is none.
        fields: of its config.
    """
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.generation_config = GenerationConfig()
    return model.to(dtype).eval()
