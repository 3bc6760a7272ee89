"""The larger model computes the small one's function, and is as large and as full as it says."""

import pytest
import torch
from small_models import small_model as from_config
from transformers import AutoModelForCausalLM

from lade.embedded import model_path
from lade.errors import ConfigError, UnsupportedModelError
from lade.testing import toy_model
from lade_lab import inflate
from lade_lab.inflation import Growth, Wanted, choose

SIZES = {"layers": 4, "hidden_factor": 4, "intermediate_size": 200}
FLOAT_ERROR = {torch.float64: 1e-10, torch.float32: 1e-5}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
CONFIGS = {
    "llama": {},
    "one key head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large eps": {"rms_norm_eps": 0.3},
    "narrow heads": {"head_dim": 4},
    "scaled rotary": {"rope_parameters": SCALED, "max_position_embeddings": 64},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen2 sliding": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "rms_norm_eps": 0.1},
}
FAMILIES = pytest.mark.parametrize("family", CONFIGS)


def small_model(family="llama", dtype=torch.float64):
    """Random weights, norms and biases too, so that a wrong scale shows."""
    first = family.partition(" ")[0]
    model = from_config(first if first in ("mistral", "qwen2", "qwen3") else "llama", dtype, **CONFIGS[family])
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
    return model


def logits(model):
    """`[2, 24, V]` of two texts."""
    ids = torch.arange(48).view(2, 24) * 7 % 48
    with torch.no_grad():
        return model(ids).logits


def error(model, other):
    """The largest difference of logits, in units of the largest logit."""
    expected = logits(model)
    return (logits(other) - expected).abs().max() / expected.abs().max()


def greedy(model):
    ids = torch.tensor([[1, 2, 3]])
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40).tolist()


@pytest.mark.one_in(11)
@FAMILIES
@pytest.mark.parametrize("dtype", FLOAT_ERROR, ids=str)
def test_it_computes_the_same_function(family, dtype):
    model = small_model(family, dtype)
    large = inflate(model, None, **SIZES)
    assert type(large) is type(model) and large.dtype == dtype and not large.training
    assert error(model, large) <= FLOAT_ERROR[dtype]
    assert greedy(large) == greedy(model)


@pytest.mark.parametrize("factor", [1, 4, 16])
def test_any_power_of_four_will_do(factor):
    model = small_model(dtype=torch.float32)
    large = inflate(model, None, **SIZES | {"hidden_factor": factor})
    assert large.config.hidden_size == 32 * factor and large.config.num_attention_heads == 4 * factor
    assert large.model.layers[0].self_attn.head_dim == 8
    assert error(model, large) <= 1e-5


def test_the_embedded_models_scores_are_near_in_its_own_type():
    model = AutoModelForCausalLM.from_pretrained(model_path())
    large = inflate(model, 30e6, hidden_factor=4)
    assert large.dtype == torch.bfloat16
    expected = logits(model)
    assert (logits(large) - expected).abs().max() <= expected.abs().max() / 32  # a few units in the last place


@pytest.mark.one_in(2)
@FAMILIES
@pytest.mark.parametrize("params", [60_000, 1e6, 10e6])
def test_the_number_of_parameters_is_met(family, params):
    model = small_model(family)
    sizes = choose(model, Wanted(params))
    total = Growth.of(model, sizes.hidden_factor).total(sizes.layers, sizes.intermediate_size)
    assert abs(total - params) <= 0.03 * params
    if params <= 1e6:
        assert inflate(model, params).num_parameters() == total


def test_proportions_are_usual():
    model = AutoModelForCausalLM.from_pretrained(model_path())
    for params in (100e6, 500e6, 1e9, 7e9):
        sizes = choose(model, Wanted(params))
        hidden = sizes.hidden_factor * model.config.hidden_size
        assert 12 <= sizes.layers <= 32 and 1.8 <= sizes.intermediate_size / hidden <= 8
        assert sizes.intermediate_size % 64 == 0


def test_given_sizes_are_kept_the_others_chosen_and_its_own_size_leaves_the_model_as_it_is():
    model = small_model()
    for field, value in SIZES.items():
        assert getattr(choose(model, Wanted(1e6, **{field: value})), field) == value
    assert vars(choose(model, Wanted(None, **SIZES))) == SIZES
    model = small_model()
    large = inflate(model, model.num_parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), large.parameters(), strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "biases", "qwen3"])
def test_new_weights_are_noise_wherever_the_function_allows_it(family):
    large = inflate(small_model(family), None, **SIZES)
    for name, weight in large.named_parameters():
        new = torch.ones_like(weight, dtype=torch.bool)
        if name in (own := dict(small_model(family).named_parameters())):
            new[tuple(slice(size) for size in own[name].shape)] = False
        zero = any(part in name for part in ("o_proj", "down_proj", "embed_tokens"))
        assert bool((weight[new] == 0).all()) == (zero or not new.any()), name
        assert zero or not (weight == 0).any(), name
        assert weight.isfinite().all()


def test_tied_embeddings_stay_tied():
    large = inflate(small_model("tied"), None, **SIZES)
    assert large.lm_head.weight is large.model.embed_tokens.weight
    untied = inflate(small_model(), None, **SIZES)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_the_seed_decides_the_noise_and_the_small_model_and_torchs_generator_stay_as_they_are():
    model = small_model()
    state = torch.get_rng_state()
    first, again, other = (inflate(model, 1e6, seed=seed).model.layers[-1].mlp.up_proj.weight for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)
    model, same = small_model("qwen2 sliding"), small_model("qwen2 sliding")
    inflate(model, None, **SIZES, dtype=torch.bfloat16)
    assert model.config.to_dict() == same.config.to_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_dtype_and_device_are_those_asked_for_and_the_generation_config_is_copied():
    large = inflate(small_model(), 1e6, dtype=torch.bfloat16, device="cpu")
    assert {weight.dtype for weight in large.parameters()} == {torch.bfloat16} and large.config.dtype == torch.bfloat16
    assert not any(tensor.is_meta for tensor in [*large.parameters(), *large.buffers()])
    model = small_model()
    model.generation_config.eos_token_id = [3, 5]
    large = inflate(model, 1e6)
    assert large.generation_config.eos_token_id == [3, 5]
    assert large.generation_config is not model.generation_config


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2 sliding", "qwen3"])
def test_saved_and_loaded_it_is_the_same(family, tmp_path):
    large = inflate(small_model(family), None, **SIZES)
    large.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float64 and loaded.num_parameters() == large.num_parameters()
    assert torch.equal(logits(loaded), logits(large))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": 1000}, "params=1000 is not valid: the model has 18"),
        ({"params": float("inf")}, "params=inf is not valid"),
        ({"params": float("nan")}, "params=nan is not valid"),
        ({"params": 1e30}, r"params=1e\+30 is not valid: the memory of cpu holds .* in torch.float64: give fewer"),
        ({"params": 1e15}, "params=1000000000000000.0 is not valid: the memory of cpu holds"),
        ({"params": None, "layers": 4}, "params=None is not valid: give a number, or layers, hidden_factor"),
        ({"hidden_factor": 2}, "hidden_factor=2 is not valid: give a power of four"),
        ({"hidden_factor": 0}, "hidden_factor=0 is not valid"),
        ({"layers": 1}, "layers=1 is not valid: the model itself has 2"),
        ({"intermediate_size": 47}, "intermediate_size=47 is not valid: the model itself has 48"),
        (SIZES, r"params=500000000.0 is not valid: no total within 3% of it has hidden_factor=4, layers=4"),
        ({"params": 1e5, "hidden_factor": 64}, "no total within 3% of it has hidden_factor=64"),
        ({"params": 1e6, "dtype": torch.int8}, "dtype=torch.int8 is not valid"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        inflate(small_model(), **arguments)


def test_models_of_other_classes_quantized_and_offloaded_ones_are_refused():
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot be inflated; give one of LlamaForCausalLM"):
        inflate(toy_model("gpt2"))
    with pytest.raises(UnsupportedModelError, match="Linear cannot be inflated"):
        inflate(torch.nn.Linear(2, 2))
    model = small_model()
    with pytest.raises(UnsupportedModelError, match=r"weight is not .* without quantization, adapters or off"):
        inflate(model.to("meta"))
    model.hf_quantizer = object()
    with pytest.raises(UnsupportedModelError, match="a quantized model cannot be inflated; load the model without"):
        inflate(model)


def test_weights_that_the_config_does_not_promise_are_refused():
    for name, value in (("extra", torch.zeros(3)), ("weight", torch.zeros(3, 3)), ("weight", None)):
        model = small_model()
        setattr(model.model.layers[1].mlp.up_proj, name, None if value is None else torch.nn.Parameter(value))
        with pytest.raises(UnsupportedModelError, match=rf"layers.1.mlp.up_proj.{name} is not the weight"):
            inflate(model)
