"""A tiny model with random weights in a folder, for processes that load it."""

import socket
from pathlib import Path

import httpx2 as httpx
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False
