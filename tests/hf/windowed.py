"""A tiny model whose layers see eight tokens back."""

import torch
from transformers import MistralConfig, MistralForCausalLM


def windowed(layers: int = 2) -> MistralForCausalLM:
    """In float64, with the same random weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=8,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=None,
        )
        return MistralForCausalLM(config).double().eval()
