"""An unlisted architecture: one small comparison on the model itself before it is trusted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from comparing import CONFIGS, assert_refused, assert_same, lookahead, plain, prompt
from families import UNLISTED, WINDOW, family
from inside import force_attention
from transformers import LlamaForCausalLM, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

import lade
from lade.backends.trials import backend as trials
from lade.backends.trials.backend import named_lengths
from lade.backends.trials.tree_check import worst_error
from lade.model import supports as support
from lade.model.facts import CACHE
from lade.model.inputs import plan_for


@pytest.mark.one_in(14)
@pytest.mark.parametrize(
    ("case", "backend"), [pytest.param(case, it, id=f"{case}-{it}") for case in UNLISTED for it in case.backends]
)
def test_an_unlisted_family_passes_and_is_served(case, backend, checks, watch):
    model = case.build(backend)
    assert case.model_type not in support.MASK_PER_LAYER_TYPE | support.ONE_MASK
    assert_same(model, prompt(20), CONFIGS[:3])
    assert_same(model, prompt(5), CONFIGS[:1])
    assert watch.branched and watch.moved
    assert len(checks) == 1, "one comparison serves all calls on a model"


def test_a_listed_family_is_not_probed(checks):
    assert lade.supports(family("llama").build()) and not checks


def test_a_model_is_probed_again_with_another_backend_or_dtype(checks):
    model = UNLISTED[0].build("sdpa")
    assert lade.supports(model) and lade.supports(model) and len(checks) == 1
    model.set_attn_implementation("eager")
    assert lade.supports(model) and len(checks) == 2
    assert lade.supports(model.float()) and len(checks) == 3


def test_a_probe_costs_a_handful_of_small_passes():
    model = UNLISTED[0].build()
    fed: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        fed.append((args or (kwargs["input_ids"],))[0].shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    lade.supports(model)
    assert len(fed) <= 15 and sum(fed) < 120
    fed.clear()
    lade.supports(model)
    assert not fed


def test_a_probe_leaves_the_random_state_and_the_weights_alone():
    model = UNLISTED[0].build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    lade.supports(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


# --- architectures that are wrong on purpose: classes of this module, so no table lists them ------------------------


class DeafToMasks(LlamaModel):
    """Builds its own causal mask over slots, whatever it is given."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, attention_mask=None, **kwargs)


class DeafToPositions(LlamaModel):
    """Counts slots, whatever positions it is given."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=None, **kwargs)


class Convolving(LlamaAttention):
    """Mixes each token with its neighbour in the cache before it attends."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states + 0.1 * hidden_states.roll(1, dims=1), *args, **kwargs)


class CountingSlots(LlamaAttention):
    """Scales its input by how much the cache holds."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        past = cache.get_seq_length(self.layer_idx) if cache is not None else 0
        slots = torch.arange(hidden_states.shape[1], device=hidden_states.device)[:, None] + past
        return super().forward(hidden_states * (1 + slots / 20).to(hidden_states.dtype), *args, **kwargs)


class OwnLlama(LlamaForCausalLM):
    """A Llama from somewhere else; right as it is."""


class OwnMistral(MistralForCausalLM):
    """A Mistral from somewhere else."""


def _own_llama(**fields: Any) -> Any:
    model = family("llama").build(**fields)
    model.__class__ = OwnLlama
    return model


def _own_mistral(**fields: Any) -> Any:
    model = family("mistral-window").build(**fields)
    model.__class__ = OwnMistral
    return model


def test_a_class_from_elsewhere_is_probed_although_its_model_type_is_listed(checks):
    model = _own_llama()
    assert_same(model, prompt(20))
    assert checks == ["OwnLlama"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", [DeafToMasks, DeafToPositions, Convolving, CountingSlots])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_architecture_is_refused(kind, dtype):
    model = _own_llama().to(dtype)
    (model.model if issubclass(kind, LlamaModel) else model.model.layers[2].self_attn).__class__ = kind
    said = r"a tree pass does not equal plain passes on it \(logits differ by .* standard deviations"
    assert re.search(said, lade.supports(model).reason)
    assert_refused(model, prompt(10), f"OwnLlama.*: {said}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("window", [4, WINDOW, 40])
def test_an_unknown_sliding_window_is_found_out_and_served(window):
    model = _own_mistral(sliding_window=window)
    assert lade.supports(model)
    assert_same(model, prompt(20), max_new_tokens=60)


def test_a_wrong_window_is_refused():
    """The model masks by a config of its own, narrower than the one we can read."""
    model = _own_mistral()
    model.model.config = type(model.config)(**{**model.config.to_dict(), "sliding_window": WINDOW - 1})
    force_attention(model.model, "sdpa")
    assert "logits differ by" in lade.supports(model).reason


def test_a_window_too_long_to_be_checked_is_refused():
    model = _own_mistral(sliding_window=4096)
    assert "window of 4096 tokens is too long to be checked" in lade.supports(model).reason


def test_an_error_of_an_unknown_architecture_is_the_reason():
    model = _own_llama()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("four-dimensional masks are not for me\nand more")

    model.model.forward = fail
    assert "RuntimeError: four-dimensional masks are not for me)" in lade.supports(model).reason


def test_not_a_number_is_refused():
    model = _own_llama()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    assert not lade.supports(model)


# --- models that compute otherwise beyond a length that stands somewhere in their configuration, or on a module -----

LENGTH = 60


class Sparse(LlamaAttention):
    """Beyond a length, the tokens of a pass see all that lies in the cache, whatever their mask says."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        cached = kwargs[CACHE].get_seq_length(self.layer_idx)
        if cached and cached + hidden_states.shape[1] > self.beyond():
            attention_mask = None if attention_mask is None else torch.ones_like(attention_mask)
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)

    def beyond(self) -> int:
        return LENGTH


class OnTheModule(Sparse):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.span_limit = LENGTH

    def beyond(self) -> int:
        return self.span_limit


class OnTheClass(Sparse):
    local_window = LENGTH

    def beyond(self) -> int:
        return self.local_window


def _with_attention(attention: type[LlamaAttention] = Sparse, **fields: Any) -> Any:
    model = _own_llama(**fields)
    for index, layer in enumerate(model.model.layers):
        own = attention(model.config, index).double().eval()
        own.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = own
    return model


HIDDEN: dict[str, Any] = {
    "a field": {"keep_window_size": LENGTH},
    "a field with a name that says nothing": {"foo": LENGTH},
    "a list": {"spans": [8, LENGTH, 16]},
    "a part": {"sparse_attention": {"default": {"hidden_size": 4096, "view": LENGTH}}},
    "a module": {"attention": OnTheModule},
    "a class": {"attention": OnTheClass},
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("where", HIDDEN)
def test_a_model_that_is_wrong_beyond_a_length_is_refused(where):
    model = _with_attention(**HIDDEN[where])
    assert worst_error(model, plan_for(model.config, by_layer_type=False)) < 1e-9, "a short check finds it as well"
    assert LENGTH in named_lengths(model).values()
    assert "logits differ by" in lade.supports(model).reason
    assert_refused(model, prompt(10), "logits differ by")


def test_it_would_have_written_another_text(monkeypatch):
    model = _with_attention(foo=LENGTH)
    monkeypatch.setattr(trials, "named_lengths", lambda model: {})
    assert lade.supports(model) and not torch.equal(lookahead(model, prompt(10)), plain(model, prompt(10)))


def test_a_length_that_changes_nothing_is_put_to_the_test_and_served():
    model = _with_attention(LlamaAttention, foo=LENGTH)
    assert_same(model, prompt(10))


@pytest.mark.parametrize("name", ["foo", "keep_window_size", "index_topk"])
def test_a_length_too_long_to_be_checked_is_refused(name):
    reason = lade.supports(_with_attention(LlamaAttention, **{name: 2048})).reason
    assert f"its {name} of 2048 tokens is too long to be checked" in reason


def test_what_is_no_length_makes_the_check_no_longer():
    """Sizes, counts and ids of ordinary configurations, and the length of the context, beyond which no tree grows."""
    fields = {
        "moe_intermediate_size": 1408, "n_inner": 4096, "num_experts_per_tok": 64, "eos_token_id": 32000,
        "image_token_index": 32001, "max_seq_len": 8192, "vision_config": {"window_size": 2000},
    }  # fmt: skip
    model = _with_attention(LlamaAttention, **fields)
    assert named_lengths(model) == {}
    for case in UNLISTED:
        window = case.extra.get("sliding_window")
        assert named_lengths(case.build()) == ({"sliding_window": window} if window else {})
