"""Code of others on a model, such as tracers and hooks: served where a check finds it exact, else refused."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from comparing import PAPER, assert_refused, assert_same, batch, build, lookahead, plain, prompt
from families import family
from inside import force_attention
from torch.nn import functional
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import lade
from lade.model.facts import CACHE

pytestmark = pytest.mark.foreign_code

# --- a forward that was replaced


def handing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    def hand_on(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return hand_on


def forward_by(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change of a model: its forward becomes what is made of the model."""
    return lambda model: setattr(model, "forward", make(model))


def of_a_class_made_for_it(model: Any) -> None:
    class Traced(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model.__class__ = Traced


def an_unknown_one_under_a_known_one(model: Any) -> None:
    taking_anything(model)
    add_hook_to_module(model, ModelHook())


taking_anything = forward_by(lambda model: handing_on(model.forward))
TRANSPARENT: dict[str, Callable[[Any], object]] = {
    "taking anything": taking_anything,
    "an unknown one with an argument set": forward_by(
        lambda model: functools.partial(handing_on(model.forward), output_attentions=False)
    ),
    "bound to the model": forward_by(lambda model: types.MethodType(handing_on(type(model).forward), model)),
    "with the name of the other": forward_by(lambda model: functools.wraps(model.forward)(handing_on(model.forward))),
    "of a class made for it": of_a_class_made_for_it,
    "around every layer": lambda model: [taking_anything(module) for module in list(model.modules())],
    "an unknown one under a known one": an_unknown_one_under_a_known_one,
}
KNOWN: dict[str, Callable[[Any], object]] = {
    "with an argument set": forward_by(lambda model: functools.partial(model.forward, output_attentions=False)),
    "compiled": forward_by(lambda model: torch.compile(model.forward, backend="eager")),
    "under a hook of accelerate": lambda model: add_hook_to_module(model, ModelHook()),
}


@pytest.mark.one_in(11)
@pytest.mark.parametrize("change", TRANSPARENT)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "gemma3_text", "bloom"])
def test_positions_arrive_through_a_wrapper(name, change, checks):
    model = family(name).build()
    TRANSPARENT[change](model)
    assert assert_same(model, prompt(20), max_new_tokens=40).tokens_per_step > 1
    assert len(checks) == 1, "one comparison serves all calls"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("change", KNOWN)
def test_wrappers_that_are_known_to_hand_everything_on_need_no_check(change, checks):
    model = family("gpt2").build()
    KNOWN[change](model)
    assert_same(model, prompt(20), max_new_tokens=20)
    assert not checks


def test_a_class_whose_forward_was_replaced(monkeypatch, checks):
    forward = GPT2LMHeadModel.forward
    monkeypatch.setattr(GPT2LMHeadModel, "forward", handing_on(forward))
    assert_same(family("gpt2").build(), prompt(20), max_new_tokens=40)
    assert len(checks) == 1


def test_a_class_of_a_layer_whose_forward_was_replaced(monkeypatch):
    forward = LlamaAttention.forward

    def deaf_to_masks(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        return forward(self, hidden_states, position_embeddings, None, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", deaf_to_masks)
    assert "logits differ by" in lade.supports(family("llama").build()).reason


def without_positions(model: Any) -> None:
    forward = model.forward

    def swallow(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = swallow


def not_naming_positions(model: Any) -> None:
    forward = model.forward

    def choose(input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, use_cache: Any = None,
               return_dict: Any = None) -> Any:  # fmt: skip
        return forward(input_ids, attention_mask=attention_mask, use_cache=use_cache, **{CACHE: past_key_values})

    def choose_as_now(input_ids: Any, attention_mask: Any = None, cache: Any = None, use_cache: Any = None,
                      return_dict: Any = None) -> Any:  # fmt: skip
        return choose(input_ids, attention_mask, cache, use_cache)

    model.forward = choose_as_now if CACHE == "cache" else choose


def doubling_positions_of_plain_steps(model: Any) -> None:
    prepare = model.prepare_inputs_for_generation

    def doubled(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        return {**inputs, "position_ids": 2 * inputs["position_ids"]}

    model.prepare_inputs_for_generation = doubled


@pytest.mark.one_in(8)
@pytest.mark.parametrize("change", [without_positions, not_naming_positions, doubling_positions_of_plain_steps])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_wrapper_that_changes_positions_is_refused(name, change):
    model = family(name).build()
    assert lade.supports(model)
    change(model)
    assert "a tree pass does not equal plain passes on it (logits differ by " in lade.supports(model).reason
    assert_refused(model, prompt(20), "logits differ by")


def test_another_wrapper_is_another_check(checks):
    model = family("gpt2").build()
    without_positions(model)
    assert not lade.supports(model) and len(checks) == 1
    del model.forward
    assert lade.supports(model) and len(checks) == 1
    taking_anything(model)
    assert lade.supports(model) and lade.supports(model) and len(checks) == 2


def test_padding_that_a_wrapper_makes_transformers_count_is_refused():
    model = build(family("gpt2"))
    rows = batch(5, 11)
    arguments = {"attention_mask": rows["attention_mask"], "pad_token_id": 0, "max_new_tokens": 30}
    seen = plain(model, rows["ids"], **arguments)
    assert torch.equal(lookahead(model, rows["ids"], PAPER, **arguments), seen)
    taking_anything(model)
    assert not torch.equal(plain(model, rows["ids"], **arguments), seen), "nothing is hidden from transformers"
    with pytest.raises(lade.UnsupportedArgumentError, match=r"left padding .* takes no position_ids"):
        lookahead(model, rows["ids"], PAPER, **arguments)


class LlamaOfKeywords(LlamaForCausalLM):
    """Code from elsewhere whose own forward names nothing."""

    def forward(self, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


def test_code_from_elsewhere_that_takes_keywords_only_is_served():
    model = family("llama").build()
    model.__class__ = LlamaOfKeywords
    assert assert_same(model, prompt(20)).tokens_per_step > 1


# --- hooks -----------------------------------------------------------------------------------------------------------


def steering_the_last_token(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    output = output.clone()
    output[:, -1] += 0.3
    return output


@pytest.mark.parametrize(
    "hook",
    [lambda module, args, output: None, lambda module, args, output: output + 0.3],
    ids=["looking on", "steering every token"],
)
def test_hooks_that_treat_all_tokens_alike_are_served(hook, checks):
    model: Any = family("llama").build()
    model.model.layers[1].register_forward_hook(hook)
    assert assert_same(model, prompt(20)).tokens_per_step > 1
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (steering_the_last_token, "logits differ by"),
        (lambda module, args, output: output + 0.1 * torch.randn_like(output), "its passes draw random numbers"),
    ],
    ids=["steering the last token", "adding noise"],
)
def test_hooks_that_do_not_are_refused(hook, reason):
    model: Any = family("llama").build()
    model.model.layers[1].register_forward_hook(hook)
    assert_refused(model, prompt(10), reason, max_new_tokens=20)


# --- modules and kernels of others -----------------------------------------------------------------------------------


class Blurred(torch.nn.Module):
    """Mixes each token with its neighbour in the pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(states + 0.1 * states.roll(1, dims=1))
        return output


def test_a_module_of_another_make_is_checked(checks):
    model: Any = family("llama").build()
    model.model.layers[1].mlp = Blurred(model.model.layers[1].mlp).eval()
    assert "logits differ by" in lade.supports(model).reason
    assert checks == ["LlamaForCausalLM"]


def test_an_attention_function_of_another_make_is_checked(monkeypatch):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def deaf_to_masks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa(module, query, key, value, None, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", deaf_to_masks)
    assert "logits differ by" in lade.supports(family("llama").build()).reason


def test_a_kernel_that_was_put_into_torch_is_checked(monkeypatch, checks):
    kernel = functional.scaled_dot_product_attention

    def another(*args: Any, **kwargs: Any) -> torch.Tensor:
        return kernel(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", another)
    assert lade.supports(family("llama").build()) and len(checks) == 1


def test_layers_with_a_configuration_of_their_own_are_checked(checks):
    """The model's may say later on what they do not hear of."""
    model: Any = family("llama").build("eager")
    model.config = copy.deepcopy(model.config)
    assert lade.supports(model) and len(checks) == 1
    force_attention(model, "sdpa")
    assert not lade.supports(model), "masks for SDPA are of no use to eager attention"


class WithItsOwnLoop(LlamaForCausalLM):
    """A class that chooses tokens by itself."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(*args, **kwargs)


def test_a_class_with_a_loop_of_its_own_is_refused():
    model = family("llama").build()
    model.__class__ = WithItsOwnLoop
    assert "overrides the choice of tokens" in lade.supports(model).reason


class WithoutPositions(GPT2LMHeadModel):
    """Code from elsewhere that counts positions by itself, padding included."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


def test_padding_that_a_class_from_elsewhere_counts_is_refused():
    model = build(family("gpt2"))
    model.__class__ = WithoutPositions
    assert_same(model, prompt(20), max_new_tokens=20)
    with pytest.raises(lade.UnsupportedArgumentError, match=r"left padding .* counts it as text"):
        lookahead(model, batch(5, 11)["ids"], PAPER, attention_mask=batch(5, 11)["attention_mask"], pad_token_id=0)
