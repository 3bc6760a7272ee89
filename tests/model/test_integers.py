"""Linear layers in int8 and in int4: rows that do not see each other, plain decoding's text, folders, refusals."""

import copy
import itertools
import json
import pickle

import pytest
import torch
from inside import hooks_of
from integer_toys import DTYPES, VOCABULARY, assert_decoded_plainly, assert_texts_are_plains, build, logits
from small_models import small_model
from spies import failing, watched
from torch import nn
from transformers.pytorch_utils import Conv1D

import lade
from lade.backends.cpu.invariant.weights import PaddedRows
from lade.backends.cpu.packing import blocks, folder, integers
from lade.backends.cpu.packing.integers import Int4Linear, Int8Linear, int4_codes, out_of_pairs, pairs_of, perplexity
from lade.backends.cpu.packing.integers import watched as errors_of
from lade.backends.cpu.packing.pack import int4_layers, int8_layers, integer_weights, kept_layers, packed_layers
from lade.backends.cpu.packing.weight import has_block_kernels
from lade.errors import ConfigError, InputError, UnsupportedModelError

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
    for (outputs, inputs), dtype in itertools.product([(1, 33), (40, 130)], DTYPES):
        layer = KINDS[weights](nn.Linear(inputs, outputs).to(dtype), keep=False)
        x = torch.randn(64, inputs).to(dtype) * 10 ** torch.linspace(-2, 2, 64)[:, None].to(dtype)
        together = layer(x)
        for rows in (1, 2, 3, 16, 17, 63):
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


def test_without_an_attention_that_rounds_alike_it_is_decoded_plainly(weights):
    model = packed(build(), weights)
    assert_decoded_plainly(model, weights)
    lade.variant(lade.invariant(model))
    assert not lade.supports(model)


def test_copies_compute_the_same_bits_also_without_the_library(weights, way, monkeypatch):
    model, other = packed(build("gpt2", torch.bfloat16), weights), HERE and way == "reference"
    take(monkeypatch, other)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert compiled(model) == {way == "compiled"} and compiled(again) == {other}
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16), ("qwen3", torch.float32)], ids=str
)
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


def difference(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# Codes


@pytest.mark.parametrize("shape", [(64, 64), (1, 33), (7, 3), (130, 777)], ids=str)
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


def test_a_layer_may_have_many_inputs():
    assert int4_layers(packed(nn.Sequential(nn.Linear(66_400, 1)).eval(), "int4")) == 1


# What a layer computes


@pytest.mark.parametrize("layer", [nn.Linear(24, 40), nn.Linear(24, 40, bias=False), Conv1D(40, 24)])
@torch.no_grad()
def test_it_is_the_product_of_the_rounded_factors(layer):
    x = torch.randn(5, 24)
    weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
    rounded = integers.int8_codes(weight).dense(torch.float64)
    values, scale = blocks.quantised(x)
    expected = (values.double() * scale).flatten(1)[:, :24] @ rounded.t()
    if layer.bias is not None:
        expected = expected + layer.bias
    model = packed(nn.Sequential(layer).eval(), "int8")
    assert torch.allclose(model(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert (rounded - weight).abs().max() <= weight.abs().max() / 254 * 1.003, "to the nearest of 255 steps"


@torch.no_grad()
def test_an_input_that_was_written_into_is_rounded_anew():
    first, second = packed(nn.Sequential(nn.Linear(24, 40), nn.Linear(24, 16)).eval(), "int8")
    x = torch.randn(3, 24)
    first(x)
    given = x.numpy()  # which tells nobody
    given *= -1
    assert torch.equal(second(x), second(x.clone()))


# What a model writes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_prompt_of_an_invariant_model_is_one_product_for_each_layer(dtype, monkeypatch):
    model = lade.invariant(packed(build(dtype=dtype), "int8", keep="lm_head"))
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert not any(isinstance(layer, PaddedRows) for layer in layers)
    fed = watched(monkeypatch, Int8Linear, "_product", lambda layer, x: x.shape[-2])
    logits(model, torch.randint(1, VOCABULARY, (1, 175)))
    assert fed == [175] * len(layers) != []


@pytest.mark.parametrize(
    ("weights", "dtype"), [("int8", torch.bfloat16), ("int8", torch.float32), ("int4", torch.bfloat16)], ids=str
)
def test_all_ways_of_decoding_write_the_tokens_of_plain_decoding(weights, dtype):
    """So wide that sums go beyond 2^24, which the usual toys' do not: the form of its inputs is the processor's."""
    sizes = {"hidden_size": 576, "intermediate_size": 640, "head_dim": 16, "max_position_embeddings": 512}
    model = small_model("llama", dtype, initializer_range=0.02, **sizes)
    wide = lade.invariant(packed(model, weights, keep="lm_head"))
    prompts = torch.randint(1, VOCABULARY, (3, 75))
    given = {"max_new_tokens": 16, "do_sample": False}
    alone = [wide.generate(prompt[None], **given) for prompt in prompts]
    for lookahead in (lade.LookaheadConfig(7, 5, 7), lade.LookaheadConfig(budget=16)):
        for prompt, expected in zip(prompts, alone, strict=True):
            found = lade.generate(wide, input_ids=prompt[None], lookahead=lookahead, **given)
            assert torch.equal(found, expected)
        assert torch.equal(lade.generate(wide, input_ids=prompts, lookahead=lookahead, **given), torch.cat(alone))
    with lade.Engine(wide, max_rows=2) as engine:
        handles = [engine.add(prompt.tolist(), **given) for prompt in prompts]
        assert all(torch.equal(each.result(), one) for each, one in zip(handles, alone, strict=True))


def test_kept_layers_stay_in_their_dtype():
    model = packed(build(), "int8", keep=["lm_head", "layers.0.*"])
    assert kept_layers(model) == [name for name in kept_layers(model) if "layers.0." in name or name == "lm_head"]
    assert len(kept_layers(model)) == 8 and int8_layers(model) == 7
    dense, whole = logits(build()), logits(packed(build(), "int8"))
    assert 0 < difference(logits(model), dense) < difference(whole, dense) < 0.1


# Folders


def test_folders_that_are_not_whole_are_refused(tmp_path):
    model = packed(build(), "int8")
    with pytest.raises(InputError, match="holds no packed model"):
        lade.load_packed(tmp_path)
    build().save_pretrained(tmp_path / "dense")
    with pytest.raises(InputError, match="holds another model: give an empty one"):
        lade.save_packed(model, tmp_path / "dense")
    with pytest.raises(UnsupportedModelError, match="no layer of this LlamaForCausalLM is in int8"):
        lade.save_packed(build(), tmp_path)
    lade.save_packed(model, tmp_path)
    index = json.loads((tmp_path / folder.INDEX).read_text())
    (tmp_path / folder.INDEX).write_text(json.dumps({**index, "format": 9}))
    with pytest.raises(InputError, match="format 9"):
        lade.load_packed(tmp_path)
    (tmp_path / folder.INDEX).write_text(json.dumps({**index, "files": []}))
    with pytest.raises(InputError, match="incomplete or damaged"):
        lade.load_packed(tmp_path)


# Refusals


def infinite():
    layer = nn.Linear(8, 8)
    layer.weight.data[3, 3] = float("inf")
    return nn.Sequential(nn.Linear(8, 8), layer).eval()


def kept_head():
    return packed(build(), "int8", keep="lm_head")


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (build, {"weights": "int2"}, ConfigError, "give 'int8' or 'int4'"),
        (build, {"weights": "int8", "keep": "lm_hed"}, ConfigError, "lm_head"),
        (build, {"weights": "int4", "keep": "lm_hed"}, ConfigError, "lm_head"),
        (build, {"keep": ["lm_head"]}, ConfigError, "with weights='int8' or 'int4' only"),
        (kept_head, {"weights": "int8"}, UnsupportedModelError, r"with keep=\['lm_head'\]"),
        (kept_head, {"weights": "int4"}, UnsupportedModelError, "already packed"),
        (lambda: lade.pack(build(), min_weights=1), {"weights": "int8"}, UnsupportedModelError, "lade.unpack"),
        (lambda: lade.pack(build(), min_weights=1), {"weights": "int4"}, UnsupportedModelError, "already packed"),
        (infinite, {"weights": "int8"}, UnsupportedModelError, "'1' has weights that are not finite; keep"),
        (infinite, {"weights": "int4"}, UnsupportedModelError, "not finite; keep"),
        (lambda: build(dtype=torch.float64), {"weights": "int8"}, UnsupportedModelError, "float64"),
    ],
    ids=range(11),
)
def test_what_cannot_be_is_refused_before_the_work(make, options, error, message):
    model = make()
    parts = list(model.modules())
    with pytest.raises(error, match=message):
        lade.pack(model, min_weights=1, **options)
    assert list(model.modules()) == parts


def test_interrupted_it_leaves_a_model_that_can_be_packed_again(monkeypatch):
    model = build()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        failing(patch, Int8Linear, "_pack_weight", KeyboardInterrupt, calls={4})
        packed(model, "int8")
    assert int8_layers(model) == 3
    assert torch.equal(logits(packed(model, "int8")), logits(packed(build(), "int8")))


# What it costs


@pytest.mark.parametrize(("weights", "least", "most"), [("int8", 0.001, 0.02), ("int4", 0.03, 0.15)])
def test_errors_are_told_by_layer(weights, least, most):
    model = packed(build(), weights, keep_original=True, keep="lm_head")
    with errors_of(model) as errors:
        logits(model)
    assert [error.name for error in errors] == [
        name for name, module in model.named_modules() if isinstance(module, KINDS[weights])
    ]
    assert all(least < error.weights < most and least < error.outputs < 5 * most for error in errors)
    assert not hooks_of(model)


@torch.no_grad()
def test_perplexity_is_that_of_the_models_own_loss():
    model, ids = build(), torch.randint(1, VOCABULARY, (1, 20))
    assert perplexity(model, ids[0].tolist(), 64) == pytest.approx(model(ids, labels=ids).loss.exp().item())
    halves = [model(part, labels=part).loss for part in ids.split(10, 1)]
    assert perplexity(model, ids[0].tolist(), 10) == pytest.approx(torch.stack(halves).mean().exp().item())
