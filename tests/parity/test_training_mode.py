"""Models in training mode: served where their passes draw no random numbers and keep their cache, else refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_refused, assert_same, prompt
from families import FAMILIES, family

import lade
from lade.model.facts import CACHE

pytestmark = [pytest.mark.foreign_code, pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")]

RANDOM = [
    ("opt", {}),  # dropout is 0.1, by a call of a function
    ("opt", {"dropout": 0.0, "layerdrop": 0.5}),
    ("bloom", {"hidden_dropout": 0.1}),
    ("falcon", {"hidden_dropout": 0.1}),
    ("starcoder2", {"residual_dropout": 0.1}),
    ("starcoder2", {"embedding_dropout": 0.1}),
    ("mixtral", {"router_jitter_noise": 0.3}),
    ("llama", {"attention_dropout": 0.1}),
    ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "fields"), RANDOM, ids=str)
@pytest.mark.parametrize("arguments", [{"do_sample": True}, {"num_beams": 2}], ids=["sampled", "beams"])
def test_what_draws_random_numbers_is_refused(name, fields, arguments):
    model = family(name).build(**fields)
    assert lade.supports(model)
    model.train()
    said = r"training mode, where it draws random numbers.*model.eval\(\)"
    assert_refused(model, prompt(8), said, max_new_tokens=8, **arguments)  # the trial leaves no traces
    assert lade.supports(model.eval())


drops_caches = pytest.mark.skipif(CACHE == "cache", reason="without gradients, layers keep the cache here")


@pytest.mark.skipif(CACHE != "cache", reason="layers drop the cache here")
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_gradient_checkpointing_that_keeps_the_cache_is_served(name):
    model = family(name).build()
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(model, prompt(8), max_new_tokens=20)


@drops_caches
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt2", "mixtral"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_gradient_checkpointing_which_drops_the_cache_is_refused(name, arguments):
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if name == "gpt2" else {}
    model = family(name).build(**dropout)
    model.gradient_checkpointing_enable()
    assert lade.supports(model), "outside of training mode it does nothing"
    model.train()
    assert_refused(model, prompt(8), "does not continue from the cache", max_new_tokens=8, **arguments)
    model.gradient_checkpointing_disable()
    assert lade.supports(model)


@drops_caches
def test_gradient_checkpointing_of_one_layer_counts():
    model: Any = family("llama").build()
    model.gradient_checkpointing_enable()
    model.model.layers[3].train()
    assert "does not continue from the cache" in lade.supports(model).reason


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3_text", "qwen3_moe", "glm"])
def test_training_mode_without_randomness_is_served(name):
    model = family(name).build().train()
    assert assert_same(model, prompt(20), max_new_tokens=40).tokens_per_step > 1


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_family_in_training_mode_is_right_or_refused(case):
    model = case.build().train()
    if lade.supports(model):
        assert_same(model, prompt(20), max_new_tokens=40)


def test_one_module_in_training_mode_is_enough():
    model: Any = family("gpt2").build()
    model.transformer.h[2].mlp.train()
    assert not model.training and "training mode" in lade.supports(model).reason
    model.eval().training = True  # which means the model alone
    assert_same(model, prompt(10), max_new_tokens=20)


class Noisy(torch.nn.Module):
    """Adds noise while it is trained."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * (1 + 1e-9 * self.draw()) if self.training else states


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()).item()])
def test_numbers_of_any_generator_are_noticed_and_put_back(draw):
    model: Any = family("llama").build()
    model.model.norm = torch.nn.Sequential(model.model.norm, Noisy(draw))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert "draws random numbers" in lade.supports(model).reason
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert lade.supports(model.eval())


class Failing(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not while training\nand more")


def test_a_pass_that_fails_in_training_mode_is_the_reason():
    model: Any = family("llama").build()
    model.model.norm = Failing()
    assert "training mode, where a pass fails (RuntimeError: not while training)" in lade.supports(model).reason
