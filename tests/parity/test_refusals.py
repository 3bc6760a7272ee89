"""What cannot be served exactly is refused with the reason; `lookahead="auto"` decodes it plainly, with one warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from comparing import PAPER, custom, only_fallback, plain, prompt
from families import VOCABULARY, WINDOW, family
from inside import force_attention
from small_models import SIZES
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lade
from lade.hf import refusals
from lade.model.facts import CACHE

_SIZES: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY, "num_hidden_layers": 4}
STATE = r"layers \(.+\) carry a state that the branches of a token tree cannot share"
SLOTS_OF_ATTENTION = "attention's biases depend on the cache slot, not on the position"
SCORES = "selects keys by score, and breaks ties by the number of keys"
SLOTS = "ALiBi biases depend on the cache slot, not on the position"
CAPACITY = "experts drop tokens of a pass beyond their capacity"
_ENCODING: dict[str, Any] = {"d_model": 32, "decoder_start_token_id": 0}
REFUSED = {
    "recurrent_gemma": (STATE, {"lru_width": 32, "attention_window_size": 16}),
    "rwkv": (STATE, {"attention_hidden_size": 32, "context_length": 128}),
    "doge": (SCORES, {"head_dim": 8, "keep_window_size": 16}),
    "gpt_neo": ("local attention layers mask by cache slot", {"attention_types": [[["global", "local"], 2]],
        "num_layers": 4, "num_heads": 4, "window_size": 8}),
    "falcon": (SLOTS, {"alibi": True, "new_decoder_architecture": False}),
    "mpt": (SLOTS, {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128}),
    "switch_transformers": (CAPACITY, {
        **_ENCODING, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "num_experts": 2,
    }),
    "nllb-moe": (CAPACITY, {
        **_ENCODING,
        **{f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "sparse_step")},
        **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
        "num_experts": 2,
    }),
}  # fmt: skip


OTHER_STATES = {
    "inkling_text": SLOTS_OF_ATTENTION,
    "inkling2_text": SLOTS_OF_ATTENTION,
    "qwen4_exp_text": "its embeddings hash the last two or three tokens",
    "deepseek_v4": "compresses windows that close by cache slot",
    "zaya": "mixes the keys and values of a token with those of the token before",
    "minimax": STATE,
    "xlstm": STATE,
}


WAYS: dict[str, Callable[..., Any]] = {"lade.generate": lade.generate, "custom_generate": custom}


@contextmanager
def one_fallback(match: str) -> Iterator[None]:
    refusals._warned.clear()  # each way is the first one
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert match in only_fallback(caught)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_is_refused(model_type):
    reason, extra = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **extra})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32).eval()
    name = type(model).__name__

    support = lade.supports(model)
    assert not support and support.model == name
    for call in WAYS.values():
        with pytest.raises(lade.UnsupportedModelError, match=rf'{name}: .*{reason}.*; use plain .* lookahead="auto"'):
            call(model, input_ids=prompt(10), lookahead=PAPER, max_new_tokens=5)
    expected = plain(model, prompt(10), max_new_tokens=12)
    for call in WAYS.values():
        with one_fallback(name):
            ours = call(model, input_ids=prompt(10), lookahead="auto", max_new_tokens=12, do_sample=False)
        assert torch.equal(ours, expected)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("model_type", [name for name in OTHER_STATES if name in CONFIG_MAPPING])
def test_what_else_keeps_more_than_keys_and_values_is_refused(model_type):
    config = AutoConfig.for_model(model_type, num_hidden_layers=3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert re.search(OTHER_STATES[model_type], lade.supports(model).reason)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("window", [1, 0, -1])
@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "cohere2", "llama4_text"])
def test_a_window_that_the_cache_of_plain_decoding_does_not_heed(name, window):
    """Of one token it keeps all, so that a prompt is masked and what follows is not; shorter ones plainly fail."""
    field = "attention_chunk_size" if name == "llama4_text" else "sliding_window"
    model = family(name).build(**{field: window})
    with pytest.raises(lade.UnsupportedModelError, match=f"{field}={window} is less than two tokens"):
        lade.generate(model, input_ids=prompt(5), lookahead=PAPER, max_new_tokens=5)
    if window == 1:
        with one_fallback(f"{field}=1"):
            ours = lade.generate(model, input_ids=prompt(20), lookahead="auto", max_new_tokens=20, do_sample=False)
        assert torch.equal(ours, plain(model, prompt(20), max_new_tokens=20))


LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: family("llama").build(**LAYERS), "takes one mask for layers with different windows"),
        (lambda: family("gemma4_text").build(use_bidirectional_attention="all"), "its attention is bidirectional"),
        (lambda: family("llama").build().model, "language modeling head"),
        (lambda: torch.nn.Linear(2, 2), "not a transformers model"),
        (lambda: None, "not a transformers model"),
        (lambda: "a name", "not a transformers model"),
    ],
)
def test_what_else_is_not_supported_says_why(make, said):
    assert said in lade.supports(make()).reason


# --- a supported family in a state that is not -----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_attention_kernels_that_take_no_mask(kernel):
    model = family("llama").build()
    force_attention(model, kernel)
    with pytest.raises(lade.UnsupportedModelError, match='takes no tree mask: load it with attn_implementation="sdpa"'):
        lade.generate(model, input_ids=prompt(5), lookahead=PAPER, max_new_tokens=5)


@pytest.fixture
def pipeline() -> Iterator[PreTrainedModel]:
    """A model in one pipeline stage, as transformers loads it in each process of a group."""
    parallel = pytest.importorskip("transformers.distributed.pipeline_parallel")  # not in every version
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    yield parallel.apply_pipeline_parallelism(family("llama").build(), mesh)
    distributed.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_pipeline_stages(way, pipeline):
    """The passes of one process would wait for those of the others, which make other ones."""
    with pytest.raises(lade.UnsupportedModelError, match=r"pipeline stages \(pp_size\).*: load it with device_map"):
        WAYS[way](pipeline, input_ids=prompt(5), lookahead=PAPER, max_new_tokens=5)
    with one_fallback("pipeline stages"):
        ours = WAYS[way](pipeline, input_ids=prompt(5), lookahead="auto", max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, plain(pipeline, prompt(5), max_new_tokens=12))


# --- arguments -------------------------------------------------------------------------------------------------------


class OwnLayer(StaticLayer):
    """As from another library: what it keeps is not known."""


def _of_another_make(model: PreTrainedModel) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=64)
    cache.layers[:] = [OwnLayer(64) for _ in cache.layers]
    return cache


def _arguments(name: str, model: PreTrainedModel) -> dict[str, Any]:
    return {"input_ids": prompt(10), "do_sample": False, "max_new_tokens": 20} | ARGUMENTS[name](model)


ARGUMENTS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "prompt_lookup_num_tokens": lambda _: {"prompt_lookup_num_tokens": 3},
    "assistant_model": lambda _: {"assistant_model": family("llama").build(seed=5)},
    CACHE: lambda model: {CACHE: _of_another_make(model)},
    "output_attentions": lambda _: {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": lambda _: {"output_hidden_states": True, "return_dict_in_generate": True},
    "use_cache": lambda _: {"use_cache": False},
    "guidance_scale": lambda _: {"guidance_scale": 1.5},
    "attention_mask": lambda _: {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 0]])},
    "position_ids": lambda _: {"position_ids": torch.arange(3, 13)[None]},
}


@pytest.mark.one_in(14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_refused(name, way):
    if (name, way) == ("assistant_model", "custom_generate"):
        pytest.skip("transformers hands no assistant to a callable; greedy decoding gives the same tokens")
    model = family("llama").build()
    with pytest.raises(lade.UnsupportedArgumentError, match=f'(?s){name}.*lookahead="auto"'):
        WAYS[way](model, lookahead=PAPER, **_arguments(name, model))

    torch.manual_seed(3)
    expected = model.generate(**_arguments(name, model))
    torch.manual_seed(3)
    with one_fallback(name):
        ours = WAYS[way](model, lookahead="auto", **_arguments(name, model))
    if name.startswith("output"):
        ours, expected = ours.sequences, expected.sequences
    assert torch.equal(ours, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("field", [{"do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_what_the_checkpoint_itself_asks_for(field, way):
    model = family("llama").build()
    model.generation_config.update(**field)
    arguments = {"input_ids": prompt(10), "max_new_tokens": 20}
    torch.manual_seed(3)
    expected = model.generate(**arguments)
    torch.manual_seed(3)
    assert torch.equal(WAYS[way](model, lookahead=PAPER, **arguments), expected)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_decoding_can_be_asked_for_against_the_checkpoint(way):
    model = family("llama").build()
    model.generation_config.update(do_sample=True, temperature=0.7)
    ours = WAYS[way](model, input_ids=prompt(10), lookahead=PAPER, max_new_tokens=20, do_sample=False)
    assert torch.equal(ours, plain(model, prompt(10), max_new_tokens=20))
