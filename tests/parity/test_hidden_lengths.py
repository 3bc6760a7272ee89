"""Models that compute otherwise beyond a length that stands somewhere in their configuration, or on a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_same, lookahead, plain, prompt
from families import UNLISTED, family
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import lade
from lade.backends.trials import backend as trials
from lade.backends.trials.backend import named_lengths
from lade.backends.trials.tree_check import worst_error
from lade.model.facts import CACHE
from lade.model.inputs import plan_for

pytestmark = pytest.mark.foreign_code

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


class OwnLlama(LlamaForCausalLM):
    """A Llama from somewhere else."""


def own_llama(attention: type[LlamaAttention] = Sparse, **fields: Any) -> Any:
    model: Any = family("llama").build(**fields)
    model.__class__ = OwnLlama
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
    model = own_llama(**HIDDEN[where])
    assert worst_error(model, plan_for(model.config, by_layer_type=False)) < 1e-9, "a short check finds it as well"
    assert LENGTH in named_lengths(model).values()
    assert "logits differ by" in lade.supports(model).reason
    with pytest.warns(lade.FallbackWarning, match="logits differ by"):
        assert_same(model, prompt(10), ["auto"])


def test_it_would_have_written_another_text(monkeypatch):
    model = own_llama(foo=LENGTH)
    monkeypatch.setattr(trials, "named_lengths", lambda model: {})
    assert lade.supports(model) and not torch.equal(lookahead(model, prompt(10)), plain(model, prompt(10)))


def test_a_length_that_changes_nothing_is_put_to_the_test_and_served():
    model = own_llama(LlamaAttention, foo=LENGTH)
    assert_same(model, prompt(10))


@pytest.mark.parametrize("name", ["foo", "keep_window_size", "index_topk"])
def test_a_length_too_long_to_be_checked_is_refused(name):
    reason = lade.supports(own_llama(LlamaAttention, **{name: 2048})).reason
    assert f"its {name} of 2048 tokens is too long to be checked" in reason


def test_what_is_no_length_makes_the_check_no_longer():
    """Sizes, counts and ids of ordinary configurations, and the length of the context, beyond which no tree grows."""
    fields = {
        "moe_intermediate_size": 1408,
        "n_inner": 4096,
        "num_experts_per_tok": 64,
        "eos_token_id": 32000,
        "image_token_index": 32001,
        "max_seq_len": 8192,
        "vision_config": {"window_size": 2000},
    }
    model = own_llama(LlamaAttention, **fields)
    assert named_lengths(model) == {}
    for case in UNLISTED:
        window = case.extra.get("sliding_window")
        assert named_lengths(case.build()) == ({"sliding_window": window} if window else {})
