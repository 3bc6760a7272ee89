"""Linear layers in int4: the kernel and its definition, codes, the text of plain decoding, folders, and refusals."""

import pytest
import torch
from integer_toys import DTYPES, VOCABULARY, build
from torch import nn
from transformers.pytorch_utils import Conv1D

import lade
from lade.backends.cpu.packing.integers import int4_codes, out_of_pairs, pairs_of, watched
from lade.backends.cpu.packing.pack import int4_layers
from lade.backends.cpu.packing.weight import has_block_kernels
from lade.errors import ConfigError, UnsupportedModelError

SHAPES = [(64, 64), (1, 33), (7, 3), (300, 64), (64, 300), (130, 777)]


def packed(model, **options):
    return lade.pack(model, weights="int4", min_weights=1, **options)


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


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_engines_write_the_tokens_of_plain_decoding(dtype, rounds_alike):
    model = lade.invariant(packed(build(dtype=dtype), keep="lm_head"))
    prompts = torch.randint(1, VOCABULARY, (3, 75))
    given = {"max_new_tokens": 24, "do_sample": False}
    alone = [model.generate(prompt[None], **given) for prompt in prompts]
    with lade.Engine(model, max_rows=2) as engine:
        handles = [engine.add(prompt.tolist(), **given) for prompt in prompts]
        assert all(torch.equal(each.result(), one) for each, one in zip(handles, alone, strict=True))


@torch.no_grad()
def test_errors_are_told_by_layer_and_bytes_are_those_of_45_bits():
    layer = nn.Linear(640, 480)
    model = packed(nn.Sequential(layer, Conv1D(32, 480)).eval(), keep_original=True)
    with watched(model) as errors:
        model(torch.randn(9, 640))
    assert [error.name for error in errors] == ["0", "1"]
    assert all(0.05 < error.weights < 0.1 and 0.05 < error.outputs < 0.15 for error in errors)
    if has_block_kernels():
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
