"""Quantised by the libraries themselves: torchao and bitsandbytes, directly and as transformers loads them.

Neither is needed by this package: `make test-quantised` fetches them. On a GPU whatever is installed there is tested.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import PAPER, assert_near_ties, assert_same, batch, lookahead, plain, prompt
from families import VOCABULARY
from pretend import DEVICES, NO_CUDA
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import lade
from lade.cli.loading.from_pretrained import SCHEMES, quantization_config
from lade_lab import inflate

# What these libraries warn of while they are imported and used is theirs.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("torchao", "bitsandbytes")),
        reason="neither torchao nor bitsandbytes is installed: make test-quantised",
    ),
]
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
CONFIGS = (PAPER, lade.LookaheadConfig(budget=24), lade.LookaheadConfig())
OTHERS, ROUNDS = "beside other tokens: quantise the weights only", "rounds its inputs"
Make = Callable[[Any], Any]


def torchao(make: Make) -> Make:
    """Load with the config that is made of `torchao.quantization`."""

    def loading(dtype: torch.dtype) -> TorchAoConfig:
        return TorchAoConfig(make(pytest.importorskip("torchao.quantization", reason="torchao is not installed")))

    return loading


def bitsandbytes(**fields: Any) -> Make:
    def make(dtype: torch.dtype) -> BitsAndBytesConfig:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        compute = {"bnb_4bit_compute_dtype": dtype} if "load_in_4bit" in fields else {}
        return BitsAndBytesConfig(**fields, **compute)

    return make


WEIGHTS_ONLY = {
    "torchao int8": torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao int8 in groups": torchao(lambda q: q.Int8WeightOnlyConfig(granularity=q.PerGroup(32))),
    "torchao int4": torchao(lambda q: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32))),
    "torchao float8": torchao(lambda q: q.Float8WeightOnlyConfig()),
}
FOUR_BITS = {
    f"bitsandbytes {kind}{' twice' * twice}": bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=twice
    )
    for kind, twice in (("nf4", False), ("fp4", False), ("nf4", True))
}
REFUSED = {
    "torchao int8 for each token": (torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig()), ROUNDS),
    "torchao int8 for all tokens": (
        torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig(granularity=q.PerTensor())),
        OTHERS,
    ),
    "torchao int8 and int4": (
        torchao(
            lambda q: q.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=torch.int4, weight_granularity=q.PerGroup(32)
            )
        ),
        ROUNDS,
    ),
    "bitsandbytes int8": (bitsandbytes(load_in_8bit=True), OTHERS),
    "bitsandbytes int8 without outliers": (bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0), ROUNDS),
}
ON_GPUS_ONLY = {
    "torchao int4, tiled": torchao(lambda q: q.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")),
    "torchao int4": torchao(lambda q: q.Int4WeightOnlyConfig()),
}
FLOAT8 = {
    "for each token": torchao(lambda q: q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerRow())),
    "for all tokens": torchao(lambda q: q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerTensor())),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, large enough for groups and blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **sizes, bos_token_id=None, eos_token_id=None)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def loaded(folder: Path, make: Make, dtype: torch.dtype, device: str = "cpu") -> Any:
    model: Any = LlamaForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map=device, quantization_config=make(dtype)
    )
    return model


@EACH_DEVICE
@pytest.mark.parametrize("make", WEIGHTS_ONLY.values(), ids=WEIGHTS_ONLY)
def test_quantised_weights_are_served_token_for_token(make, device, folder):
    model = loaded(folder, make, torch.float32, device)
    ids = prompt(20).to(device)
    assert assert_same(model, ids, CONFIGS).tokens_per_step > 1
    rows = batch(5, 20, 9)
    assert_same(model, rows["ids"].to(device), CONFIGS[:1], attention_mask=rows["attention_mask"].to(device),
                pad_token_id=0)  # fmt: skip
    assert_same(model, ids, [PAPER, lade.LookaheadConfig()], num_beams=3, max_new_tokens=30)
    assert_same(model, ids, do_sample=True, temperature=0.7)


@EACH_DEVICE
@pytest.mark.parametrize("make", [*WEIGHTS_ONLY.values(), *FOUR_BITS.values()], ids=[*WEIGHTS_ONLY, *FOUR_BITS])
def test_in_low_precision_texts_part_at_near_ties_only(make, device, folder):
    assert_near_ties(loaded(folder, make, torch.bfloat16, device), prompt(20).to(device), CONFIGS)


@pytest.mark.parametrize("make", FOUR_BITS.values(), ids=FOUR_BITS)
def test_four_bits_in_float32_are_served_where_they_are_computed_in_float32(make, folder):
    """On some processors bitsandbytes computes in bfloat16 whatever it is asked for."""
    model = loaded(folder, make, torch.float32)
    support = lade.supports(model)
    if support:
        assert_same(model, prompt(20), CONFIGS)
    else:
        assert "(Linear4bit of Params4bit) computes in 16 bits, and the model is in float32" in support.reason


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_quantised_inputs_are_refused(make, said, dtype, device, folder):
    model, ids = loaded(folder, make, dtype, device), prompt(10).to(device)
    with pytest.raises(lade.UnsupportedModelError, match=said):
        lookahead(model, ids, PAPER)
    with pytest.warns(lade.FallbackWarning, match=said):
        assert_same(model, ids, ["auto"], max_new_tokens=10)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("make", ON_GPUS_ONLY.values(), ids=ON_GPUS_ONLY)
def test_kernels_for_gpus_are_served(make, folder):
    try:
        model = loaded(folder, make, torch.bfloat16, "cuda")
    except (ImportError, NotImplementedError) as problem:
        pytest.skip(f"not here: {problem}")
    assert_near_ties(model, prompt(20).cuda(), CONFIGS)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("make", FLOAT8.values(), ids=FLOAT8)
def test_float8_inputs_are_refused(make, folder):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    assert not lade.supports(loaded(folder, make, torch.bfloat16, "cuda"))


def test_layers_that_were_quantised_in_place_are_left_unpacked(folder):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert lade.supports(model)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    assert ROUNDS in lade.supports(model).reason, "asked again, as its weights are others now"
    with pytest.raises(lade.UnsupportedModelError, match=r"weight of layer .* is a Int8Tensor; leave it unpacked"):
        lade.pack(model, min_weights=1)
    with pytest.raises(lade.UnsupportedModelError, match="a quantized model cannot be inflated"):
        inflate(model, 1e7)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_the_shell_calls_a_scheme_is_one(name, folder):
    """`--quantization NAME` of all commands; what cannot be served exactly is decoded plainly."""
    if not SCHEMES[name].installed:
        pytest.skip(f"{SCHEMES[name].package} is not installed")
    model = loaded(folder, lambda dtype: quantization_config(name), torch.bfloat16)
    assert model.hf_quantizer is not None
    ids = prompt(20)
    if lade.supports(model):
        assert_near_ties(model, ids, CONFIGS)
    else:
        assert torch.equal(lade.generate(model, input_ids=ids, max_new_tokens=30), plain(model, ids, max_new_tokens=30))
