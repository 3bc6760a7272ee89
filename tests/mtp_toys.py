"""Checkpoints with an MTP layer, made of models with one layer more: the last one becomes the MTP layer's block."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from lade.backends.mtp.load import layer_of
from lade.decoding.mtp import MtpHabits

NORMS = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
"""Names of an MTP layer's own norms in checkpoints with a prefix, and in those that number it like the other layers."""

READS_MTP = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
needs_mtp = pytest.mark.skipif(not READS_MTP, reason="transformers reads MTP layers from 5.23 on")


class Text:
    """A row as a layer knows it."""

    def __init__(self, tokens):
        self.tokens = tokens


def llama(layers=3, vocabulary=48, seed=0, dtype=torch.float64, hidden=32, width=48):
    """A tiny Llama whose greedy text is neither constant nor soon periodic."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))
        model.model.embed_tokens.weight.copy_(torch.randn(vocabulary, hidden, generator=generator))
    return model.to(dtype).eval()


def write_checkpoint(larger, folder, *, prefix="mtp", count="num_mtp_layers", seed=0):
    """Write a checkpoint of all layers of a model but the last, which becomes its MTP layer.

    Args:
        larger: a model with one layer more.
        folder: where to write it.
        prefix: of the MTP layer's weights; None for the layout that numbers it like the other layers.
        count: field of the configuration that tells how many there are; None for none.
        seed: of the layer's own weights.

    Returns:
        Its weights by the names that transformers' `MtpLayer` has for them.
    """
    if not READS_MTP:
        pytest.skip("transformers reads MTP layers from 5.23 on")
    larger.save_pretrained(folder)
    file, generator = Path(folder) / "model.safetensors", torch.Generator().manual_seed(seed)
    weights, config = load_file(file), larger.config.get_text_config()
    last, size = config.num_hidden_layers - 1, config.hidden_size
    dtype = larger.get_input_embeddings().weight.dtype
    before = next(name for name in weights if f"layers.{last}." in name and "visual" not in name)
    before = before[: before.index(f"layers.{last}.")] + f"layers.{last}."
    block = {name.removeprefix(before): weights.pop(name) for name in list(weights) if name.startswith(before)}
    own = {name: (1.0 + 0.1 * torch.randn(size, generator=generator)).to(dtype) for name in NORMS.values()}
    projection = (torch.randn(size, 2 * size, generator=generator) / math.sqrt(2 * size)).to(dtype)
    if prefix is None:
        layer = {f"{before}{name}": weight for name, weight in block.items()}
        layer |= {f"{before}{name}.weight": weight for name, weight in own.items()}
        layer[f"{before}eh_proj.weight"] = projection
    else:
        layer = {f"{prefix}.layers.0.{name}": weight for name, weight in block.items()}
        layer |= {f"{prefix}.{name}.weight": own[theirs] for name, theirs in NORMS.items()}
        layer[f"{prefix}.fc.weight"] = projection
    save_file({**weights, **layer}, file, metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(_shortened(folder, last, count)))
    named = {f"mtp_block.{name}": weight for name, weight in block.items()} | {"eh_proj.weight": projection}
    return named | {f"{name.replace('shared_head.norm', 'post_norm')}.weight": weight for name, weight in own.items()}


def _shortened(folder, layers, count):
    """The configuration of a checkpoint with so many layers, and one MTP layer."""
    fields = json.loads((Path(folder) / "config.json").read_text())
    text = fields.get("text_config", fields)
    for name, value in text.items():
        if isinstance(value, list) and len(value) == layers + 1:
            text[name] = value[:layers]
    text["num_hidden_layers"] = layers
    if count is not None:
        text[count] = 1
    return fields


def load(folder, dtype=torch.float64, loader=AutoModelForCausalLM, **arguments):
    """The model of a checkpoint; transformers says nothing of the weights that it drops."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model = loader.from_pretrained(folder, dtype=dtype, **arguments).eval()
    finally:
        logging.set_verbosity(before)
    model.generation_config.eos_token_id = None
    return model


def llama_with_mtp(folder, *, seed=0, dtype=torch.float64, vocabulary=48):
    """A tiny Llama with a random MTP layer in its checkpoint."""
    write_checkpoint(llama(3, vocabulary, seed, dtype), folder, seed=seed)
    return load(folder, dtype)


def heard(model):
    """Whether predictions of its layer were used: their weights have moved."""
    first = MtpHabits().weights.trust
    return any((each.weights.trust != first).any() for each in layer_of(model).habits.values())
