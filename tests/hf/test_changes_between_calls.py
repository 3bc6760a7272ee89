"""A model that becomes another one between two calls: each call goes by what the model is when it is made."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from same_as_plain import PAPER
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import lade
from lade.errors import UnsupportedModelError
from lade.testing import toy_model

pytestmark = pytest.mark.foreign_code

PROMPT = torch.tensor([[5, 9, 2, 7, 7, 5, 9, 2, 11]])
CONFIGS = [PAPER, lade.LookaheadConfig(budget=12)]


def tokens(model: Any) -> list[int]:
    """The answer, which is `model.generate`'s, whichever way it is decoded."""
    arguments = {"input_ids": PROMPT, "max_new_tokens": 16, "do_sample": False}
    plain = model.generate(**arguments)
    for config in CONFIGS:
        assert torch.equal(lade.generate(model, lookahead=config, **arguments), plain)
    assert torch.equal(model.generate(custom_generate=lade.decode, lookahead=PAPER, **arguments), plain)
    return plain[0].tolist()


def refusal(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        lade.generate(model, input_ids=PROMPT, lookahead=PAPER, max_new_tokens=4)
    return str(refused.value)


# --- what is served before and after
def adapted(model: Any) -> None:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    inject_adapter_in_model(lora, model)
    model.eval()


def with_another_layer(model: Any) -> None:
    torch.manual_seed(1)
    mlp = model.model.layers[0].mlp
    inputs, outputs = mlp.down_proj.in_features, mlp.down_proj.out_features
    mlp.down_proj = nn.Linear(inputs, outputs, bias=False, dtype=model.dtype)


def with_a_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: -forward(states)


def with_an_end(model: Any) -> None:
    model.generation_config.eos_token_id = lade.generate(model, input_ids=PROMPT, max_new_tokens=16)[0, -6].item()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an adapter": adapted,
    "another layer": with_another_layer,
    "another weight": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.flip(0))),
    "no layer": lambda model: setattr(model.model.layers[1], "mlp", nn.Identity()),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda mlp, given, output: 2.0 * output),
    "a forward": with_a_forward,
    "a penalty": lambda model: setattr(model.generation_config, "repetition_penalty", 5.0),
    "an end": with_an_end,
    "another rotation": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_next_call_has_the_tokens_of_the_changed_model(change: Callable[[Any], None]) -> None:
    model = toy_model("llama")
    before = tokens(model)
    change(model)
    assert tokens(model) != before, "the change changes nothing, and this test could not fail"


def test_it_may_be_cast_and_packed_and_given_another_attention() -> None:
    model = toy_model("llama")
    tokens(model)
    for attention in ("eager", "sdpa"):
        model.float().set_attn_implementation(attention)
        tokens(model)
    for change in (lade.pack, lade.unpack, nn.Module.double):
        change(model)
        tokens(model)


def test_adapters_are_put_on_and_taken_off() -> None:
    model = toy_model("llama")
    bare = tokens(model)
    adapted(model)
    with_adapter = tokens(model)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    assert tokens(model) == bare != with_adapter
    for layer in layers:
        layer.enable_adapters(True)
    assert tokens(model) == with_adapter


# --- what is refused meanwhile
def by_tokens(output: torch.Tensor) -> torch.Tensor:
    """As a replacement that looks at all tokens of a pass would have it."""
    return output * (1.0 + output.shape[1])


class Rounding(nn.Linear):
    """Rounds what it is fed, with one scale for all tokens of a pass."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().max() / 7
        return super().forward((rows / scale).round() * scale)


def in_training(model: Any) -> Callable[[], object]:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.model.layers[1].train()  # one of them, and the model as a whole is not
    return model.eval


def mlp_of(model: Any) -> Any:
    return model.model.layers[1].mlp


def replaced(model: Any) -> Callable[[], object]:
    mlp = mlp_of(model)
    forward = mlp.forward
    mlp.forward = lambda states: by_tokens(forward(states))
    return partial(delattr, mlp, "forward")


def replaced_in_its_class(model: Any) -> Callable[[], object]:
    forward = LlamaMLP.forward
    LlamaMLP.forward = lambda self, states: by_tokens(forward(self, states))
    return partial(setattr, LlamaMLP, "forward", forward)


def instead(owner: Any, name: str, value: object) -> Callable[[], object]:
    """Set an attribute; returns what takes that back."""
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    return partial(setattr, owner, name, before)


REFUSED: dict[str, tuple[str, Callable[[Any], Callable[[], object]]]] = {
    "in training": ("random numbers", in_training),
    "hooked": ("tree pass", lambda model: mlp_of(model).register_forward_hook(lambda *its: by_tokens(its[2])).remove),
    "hooked before": (
        "tree pass",
        lambda model: mlp_of(model).register_forward_pre_hook(lambda mlp, inputs: by_tokens(inputs[0])).remove,
    ),
    "replaced": ("tree pass", replaced),
    "replaced in its class": ("tree pass", replaced_in_its_class),
    "rounding": ("beside other tokens", lambda model: instead(mlp_of(model).down_proj, "__class__", Rounding)),
    "kernel": ("attention kernel", lambda model: instead(model.config, "_attn_implementation", "flash_attention_2")),
    "both ways": ("bidirectional", lambda model: instead(model.config, "use_bidirectional_attention", True)),
}


@pytest.mark.parametrize(("reason", "change"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_as_long_as_it_is_there(
    reason: str, change: Callable[[Any], Callable[[], object]]
) -> None:
    model = toy_model("llama")
    before = tokens(model)
    take_back = change(model)
    try:
        assert reason in refusal(model)
        assert reason in refusal(model), "the second time, too"
    finally:
        take_back()
    assert tokens(model) == before
