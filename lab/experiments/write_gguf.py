"""Write a Llama as a GGUF file: in bfloat16 to time llama.cpp on the same shape, or in float32 to compare its text.

    pip install gguf
    python lab/experiments/write_gguf.py --model FOLDER --inflate 500e6 --out model-bf16.gguf
    llama-quantize model-bf16.gguf model-q8_0.gguf Q8_0
    llama-quantize --pure model-bf16.gguf model-q4_0.gguf Q4_0
    python lab/experiments/write_gguf.py --model FOLDER --text --out model-f32.gguf

Without --text the file has no tokenizer and keeps the rows of queries and keys in transformers' order, which llama.cpp
pairs otherwise when it rotates them: it is for `llama-bench`, which draws its tokens. With --text it has the tokens of
a byte-level BPE, so that grammars work and ids can be decoded. Prompts must be given as ids: how the tokenizer splits
words is not written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import gguf
import torch
import typer
from transformers import AutoModelForCausalLM

from lade_lab.inflation import inflate

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""llama.cpp's names of the layers of a Llama."""


def name_of(name: str) -> str:
    """Such as "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight"."""
    layer = name.removesuffix(".weight")
    if layer in NAMES:
        return f"{NAMES[layer]}.weight"
    number, _, part = layer.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[part]}.weight"


def write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the hyperparameters that llama.cpp needs."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_tokenizer(writer: gguf.GGUFWriter, folder: str, config: Any) -> None:
    """Write the tokens of a byte-level BPE, its merges and its special ids."""
    described = json.loads((Path(folder) / "tokenizer.json").read_text())
    special = {each["content"]: each["id"] for each in described["added_tokens"]}
    ids = sorted({**described["model"]["vocab"], **special}.items(), key=lambda item: item[1])
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token, _ in ids]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types(kinds)
    merges = described["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def paired(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a weight with the rows of queries and keys in llama.cpp's order: rotated pairs side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part not in heads:
        return weight
    return weight.unflatten(0, (heads[part], 2, -1)).swapaxes(1, 2).flatten(0, 2)


def main(
    model: Annotated[str, typer.Option(help="folder or hub id of a Llama")],
    out: Annotated[Path, typer.Option(help="file to write")],
    params: Annotated[float | None, typer.Option("--inflate", help="parameters to grow it to")] = None,
    text: Annotated[bool, typer.Option("--text", help="float32, with tokenizer, for the same text")] = False,
) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = inflate(loaded, params) if params else loaded
    loaded = loaded if text else loaded.bfloat16()
    writer = gguf.GGUFWriter(str(out), "llama")
    write_config(writer, loaded.config)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if text else gguf.LlamaFileType.MOSTLY_BF16)
    if text:
        write_tokenizer(writer, model, loaded.config)
    else:
        writer.add_tokenizer_model("none")
    for name, weight in loaded.named_parameters():  # tied ones once
        if text:
            writer.add_tensor(name_of(name), paired(name, weight.detach(), loaded.config).contiguous().numpy())
        elif weight.ndim == 1:
            writer.add_tensor(name_of(name), weight.detach().float().numpy())
        else:
            bits = weight.detach().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name_of(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    typer.run(main)
