"""`lade.Engine` on every family: prompts in pieces, rows that join and leave at lengths of their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_requests, in_turn, plain, prompt
from effort import now_and_then
from families import FAMILIES, UNLISTED, family
from graphed import Graphs
from pretend import DEVICES

import lade

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in FAMILIES for backend in case.backends]
LENGTHS = (7, 20, 1, 13)
CAPTURED = ["mistral-window", "gemma3_text", "bloom", *now_and_then("llama", "gpt2", "llama4_text", "opt")]


def assert_served(model: Any, configs: Any, new_tokens: int = 30, **arguments: Any) -> None:
    """Requests with these configs and prompts of several lengths, three at a time: each gets plain's tokens."""
    asked = []
    for number, (seed, config) in enumerate(itertools.product(range(len(LENGTHS)), configs)):
        given = {"input_ids": prompt(LENGTHS[seed], seed).to(model.device), "lookahead": config, **arguments}
        asked.append({**given, "max_new_tokens": new_tokens + number % 5})
    assert_requests(model, asked, max_rows=3, prefill_tokens=5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CAPTURED)
def test_requests_of_it_on_captured_passes(name, device, monkeypatch):
    graphs, model = Graphs(torch.device(device)).serve(monkeypatch), family(name).build().to(device)
    told = {"eos_token_id": plain(model, prompt(7).to(device))[0, 19].item(), "pad_token_id": 0}
    assert_served(model, [PAPER], new_tokens=20, do_sample=False, **told)
    assert graphs.counted.replayed > graphs.counted.recorded > 1
    assert_served(model, [lade.LookaheadConfig(budget=24)], new_tokens=12, do_sample=True, temperature=0.7, **told)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), [*CASES, *((case, case.backends[0]) for case in UNLISTED)])
def test_every_family(case, backend):
    model = case.build(backend)
    configs = [*CONFIGS[:3], None]
    assert_served(model, in_turn(configs, case, backend, count=2), do_sample=False, pad_token_id=0)
    assert_served(model, in_turn(CONFIGS[:2], case, backend), do_sample=True, pad_token_id=0)
