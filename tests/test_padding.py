"""Padding of the embedded model: more parameters, the same bits."""

import pytest
import torch
from mtp_toys import llama_with_mtp
from transformers import AutoModelForCausalLM

import lade
from lade.embedded.files import model_path
from lade.embedded.padding import LAYERS, pad
from lade.errors import ConfigError
from lade.model.supports import supports


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def small(request):
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=request.param)


@pytest.fixture(scope="module")
def large(small):
    return pad(small, 20e6)


def test_the_logits_are_the_same_bits(small, large):
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(large(ids).logits, small(ids).logits)


def test_it_has_the_wanted_parameters_and_as_many_layers_as_it_says(small, large):
    assert large.num_parameters() == pytest.approx(20e6, rel=0.02)
    assert len(large.model.layers) == large.config.num_hidden_layers == small.config.num_hidden_layers + LAYERS
    assert small.config.num_hidden_layers == 6 and small.num_parameters() < 4e6, "the model itself is as it was"
    assert all(layer.self_attn.layer_idx == index for index, layer in enumerate(large.model.layers))


def test_none_of_the_added_work_can_be_left_out(large):
    """Noise is read and multiplied; only what is added to the hidden state is zero."""
    for layer in large.model.layers[-LAYERS:]:
        for name, weight in layer.named_parameters():
            assert bool(weight.any()) != name.endswith(("o_proj.weight", "down_proj.weight")), name


def test_a_padded_model_is_served_and_writes_the_text(small, large):
    ids = torch.arange(3, 40)[None]
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    config = lade.LookaheadConfig(budget=8)
    assert supports(large)
    if small.dtype == torch.float32:
        assert torch.equal(lade.generate(large, **arguments, lookahead=config), small.generate(**arguments))


def test_too_few_parameters_are_refused(small):
    with pytest.raises(ConfigError, match="give at least"):
        pad(small, 4e6)


def test_an_mtp_layer_of_the_small_checkpoint_drafts_for_the_padded_model(tmp_path):
    small = llama_with_mtp(tmp_path)
    large = pad(small, 1e6)
    ids = torch.arange(1, 20)[None]
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    output = lade.generate(large, **arguments, lookahead=lade.LookaheadConfig(mtp=True))
    assert torch.equal(output, small.generate(**arguments))
    assert supports(large).mtp.loaded, "mtp=True raises without a layer"
