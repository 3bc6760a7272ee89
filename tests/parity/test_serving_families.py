"""`lade.Engine` on every family: prompts in pieces, rows that join and leave at lengths of their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, plain, prompt
from families import FAMILIES, UNLISTED, Family, family

import lade
from lade.serving import batch
from lade.testing import nearly_flat_cost

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in FAMILIES for backend in case.backends]
SOME = ["llama", "mistral-window", "gemma3_text", "gpt2", "opt", "bloom", "gpt_oss", "llama4_text", "deepseek_v3"]
LENGTHS = (7, 20, 1, 13)


@pytest.fixture(autouse=True)
def known_cost_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "step_cost_for", lambda model, runner, batch=1: nearly_flat_cost())


def assert_served(model: Any, configs: Any, new_tokens: int = 30, **arguments: Any) -> None:
    """Requests with these configs and prompts of several lengths, three at a time: each gets plain's tokens."""
    asked = []
    for number, (seed, config) in enumerate(itertools.product(range(len(LENGTHS)), configs)):
        given = {"input_ids": prompt(LENGTHS[seed], seed), "max_new_tokens": new_tokens + number % 5, **arguments}
        torch.manual_seed(number)
        asked.append(({"lookahead": config, "seed": number, **given}, model.generate(**given)))
    with lade.Engine(model, max_rows=3, prefill_tokens=5) as engine:  # from here on the model is the engine's
        handles = [(engine.add(**given), expected) for given, expected in asked]
        for handle, expected in handles:
            assert torch.equal(handle.result(60.0), expected)


@pytest.mark.parametrize("name", SOME)
def test_requests_of_it_are_plains(name: str) -> None:
    model = family(name).build()
    eos = plain(model, prompt(7))[0, 19].item()
    assert_served(model, [PAPER], eos_token_id=eos, pad_token_id=0, do_sample=False)


@pytest.mark.parametrize("name", ["mistral-window", "bloom"])
def test_sampled_requests_of_it(name: str) -> None:
    assert_served(family(name).build(), [PAPER], do_sample=True, temperature=0.7, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), [*CASES, *((case, case.backends[0]) for case in UNLISTED)])
def test_every_family(case: Family, backend: str) -> None:
    model = case.build(backend)
    assert_served(model, [*CONFIGS[:3], None], do_sample=False, pad_token_id=0)
    assert_served(model, CONFIGS[:2], do_sample=True, pad_token_id=0)
