"""Linear layers in int8 and in int4: rows that do not see each other, the text of plain decoding, copies, folders."""

import copy
import itertools
import json
import pickle

import pytest
import torch
from integer_toys import DTYPES, assert_decoded_plainly, assert_texts_are_plains, build, logits
from torch import nn

import lade
from lade.backends.cpu.packing import blocks, folder
from lade.backends.cpu.packing.integers import Int4Linear, Int8Linear
from lade.backends.cpu.packing.pack import int4_layers, int8_layers, integer_weights, kept_layers, packed_layers
from lade.backends.cpu.packing.weight import has_block_kernels
from lade.errors import UnsupportedModelError

pytestmark = pytest.mark.by_processor

HERE = has_block_kernels()
KINDS = {"int8": Int8Linear, "int4": Int4Linear}
layers_in = {"int8": int8_layers, "int4": int4_layers}


@pytest.fixture(params=KINDS)
def weights(request):
    return request.param


@pytest.fixture(params=["compiled", "reference"])
def way(request, monkeypatch):
    """Layers with the compiled kernels, and those of an installation without the library."""
    if request.param == "reference":
        take(monkeypatch, False)
    elif not HERE:
        pytest.skip("the compiled kernels are missing")
    return request.param


def take(monkeypatch, library):
    """Have layers take panels, or none, as without the library."""
    monkeypatch.setattr(blocks, "has_block_kernels", lambda: library)


def packed(model, weights, **options):
    return lade.pack(model, weights=weights, min_weights=1, **options)


def compiled(model):
    kinds = tuple(KINDS.values())
    return {module._panel_weight is not None for module in model.modules() if isinstance(module, kinds)}


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_number_of_rows(weights, way):
    for (outputs, inputs), dtype in itertools.product([(96, 64), (7, 3), (1, 33), (40, 3000)], DTYPES):
        layer = KINDS[weights](nn.Linear(inputs, outputs).to(dtype), keep=False)
        x = torch.randn(64, inputs).to(dtype) * 10 ** torch.linspace(-2, 2, 64)[:, None].to(dtype)
        together = layer(x)
        for rows in range(1, 65):
            assert torch.equal(layer(x[:rows]), together[:rows])
            assert torch.equal(layer(x[rows - 1 : rows]), together[rows - 1 : rows])


@torch.no_grad()
def test_inputs_of_any_shape(weights, way):
    layer = KINDS[weights](nn.Linear(24, 40), keep=False)
    assert torch.equal(layer(torch.zeros(3, 24)), layer.bias.expand(3, -1))
    x = torch.randn(2, 3, 4, 24)
    expected = torch.stack([layer(row) for row in x.view(-1, 24)]).view(2, 3, 4, 40)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x.transpose(0, 1)), expected.transpose(0, 1))
    assert layer(torch.randn(24, 5).T).shape == (5, 40) and layer(torch.randn(0, 24)).shape == (0, 40)
    assert layer(torch.full((1, 24), float("inf"))).isfinite().sum() == 0
    for unfit in (torch.randn(3, 23), torch.randn(3, 24).double()):
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|dtype"):
            layer(unfit)
    with pytest.raises(UnsupportedModelError, match=f"packed in {weights} for the CPU"):
        layer(torch.randn(3, 24, device="meta"))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_lookahead_writes_the_tokens_of_plain_decoding(weights, way, family, dtype, rounds_alike):
    model = lade.invariant(packed(build(family, dtype), weights))
    assert layers_in[weights](model) == packed_layers(model) > 0 and integer_weights(model) == weights
    assert lade.supports(model)
    assert_texts_are_plains(model)


def test_without_an_attention_that_rounds_alike_it_is_decoded_plainly(weights, way):
    model = packed(build(), weights)
    assert_decoded_plainly(model, weights)
    lade.variant(lade.invariant(model))
    assert not lade.supports(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_copies_compute_the_same_bits_also_without_the_library(weights, way, family, copied, monkeypatch):
    model, other = packed(build(family, torch.bfloat16), weights), HERE and way == "reference"
    take(monkeypatch, other)
    again = copied(model)
    assert compiled(model) == {way == "compiled"} and compiled(again) == {other}
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_saved_model_is_loaded_bit_for_bit_also_without_the_library(
    weights, way, family, dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr(folder, "_SHARD_BYTES", 10_000)
    model = packed(build(family, dtype), weights, keep=["layers.0.*"] if family == "llama" else ())
    lade.save_packed(model, tmp_path)
    index = json.loads((tmp_path / folder.INDEX).read_text())
    assert [len(index[each]) for each in KINDS] == [layers_in[each](model) for each in KINDS]
    assert len(list(tmp_path.glob("packed-*.safetensors"))) > 1
    take(monkeypatch, HERE and way == "reference")
    found = lade.load_packed(tmp_path)
    assert torch.equal(logits(found), logits(model)) and not found.training and integer_weights(found) == weights
    assert compiled(model) == {way == "compiled"} and compiled(found) == {HERE and way == "reference"}
    assert (layers_in[weights](found), kept_layers(found)) == (layers_in[weights](model), kept_layers(model))
    tied = [each.get_input_embeddings().weight is each.lm_head.weight for each in (found, model)]
    assert tied[0] == tied[1]
    with pytest.raises(OSError, match="no file named"):
        type(model).from_pretrained(tmp_path)


def test_a_state_has_what_the_integers_stand_for(weights, way, tmp_path):
    model = packed(build(), weights)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(again.get_submodule(name).weight, model.get_submodule(name).dense_weight())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_originals_come_back_if_they_were_kept(weights, way, family):
    model, before = build(family), build(family)
    lade.unpack(packed(model, weights, keep_original=True))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True))
    assert torch.equal(logits(model), logits(before))


def test_without_originals_unpacking_is_refused_and_nothing_changes(weights):
    model = packed(build("gpt2"), weights)
    assert model.lm_head.weight is model.get_input_embeddings().weight, "tied, so it stays"
    expected = logits(model)
    with pytest.raises(UnsupportedModelError, match=rf"{weights}, and its original weight was not kept; load the mod"):
        lade.unpack(model)
    assert torch.equal(logits(model), expected) and layers_in[weights](model) == packed_layers(model)
    with pytest.raises(UnsupportedModelError, match="float32"):
        model.half()
