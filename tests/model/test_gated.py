"""Gated blocks in one call: the bits of their layers' own calls, and the layers' own way wherever that may differ."""

import copy
import pickle

import pytest
import torch
from integer_toys import assert_texts_are_plains
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.activations import ACT2FN

import lade
from lade.backends.cpu.invariant.gated import GatedBlock
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing.panel_products import panel_for
from lade.backends.cpu.packing.panel_weight import PREPARED_ROWS
from lade.backends.cpu.packing.panels import DOT_PANEL
from lade.testing import toy_model

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(not kernel("attend").available, reason="the compiled kernels are missing")
KINDS = [
    pytest.param(weights, dtype, marks=pytest.mark.skipif(panel_for(panels) != DOT_PANEL, reason="no dot products"))
    for weights, dtype, panels in [
        ("int8", torch.float32, torch.int8), ("int8", HALF, torch.int8), (None, HALF, HALF),
    ]
] + [("int4", torch.float32), ("int4", HALF)]  # fmt: skip
with_each = pytest.mark.parametrize(("weights", "dtype"), KINDS)


def made(weights="int4", dtype=torch.float32, activation="silu", family="llama"):
    model = toy_model(family, dtype=dtype)
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = copy.deepcopy(ACT2FN[activation])
    return lade.invariant(lade.pack(model, weights=weights, min_weights=1))


def block_of(model) -> GatedBlock:
    return next(module for module in model.modules() if isinstance(module, GatedBlock))


def rows_of(block, *shape, dtype):
    x = torch.randn(*shape, block.gate_proj.in_features, generator=torch.Generator().manual_seed(3))
    return (x * 10 ** torch.linspace(-2, 1, x.shape[-2])[:, None]).to(dtype)


@with_each
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_a_block_has_the_bits_of_its_layers(weights, dtype, activation, threads, monkeypatch):
    block = block_of(made(weights, dtype, activation))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows in (1, 2, 3, 8, 16, 17, 40, PREPARED_ROWS, PREPARED_ROWS + 1):
        x = rows_of(block, 1, rows, dtype=dtype)
        assert torch.equal(block(x), block.original.forward(block, x)), rows
    assert block(x[0, 0]).shape == x[0, 0].shape and block(x[:, :0]).shape == (1, 0, x.shape[-1])
    turned = rows_of(block, 4, 6, dtype=dtype).transpose(0, 1)
    assert torch.equal(block(turned), block(turned.contiguous()))
    assert max(rows for rows, _ in block._calls) == PREPARED_ROWS


FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with biases": (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "sliding_window": 7}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_families_with_gated_blocks_write_plains_text(family, dtype):
    config, kind, more = FAMILIES[family]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 48, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    own = config(**{"num_key_value_heads": 2, "initializer_range": 0.5} | sizes | tokens | more)
    model = lade.invariant(lade.pack(kind(own).to(dtype).eval(), weights="int4", min_weights=1))
    assert sum(isinstance(module, GatedBlock) for module in model.modules()) == 2
    assert_texts_are_plains(model)


def test_blocks_of_other_layers_are_left_alone():
    unpacked = lade.invariant(toy_model(dtype=torch.float32))
    assert not any(isinstance(module, GatedBlock) for module in unpacked.modules())
    for activation in ("gelu", "relu"):
        assert not any(isinstance(module, GatedBlock) for module in made(activation=activation).modules())


def test_a_block_that_computes_something_else_is_left_alone(monkeypatch):
    kind = type(toy_model().model.layers[0].mlp)

    def swapped(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    monkeypatch.setattr(kind, "forward", swapped)
    model = made()
    assert not any(isinstance(module, GatedBlock) for module in model.modules())


@torch.no_grad()
def test_hooks_and_adapters_of_its_layers_are_heard():
    block = block_of(made())
    x, seen = rows_of(block, 1, 3, dtype=torch.float32), list[str]()
    expected = block(x)
    for layer in (block.gate_proj, block.up_proj, block.down_proj, block.act_fn):
        handle = layer.register_forward_hook(lambda module, given, out: seen.append(type(module).__name__) or out * 2)
        assert not torch.equal(block(x), expected) and seen.pop()
        handle.remove()
    block.up_proj = nn.Linear(block.up_proj.in_features, block.up_proj.out_features)
    assert torch.equal(block(x), block.original.forward(block, x)) and not torch.equal(block(x), expected)


@torch.no_grad()
def test_a_weight_that_was_kept_and_written_into_is_packed_anew():
    model = lade.invariant(lade.pack(toy_model(dtype=HALF), keep_original=True, min_weights=1))
    blocks = [module for module in model.modules() if isinstance(module, GatedBlock)]
    if not blocks:
        pytest.skip("no dot products of bfloat16 here")
    x = rows_of(blocks[0], 1, 3, dtype=HALF)
    before = blocks[0](x)
    blocks[0].up_proj.weight.mul_(2)
    assert torch.equal(blocks[0](x), blocks[0].original.forward(blocks[0], x)) and not torch.equal(blocks[0](x), before)


def test_it_refuses_what_its_layers_refuse():
    block = block_of(made())
    with pytest.raises(lade.UnsupportedModelError, match="no gradients"):
        block(rows_of(block, 3, dtype=torch.float32).requires_grad_())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        block(torch.randn(3, block.gate_proj.in_features + 1))
    with torch.autocast("cpu", dtype=HALF), pytest.raises(lade.UnsupportedModelError, match="autocast"):
        block(rows_of(block, 3, dtype=torch.float32))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies_have_weights_of_their_own(copied):
    model = made()
    x = rows_of(block_of(model), 1, 3, dtype=torch.float32)
    expected = block_of(model)(x)
    again = copied(model)
    assert not block_of(again)._calls
    del model
    assert torch.equal(block_of(again)(x), expected)
    lade.variant(again)
    assert not any(isinstance(module, GatedBlock) for module in again.modules())
