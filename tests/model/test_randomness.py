"""Generators that a process shares: passes that are tried, and models that are made, leave them to their users."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lade
from lade.model.randomness import DrawsFrom, RandomModelError, without_draws
from lade.testing import toy_model

HALVES = torch.full((9,), 0.5)
RECURRENT = nn.LSTM(9, 3, num_layers=2, dropout=0.3)
DRAWING: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(2, 3, dtype=torch.float64),
    "randint": lambda: torch.randint(3, 90, (4,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(HALVES),
    "randint_like": lambda: torch.randint_like(HALVES, 2, 9),
    "normal": lambda: torch.normal(0.0, 1.0, (4,)),
    "normal of means": lambda: torch.normal(HALVES),
    "bernoulli": lambda: torch.bernoulli(HALVES),
    "multinomial": lambda: torch.multinomial(HALVES, 3),
    "uniform_": lambda: torch.empty(4).uniform_(),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "random_": lambda: torch.empty(4).random_(),
    "a truncated normal": lambda: nn.init.trunc_normal_(torch.empty(9)),
    "a layer": lambda: next(nn.Linear(3, 2).parameters()),
}
DROPPING: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(HALVES, 0.3),
    "alpha dropout": lambda: F.alpha_dropout(HALVES, 0.3, training=True),
    "of features": lambda: F.dropout1d(HALVES[None], 0.3),
    "of attention": lambda: F.scaled_dot_product_attention(*[HALVES[None, None, :, None]] * 3, dropout_p=0.3),
    "between recurrent layers": lambda: RECURRENT(HALVES[None])[0],
    "with a gradient": lambda: F.dropout(HALVES.clone().requires_grad_(), 0.3).detach(),
}
QUIET: dict[str, Callable[[], torch.Tensor]] = {
    "products": lambda: HALVES @ HALVES,
    "dropout at rest": lambda: F.dropout(HALVES, 0.3, training=False),
    "dropout of nothing": lambda: F.dropout(HALVES, 0.0),
    "attention": lambda: F.scaled_dot_product_attention(*[HALVES[None, None, :, None]] * 3),
    "a generator of its own": lambda: torch.rand(3, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", [*DRAWING, *DROPPING])
def test_a_trial_that_draws_is_refused_before_it_has_drawn(name, grad):
    state = torch.get_rng_state()
    with grad(), pytest.raises(RandomModelError):
        without_draws({**DRAWING, **DROPPING}[name])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", QUIET)
def test_other_trials_have_their_result(name, grad):
    with grad():
        assert torch.equal(without_draws(QUIET[name]), QUIET[name]())


@pytest.mark.parametrize("name", DRAWING)
def test_a_block_draws_from_a_generator_of_its_own_what_a_seed_would_give(name):
    state = torch.get_rng_state()
    with DrawsFrom(torch.Generator().manual_seed(7)):
        ours = DRAWING[name]()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(ours, DRAWING[name]())


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "torch": (lambda: torch.rand(()).item(), torch.manual_seed),
    "python": (random.random, random.seed),
    "numpy": (np.random.random, np.random.seed),
}


class BesideOthers(nn.Module):
    """Another thread draws while it is passed through, as often as it is told to."""

    def __init__(self, draw: Callable[[], Any], times: int) -> None:
        super().__init__()
        self.draw, self.times, self.drawn = draw, times, list[Any]()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if len(self.drawn) < self.times:
            with ThreadPoolExecutor() as other:
                self.drawn.append(other.submit(self.draw).result())
        return states


@pytest.mark.foreign_code
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GENERATORS)
def test_what_others_draw_beside_a_trial_is_theirs(name, training):
    """Neither is it taken back, nor for the model's."""
    (draw, seed), model = GENERATORS[name], toy_model("llama", seed=2)
    beside = BesideOthers(draw, 2)
    model.model.norm = nn.Sequential(model.model.norm, beside)
    model.train(training)
    seed(5)
    expected = [draw() for _ in range(4)]
    seed(5)
    assert lade.supports(model)
    assert [*beside.drawn, draw(), draw()] == expected


def test_what_others_draw_while_an_engine_begins_is_theirs():
    model, drawn = toy_model("llama", dtype=torch.float32), list[torch.Tensor]()

    def draw_elsewhere(*_: Any) -> None:
        with ThreadPoolExecutor() as other:
            drawn.append(other.submit(torch.rand, 1).result())

    torch.manual_seed(3)
    with model.register_forward_pre_hook(draw_elsewhere):
        lade.Engine(model).close()
    ours = torch.cat([*drawn, torch.rand(3)])
    torch.manual_seed(3)
    assert drawn and torch.equal(ours, torch.rand(len(ours)))


OWNERS = {"cli", "processes"}
"""Commands, whose process is their own, and processes that decode the same text together."""
STATES = {"fork_rng", "set_rng_state", "set_rng_state_all", "setstate", "seed_all", "manual_seed_all"}
PACKAGE = Path(lade.__file__).parent


def _sets_a_shared_generator(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    of_torch = isinstance(node.value, ast.Name) and node.value.id in ("torch", "random", "cuda")
    return node.attr in STATES or (of_torch and node.attr in ("manual_seed", "seed"))


def test_only_commands_set_generators_that_others_share():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if not OWNERS & set(path.relative_to(PACKAGE).parts)
        and any(map(_sets_a_shared_generator, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == {
        "model/randomness.py",  # Python's and NumPy's, of a model that draws from them in every pass
        "decoding/drafting/user_sources.py",  # put back when a caller's drafter has drawn
    }
