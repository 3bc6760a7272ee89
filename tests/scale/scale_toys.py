"""A tiny model with random weights in a folder, for processes that load it."""

from pathlib import Path

import torch
from shell_fixtures import TEMPLATE, byte_llama, byte_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def saved(path: Path) -> tuple[Path, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The folder, and what is in it; in float64."""
    tokenizer = byte_tokenizer(TEMPLATE)
    model = byte_llama(tokenizer)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    torch.nn.Module.to(model, torch.float64)
    return path, model.eval(), tokenizer
