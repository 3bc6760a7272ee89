"""Quantised models: served where only their weights are quantised, and refused where their inputs are, too."""

from __future__ import annotations

import functools
from typing import Any

import accelerate
import peft
import pytest
import torch
from comparing import CONFIGS, PAPER, assert_refused, assert_same, batch, lookahead, plain, prompt
from quantised_layers import (
    InBfloat16,
    OneTokenOtherwise,
    OutlierColumns,
    PerTensor,
    PerToken,
    PerTokenFloat8,
    Smoothed,
    Static,
    StaticFloat8,
    Unsteady,
    WeightsOnly,
    coded,
    coded_toy,
    linears,
    toy,
)
from spies import watched
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.backends.cuda_graphs.pool import capture_setup
from lade.backends.trials import backend as layer_trial
from lade.backends.trials.backend import BACKEND as TRIALS
from lade.embedded import model_path
from lade.model.runner import EagerRunner
from lade.tuning.cost_cache import key_of
from lade_lab import inflate

# PEFT asks transformers for a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OTHERS = "gives a token another result beside other tokens: quantise the weights only"
ROUNDS = (
    r"rounds its inputs \(by 0\.\d+ of their size\), which magnifies other rounding errors: quantise the weights only"
)
REFUSED = {
    PerTensor: OTHERS, OutlierColumns: OTHERS, PerToken: ROUNDS, PerTokenFloat8: ROUNDS, Static: ROUNDS,
    StaticFloat8: ROUNDS, Smoothed: ROUNDS,
}  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EXACT = [torch.float64, torch.float32]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that were tried."""
    return watched(monkeypatch, layer_trial, "_trial_refusal", lambda layer, model: layer)


# --- served ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("make", [functools.partial(toy, WeightsOnly), coded_toy], ids=["layers", "tensors"])
def test_quantised_weights_are_served_token_for_token(make, dtype):
    model = make(dtype=dtype)
    assert assert_same(model, prompt(20), CONFIGS[:3]).tokens_per_step > 1
    rows = batch(5, 20, 9)
    assert_same(model, rows["ids"], attention_mask=rows["attention_mask"], pad_token_id=0, max_new_tokens=30)
    assert_same(model, prompt(20), num_beams=3, max_new_tokens=20)
    assert_same(model, prompt(20), do_sample=True, temperature=0.7, max_new_tokens=30)


@pytest.mark.one_in(4)
@EACH_DTYPE
@pytest.mark.parametrize("kind", [WeightsOnly, Unsteady])
def test_what_rounds_its_weights_only_is_supported(kind, dtype):
    for seed in range(5):
        assert lade.supports(toy(kind, dtype, seed=seed)), seed


def test_layers_of_torch_and_packed_ones_are_not_tried(trials):
    assert lade.supports(toy()) and lade.supports(lade.pack(toy(), min_weights=1)) and not trials


def test_a_layer_under_the_hooks_of_accelerate_is_torchs_own(trials):
    model = accelerate.cpu_offload(toy(), execution_device=torch.device("cpu"))
    assert hasattr(model.lm_head, "_hf_hook") and lade.supports(model) and not trials
    model = accelerate.cpu_offload(toy(WeightsOnly), execution_device=torch.device("cpu"))
    assert lade.supports(model) and len(trials) == len(linears(model))


def test_the_architectures_own_layers_are_not_tried_unless_their_weights_are_quantised(trials):
    class Router(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).relu(), x

    model = toy()
    model.__class__ = type("OwnLlama", (type(model),), {"__module__": "remote.modeling_own"})
    model.model.router = Router(8, 8)
    assert "it made tuple" in lade.supports(model).reason
    trials.clear()
    for home in ("remote.modeling_own", "transformers.models.llama4.modeling_llama4"):
        Router.__module__ = home
        assert lade.supports(model) and not trials
    model.model.router.weight = coded(model.model.router.weight)
    assert not lade.supports(model) and trials == [model.model.router]


def test_a_layer_of_zeros_is_served():
    model = toy(WeightsOnly)
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    assert lade.supports(model)


def test_a_layer_is_tried_once_and_again_with_another_weight_or_dtype(trials):
    model = toy(WeightsOnly)
    assert lade.supports(model) and lade.supports(model) and trials == linears(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    assert lade.supports(model) and trials == [*linears(model), model.lm_head]
    trials.clear()
    assert lade.supports(model.bfloat16()) and trials == linears(model)


def test_a_trial_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    assert lade.supports(toy(WeightsOnly, seed=3)) and not lade.supports(toy(PerToken, seed=3))
    assert torch.equal(torch.random.get_rng_state(), state)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(22)
@EACH_DTYPE
@pytest.mark.parametrize("kind", REFUSED)
def test_quantised_inputs_are_refused(kind, dtype):
    for seed in range(5):
        found = lade.supports(toy(kind, dtype, seed=seed))
        assert not found and found.model == "LlamaForCausalLM"
    said = rf"its layer 'model\.layers\.0\.self_attn\.q_proj' \({kind.__name__}\) {REFUSED[kind]}"
    assert_refused(toy(kind, dtype), prompt(10), said, max_new_tokens=20)


@pytest.fixture
def untried(monkeypatch):
    """Without the trial that refuses."""
    monkeypatch.setattr(TRIALS, "linear_refusal", lambda model: "")


@pytest.mark.parametrize("kind", [PerTensor, OutlierColumns])
def test_what_sees_other_tokens_would_make_other_texts(kind, untried):
    texts = [(toy(kind, seed=seed), prompt(20, seed=seed)) for seed in range(4)]
    assert not all(torch.equal(lookahead(model, ids), plain(model, ids)) for model, ids in texts)


@pytest.mark.slow
def test_what_rounds_each_token_for_itself_would_make_other_texts(untried):
    """In float32, and with trained weights: the last places decide on which step an input lands."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    prompts = ("class Stack:\n", "import os\n")
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in prompts]

    def parted(kind: type[nn.Linear]) -> int:
        model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
        for layer in linears(model):
            layer.__class__ = kind
        pairs = [[decode(model, ids, max_new_tokens=120) for decode in (lookahead, plain)] for ids in texts]
        return sum(not torch.equal(*pair) for pair in pairs)

    assert parted(WeightsOnly) == 0 < parted(PerTokenFloat8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchs_own_dynamic_quantisation_is_refused():
    model = torch.ao.quantization.quantize_dynamic(toy(), {nn.Linear}, dtype=torch.qint8)
    assert OTHERS in lade.supports(model).reason


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize(
    ("kind", "said"), [(OneTokenOtherwise, ROUNDS), (InBfloat16, r"computes in 16 bits.*bfloat16")]
)
def test_a_layer_that_is_less_exact_than_its_model_is_refused(kind, said, dtype):
    with pytest.raises(lade.UnsupportedModelError, match=said):
        lookahead(toy(kind, dtype), prompt(10), PAPER)
    assert lade.supports(toy(InBfloat16, torch.bfloat16))


@pytest.mark.parametrize("place", ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "lm_head"])
@pytest.mark.parametrize("around", [nn.Linear, WeightsOnly])
def test_one_layer_among_many_is_found(place, around):
    model = toy(around)
    model.get_submodule(place).__class__ = PerToken
    assert f"its layer {place!r} (PerToken) rounds" in lade.supports(model).reason
    model.get_submodule(place).__class__ = around
    model.get_submodule(place).weight = nn.Parameter(model.get_submodule(place).weight.detach().clone())
    assert lade.supports(model)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_a_forward_of_ones_own_is_tried(bound, hooked):
    """As compressed-tensors puts it onto torch's own layers; accelerate's hooks may come on top."""

    def rounding(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return linear(PerToken.fed(layer, x), layer.weight)

    model = toy()
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = rounding.__get__(layer) if bound else functools.partial(rounding, layer)
    if hooked:
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    assert "up_proj' (Linear) rounds" in lade.supports(model).reason


def test_a_wrapped_weight_is_named():
    class Rounding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(PerToken.fed(self, x))  # type: ignore[arg-type]

    model = coded_toy()
    model.lm_head.__class__ = Rounding
    assert "its layer 'lm_head' (Rounding of Coded) rounds" in lade.supports(model).reason


@pytest.mark.parametrize(("kind", "served"), [(WeightsOnly, True), (PerToken, False)])
def test_adapters_on_quantised_layers_are_looked_into(kind, served):
    model = peft.get_peft_model(toy(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.base_layer.__class__ = kind
    assert bool(lade.supports(model)) == served
    if served:
        assert_same(model, prompt(20))
    else:
        assert "q_proj.base_layer' (PerToken) rounds" in lade.supports(model).reason


def test_quantised_experts_that_are_no_linear_layers_are_refused():
    class Experts(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 4, dtype=dtype), requires_grad=False)

    model = toy()
    model.model.layers[0].mlp.experts = Experts(torch.float32)
    assert lade.supports(model)
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        model.model.layers[0].mlp.experts = Experts(dtype)
        assert "mlp.experts' (Experts) has quantised weights and cannot be tried" in lade.supports(model).reason
    Experts.__name__ = "Mxfp4GptOssExperts"  # by the source of transformers they multiply what they are fed as it is
    assert lade.supports(model)


def test_quantised_embeddings_only_look_up(trials):
    class Embedding(nn.Module):
        num_embeddings = 48

        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.weight.codes[ids] * self.weight.scales[ids]

    for kind in (Embedding, type("Own", (Embedding, nn.Embedding), {})):
        model = toy()
        model.model.embed_tokens = Embedding(coded(model.model.embed_tokens.weight))
        model.model.embed_tokens.__class__ = kind
        assert lade.supports(model) and not trials
        assert_same(model, prompt(20))


def _raises(layer: Any, x: torch.Tensor) -> Any:
    raise RuntimeError("no kernel here\nand more")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (_raises, "cannot be tried: RuntimeError: no kernel here"),
        (lambda layer, x: (linear(x, layer.weight), None), "cannot be tried: TypeError: it made tuple of one tensor"),
        (lambda layer, x: linear(x, layer.weight) * torch.nan, OTHERS),
        (lambda layer, x: linear(x, layer.weight).relu(), ROUNDS),
        (lambda layer, x: linear(x / x.abs().amax(-1, keepdim=True), layer.weight), r"rounds its inputs \(by nan"),
    ],
    ids=["raises", "tuple", "not a number", "not linear", "not a number for zeros"],
)
def test_what_is_no_linear_layer_after_all_is_refused(forward, said):
    model = toy()
    model.lm_head.__class__ = type("Odd", (nn.Linear,), {"forward": forward})
    with pytest.raises(lade.UnsupportedModelError, match=r"its layer 'lm_head' \(Odd\) " + said) as caught:
        lookahead(model, prompt(10), PAPER)
    assert "and more" not in str(caught.value)


# --- what else looks at weights --------------------------------------------------------------------------------------


def test_a_captured_pass_is_dropped_when_codes_lie_elsewhere():
    model = coded_toy()
    before = capture_setup(model)
    assert capture_setup(model) == before
    weight = model.lm_head.weight
    weight.codes = weight.codes.clone()
    assert capture_setup(model) != before


def test_a_quantised_model_has_a_step_cost_of_its_own():
    def key(model: Any) -> dict[str, object]:
        return key_of(model, EagerRunner(model, lade.supports(model).require(), model.generation_config))

    keys = [key(toy()), key(toy(WeightsOnly)), key(coded_toy())]
    assert key(coded_toy()) == keys[2]
    grouped = coded_toy()
    for layer in linears(grouped):
        layer.weight.scales = layer.weight.scales.repeat(1, layer.in_features)  # more of them
    keys.append(key(grouped))
    assert all(keys.count(each) == 1 for each in keys)
    counted = key(coded_toy())["weights"]
    assert isinstance(counted, dict) and set(counted) == {"Parameter float32", "Coded float32"}
    assert counted["Coded float32"] == sum(layer.weight.numel() + 4 * layer.out_features for layer in linears(toy()))


def test_a_quantised_model_is_neither_packed_nor_inflated():
    model = coded_toy()
    with pytest.raises(lade.UnsupportedModelError, match=r"the weight of layer .* is a Coded; leave it unpacked"):
        lade.pack(model, min_weights=1)
    with pytest.raises(lade.UnsupportedModelError, match="a quantized model cannot be inflated; load the"):
        inflate(model, 1e6)
