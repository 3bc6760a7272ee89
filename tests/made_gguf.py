"""Small GGUF files: a random model of an architecture, its matrices in a type, and a byte-level tokenizer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}<|start|>"
)
SPECIAL = ("<|text|>", "<|start|>", "<|end|>")
TOKENS = (*SPECIAL, *bytes_to_unicode().values(), "Ġt", "he", "Ġthe")
MERGES = ("Ġ t", "h e", "Ġt he")
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "vocab_size": len(TOKENS),
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
OWN = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 128},
    "gemma3": {"tie_word_embeddings": True, "sliding_window": 48, "query_pre_attn_scalar": 256},
    "phi3": {"tie_word_embeddings": False},
}


BLOCKS = {
    "Q8_0": (128, (0,)), "Q4_0": (8, (0,)), "Q4_1": (16, (0, 2)), "Q5_0": (16, (0,)), "Q5_1": (32, (0, 2)),
    "Q3_K": (4 * 32, (108,)), "Q4_K": (16 * 64, (0, 2)), "Q5_K": (32 * 64, (0, 2)), "Q6_K": (32 * 128, (208,)),
    "IQ4_NL": (127, (0,)), "IQ4_XS": (127 * 32, (0,)),
}  # fmt: skip
"""By type the largest value in steps of a block's factor, and where its factors lie."""


def blocks_of(kind: str, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Bytes of a random matrix in a type: `[out, bytes]`, with weights of about 0.03."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    raw = generator.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    largest, places = BLOCKS[kind]
    for number, place in enumerate(places):
        scale = 0.06 / largest * (-largest / 2 if kind.endswith("_1") and number else 8 if number else 1)
        halves = (scale * generator.uniform(0.5, 1, raw.shape[:2])).astype(np.float16)
        raw[..., place : place + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def written(
    path: Path,
    architecture: str = "llama",
    kind: str = "Q4_K",
    more: dict[str, str] | None = None,
    values: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a file.

    Args:
        path: file to write.
        architecture: one of `OWN`, or another with the same facts.
        kind: type of the matrices, "F32" or "BF16" for values.
        more: types of matrices by a part of their names in the file.
        values: further tensors by their names.
    """
    sizes = SIZES | OWN.get(architecture, {"tie_word_embeddings": True, "sliding_window": 48})
    name = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_facts(writer, architecture, model.config, sizes["head_dim"])
    _write_tokenizer(writer)
    number = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, sizes["num_hidden_layers"])
    generator = np.random.default_rng(0)
    for key, weight in model.named_parameters():  # tied ones once
        layer, _, own = key.rpartition(".")
        target = f"{names.get_name(layer)}.{own}"
        taken = next((each for part, each in (more or {}).items() if part in target), kind)
        _write_tensor(writer, target, weight.detach(), taken, generator)
    for target, numbers in (values or {}).items():
        writer.add_tensor(target, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tensor(writer, name: str, weight: torch.Tensor, kind: str, generator) -> None:
    if weight.ndim == 1:
        writer.add_tensor(name, generator.normal(1, 0.1, weight.shape).astype(np.float32))
    elif kind in ("F32", "F16", "BF16"):
        numbers = generator.normal(0, 0.03, weight.shape).astype(np.float32)
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(numbers, number), raw_dtype=number)
    else:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks_of(kind, tuple(weight.shape), generator), raw_dtype=number)


def _write_facts(writer, architecture: str, config, head_dim: int) -> None:
    writer.add_name("made")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(TOKENS))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
