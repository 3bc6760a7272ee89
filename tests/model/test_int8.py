"""Linear layers in int8: rows that do not see each other, the text of plain decoding, folders, and what is refused."""

import json

import pytest
import torch
from inside import hooks_of
from integer_toys import VOCABULARY, build, logits
from small_models import small_model
from spies import failing, watched
from torch import nn
from transformers.pytorch_utils import Conv1D

import lade
from lade.backends.cpu.invariant.weights import PaddedRows
from lade.backends.cpu.packing import blocks, folder, integers
from lade.backends.cpu.packing.integers import Int8Linear, perplexity
from lade.backends.cpu.packing.integers import watched as errors_of
from lade.backends.cpu.packing.pack import int8_layers, kept_layers
from lade.errors import ConfigError, InputError, UnsupportedModelError

pytestmark = pytest.mark.by_processor


def packed(model, **options):
    return lade.pack(model, weights="int8", min_weights=1, **options)


def difference(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


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
    model = packed(nn.Sequential(layer).eval())
    assert torch.allclose(model(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert (rounded - weight).abs().max() <= weight.abs().max() / 254 * 1.003, "to the nearest of 255 steps"


@torch.no_grad()
def test_an_input_that_was_written_into_is_rounded_anew():
    first, second = packed(nn.Sequential(nn.Linear(24, 40), nn.Linear(24, 16)).eval())
    x = torch.randn(3, 24)
    first(x)
    given = x.numpy()  # which tells nobody
    given *= -1
    assert torch.equal(second(x), second(x.clone()))


# What a model writes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_prompt_of_an_invariant_model_is_one_product_for_each_layer(dtype, monkeypatch):
    model = lade.invariant(packed(build(dtype=dtype), keep="lm_head"))
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert not any(isinstance(layer, PaddedRows) for layer in layers)
    fed = watched(monkeypatch, Int8Linear, "_product", lambda layer, x: x.shape[-2])
    logits(model, torch.randint(1, VOCABULARY, (1, 175)))
    assert fed == [175] * len(layers) != []


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def wide(request):
    """So wide that sums go beyond 2^24, which the usual toys' do not: the form of its inputs is the processor's."""
    sizes = {"hidden_size": 576, "intermediate_size": 640, "head_dim": 16, "max_position_embeddings": 512}
    model = small_model("llama", request.param, initializer_range=0.02, **sizes)
    return lade.invariant(packed(model, keep="lm_head"))


def test_all_ways_of_decoding_write_the_tokens_of_plain_decoding(wide):
    prompts = torch.randint(1, VOCABULARY, (3, 75))
    given = {"max_new_tokens": 24, "do_sample": False}
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
    model = packed(build(), keep=["lm_head", "layers.0.*"])
    assert kept_layers(model) == [name for name in kept_layers(model) if "layers.0." in name or name == "lm_head"]
    assert len(kept_layers(model)) == 8 and int8_layers(model) == 7
    dense, whole = logits(build()), logits(packed(build()))
    assert 0 < difference(logits(model), dense) < difference(whole, dense) < 0.1


# Folders


def test_folders_that_are_not_whole_are_refused(tmp_path):
    model = packed(build())
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


def of(layer):
    return nn.Sequential(nn.Linear(8, 8), layer).eval()


def infinite():
    layer = nn.Linear(8, 8)
    layer.weight.data[3, 3] = float("inf")
    return of(layer)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (build, {"weights": "int2"}, ConfigError, "give 'int8' or 'int4'"),
        (build, {"weights": "int8", "keep": "lm_hed"}, ConfigError, "lm_head"),
        (build, {"keep": ["lm_head"]}, ConfigError, "with weights='int8' or 'int4' only"),
        (
            lambda: packed(build(), keep="lm_head"),
            {"weights": "int8"},
            UnsupportedModelError,
            r"with keep=\['lm_head'\]",
        ),
        (lambda: lade.pack(build(), min_weights=1), {"weights": "int8"}, UnsupportedModelError, "lade.unpack"),
        (infinite, {"weights": "int8"}, UnsupportedModelError, "'1' has weights that are not finite; keep"),
        (lambda: build(dtype=torch.float64), {"weights": "int8"}, UnsupportedModelError, "float64"),
    ],
    ids=range(7),
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
        packed(model)
    assert int8_layers(model) == 3
    assert torch.equal(logits(packed(model)), logits(packed(build())))


# What it costs


def test_errors_are_told_by_layer():
    model = packed(build(), keep_original=True, keep="lm_head")
    with errors_of(model) as errors:
        logits(model)
    assert [error.name for error in errors] == [
        name for name, module in model.named_modules() if isinstance(module, Int8Linear)
    ]
    assert all(0.001 < error.weights < 0.02 and 0.001 < error.outputs < 0.1 for error in errors)
    assert not hooks_of(model)


@torch.no_grad()
def test_perplexity_is_that_of_the_models_own_loss():
    model, ids = build(), torch.randint(1, VOCABULARY, (1, 20))
    assert perplexity(model, ids[0].tolist(), 64) == pytest.approx(model(ids, labels=ids).loss.exp().item())
    halves = [model(part, labels=part).loss for part in ids.split(10, 1)]
    assert perplexity(model, ids[0].tolist(), 10) == pytest.approx(torch.stack(halves).mean().exp().item())
