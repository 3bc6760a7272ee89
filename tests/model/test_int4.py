"""Linear layers in int4: the kernel and its definition, codes, the text of plain decoding, folders, and refusals."""

import copy
import itertools
import json
import pickle

import pytest
import torch
from integer_toys import DTYPES, VOCABULARY, assert_decoded_plainly, assert_texts_are_plains, build, logits
from torch import nn
from transformers.pytorch_utils import Conv1D

import lade
from lade.backends.cpu.packing import blocks, folder
from lade.backends.cpu.packing.integers import Int4Linear, int4_codes, out_of_pairs, pairs_of
from lade.backends.cpu.packing.pack import int4_layers, int8_layers, integer_weights, kept_layers, packed_layers
from lade.backends.cpu.packing.panel_weight import has_block_kernels
from lade.backends.cpu.packing.quality import watched
from lade.errors import ConfigError, UnsupportedModelError

SHAPES = [(64, 64), (1, 33), (7, 3), (300, 64), (64, 300), (130, 777)]


def packed(model, **options):
    return lade.pack(model, weights="int4", min_weights=1, **options)


@pytest.fixture(params=["compiled", "reference"])
def way(request, monkeypatch):
    """Layers with the compiled kernel, and those of an installation without the library."""
    if request.param == "reference":
        monkeypatch.setattr(blocks, "has_block_kernels", lambda: False)
    elif not has_block_kernels():
        pytest.skip("the compiled kernels are missing")
    return request.param


# Products


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_number_of_rows(way):
    for (outputs, inputs), dtype in itertools.product([(96, 64), (40, 3000)], DTYPES):
        layer = Int4Linear(nn.Linear(inputs, outputs).to(dtype), keep=False)
        x = torch.randn(40, inputs).to(dtype) * 10 ** torch.linspace(-2, 2, 40)[:, None].to(dtype)
        together = layer(x)
        for rows in range(1, 41):
            assert torch.equal(layer(x[:rows]), together[:rows])
            assert torch.equal(layer(x[rows - 1 : rows]), together[rows - 1 : rows])


@torch.no_grad()
def test_inputs_of_any_shape(way):
    layer = Int4Linear(nn.Linear(24, 40), keep=False)
    assert torch.equal(layer(torch.zeros(3, 24)), layer.bias.expand(3, -1))
    x = torch.randn(2, 3, 4, 24)
    expected = torch.stack([layer(row) for row in x.view(-1, 24)]).view(2, 3, 4, 40)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x.transpose(0, 1)), expected.transpose(0, 1))
    assert layer(torch.randn(0, 24)).shape == (0, 40)
    assert layer(torch.full((1, 24), float("inf"))).isfinite().sum() == 0
    for unfit in (torch.randn(3, 23), torch.randn(3, 24).double()):
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|dtype"):
            layer(unfit)
    with pytest.raises(UnsupportedModelError, match="packed in int4 for the CPU"):
        layer(torch.randn(3, 24, device="meta"))


# Codes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_hold_the_codes(shape):
    codes = int4_codes(torch.randn(shape))
    stored = out_of_pairs(pairs_of(codes), codes.scale, shape[1])
    assert torch.equal(stored.values, codes.values) and pairs_of(codes).shape == (shape[0], -(-shape[1] // 2))
    assert codes.values.max() <= 15


def test_codes_lose_less_than_those_of_the_largest_magnitude():
    """Q4_0 of llama.cpp: the scale maps the largest magnitude to -8, and is rounded to float16."""
    weight = torch.randn(64, 512)
    groups = weight.view(64, -1, 32)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    step = (largest / -8).half().float()
    q4_0 = ((groups / step).add(8.5).floor().clamp(0, 15) - 8) * step
    error = (int4_codes(weight).dense(torch.float32) - weight).norm()
    assert error < 0.95 * (q4_0.view(64, -1) - weight).norm()


def test_weights_on_the_grid_are_kept_and_zeros_have_no_scale():
    values = torch.randint(-8, 8, (5, 96), dtype=torch.int8)
    values[:, ::32] = -8
    values[3] = 0
    codes = int4_codes(values * 0.25)
    assert torch.equal(codes.dense(torch.float32), values * 0.25)
    assert (codes.scale[3] == 0).all()


# Models


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_lookahead_writes_the_tokens_of_plain_decoding(way, family, dtype, rounds_alike):
    model = lade.invariant(packed(build(family, dtype)))
    assert int4_layers(model) == packed_layers(model) > 0 == int8_layers(model) and lade.supports(model)
    assert_texts_are_plains(model)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_engines_write_the_tokens_of_plain_decoding(dtype, rounds_alike):
    model = lade.invariant(packed(build(dtype=dtype), keep="lm_head"))
    prompts = torch.randint(1, VOCABULARY, (3, 75))
    given = {"max_new_tokens": 24, "do_sample": False}
    alone = [model.generate(prompt[None], **given) for prompt in prompts]
    with lade.Engine(model, max_rows=2) as engine:
        handles = [engine.add(prompt.tolist(), **given) for prompt in prompts]
        assert all(torch.equal(each.result(), one) for each, one in zip(handles, alone, strict=True))


def test_without_an_attention_that_rounds_alike_it_is_decoded_plainly(way):
    model = packed(build())
    assert_decoded_plainly(model, "int4")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_copies_compute_the_same_bits_also_without_the_library(way, family, copied, monkeypatch):
    model = packed(build(family, torch.bfloat16))
    expected, other = logits(model), way == "reference" and has_block_kernels()
    monkeypatch.setattr(blocks, "has_block_kernels", lambda: other)
    again = copied(model)
    assert torch.equal(logits(again), expected)
    compiled = {module._panel_weight is not None for module in again.modules() if isinstance(module, Int4Linear)}
    assert compiled == {other}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_saved_model_is_loaded_bit_for_bit(way, family, dtype, tmp_path):
    model = packed(build(family, dtype), keep=["layers.0.*"] if family == "llama" else ())
    lade.save_packed(model, tmp_path)
    index = json.loads((tmp_path / folder.INDEX).read_text())
    assert len(index["int4"]) == int4_layers(model) > 0 == len(index["int8"])
    found = lade.load_packed(tmp_path)
    assert torch.equal(logits(found), logits(model)) and integer_weights(found) == "int4"
    assert (int4_layers(found), kept_layers(found)) == (int4_layers(model), kept_layers(model))


def test_a_state_has_what_the_codes_stand_for(way, tmp_path):
    model = packed(build())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(again.get_submodule(name).weight, model.get_submodule(name).dense_weight())


def test_originals_come_back_only_if_they_were_kept(way):
    model, before = build("gpt2"), build("gpt2")
    lade.unpack(packed(model, keep_original=True))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
    with pytest.raises(UnsupportedModelError, match=r"int4, and its original weight was not kept; load the model"):
        lade.unpack(packed(model))


@torch.no_grad()
def test_errors_are_told_by_layer_and_bytes_are_those_of_45_bits(way):
    layer = nn.Linear(640, 480)
    model = packed(nn.Sequential(layer, Conv1D(32, 480)).eval(), keep_original=True)
    with watched(model) as errors:
        model(torch.randn(9, 640))
    assert [error.name for error in errors] == ["0", "1"]
    assert all(0.05 < error.weights < 0.1 and 0.05 < error.outputs < 0.15 for error in errors)
    if way == "compiled":
        assert model[0].nbytes == 640 * 480 * 4.5 / 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "int3"}, ConfigError, "give 'int8' or 'int4'"),
        ({"weights": "int4", "keep": "lm_hed"}, ConfigError, "lm_head"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        lade.pack(build(), min_weights=1, **options)


def test_weights_that_are_not_finite_are_refused_and_many_inputs_are_not():
    layer = nn.Linear(8, 8)
    layer.weight.data[3, 3] = float("inf")
    with pytest.raises(UnsupportedModelError, match="not finite; keep"):
        packed(nn.Sequential(layer).eval())
    assert int4_layers(packed(nn.Sequential(nn.Linear(66_400, 1)).eval())) == 1


def test_int8_and_int4_do_not_mix_by_packing_twice():
    with pytest.raises(UnsupportedModelError, match="already packed"):
        packed(lade.pack(build(), min_weights=1))
    model = lade.pack(build(), min_weights=1, weights="int8", keep="lm_head")
    with pytest.raises(UnsupportedModelError, match="already packed"):
        packed(model)
