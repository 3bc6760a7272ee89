"""Toy models, for the tests of this package and of programs that use it.

>>> model = toy_model("llama", vocabulary=32)
>>> lade.generate(model, input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=20)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lade.model.randomness import DrawsFrom


def toy_model(
    family: str = "llama",
    *,
    vocabulary: int = 48,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    positions: int = 512,
) -> PreTrainedModel:
    """Return a random model of a few thousand parameters, in evaluation mode, that never emits EOS.

    Its weights are large enough for its greedy text to be neither constant nor soon periodic.

    Args:
        family: `llama` (grouped-query attention), `qwen3` or `gpt2` (learned positions).
        vocabulary: V, the vocabulary size.
        seed: seeds the weights; torch's global generator is not touched.
        dtype: dtype of the weights.
        attention: attention implementation, `sdpa` or `eager`.
        positions: maximum context length in tokens.

    Raises:
        ValueError: the family is none of these.
    """
    make = _FAMILIES.get(family)
    if make is None:
        raise ValueError(f"family={family!r} is not valid: give one of {', '.join(_FAMILIES)}")
    with DrawsFrom(torch.Generator().manual_seed(seed)):
        model = make(vocabulary, positions)
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.set_attn_implementation(attention)
    torch.nn.Module.to(model, dtype)
    model.eval()
    return model


def _rotary(vocabulary: int, positions: int) -> dict[str, Any]:
    """Return the config fields of the rotary families."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }


_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FAMILIES: dict[str, Callable[[int, int], PreTrainedModel]] = {
    "llama": lambda *sizes: LlamaForCausalLM(LlamaConfig(**_rotary(*sizes))),
    "qwen3": lambda *sizes: Qwen3ForCausalLM(Qwen3Config(**_rotary(*sizes), head_dim=8)),
    "gpt2": lambda vocabulary, positions: GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_positions=positions, **_GPT2)
    ),
}
