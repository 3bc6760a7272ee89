"""`lade_tree` in every family that knows it: the tokens of plain decoding, with the kernel and without."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_same, batch, lookahead, plain, prompt
from families import FAMILIES, WINDOW, Family, family
from pretend import NO_CUDA
from spies import watched

import lade
from lade.backends.tree_attention import backend as tree_attention
from lade.backends.tree_attention.backend import NAME
from lade.backends.trials.tree_check import worst_error

OUTSIDE = {"bloom", "codegen", "falcon", "gptj", "deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"}
"""Their classes choose their attention, or its keys, themselves; transformers refuses some, lade the others."""
INSIDE = [case for case in FAMILIES if case.model_type not in OUTSIDE]
DIFFERENT = ["llama", "mistral-window", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3"]
"""Full, windowed, capped, with sinks, in chunks, with values of a size of their own."""


def interpreted() -> bool:
    if find_spec("triton") is None:
        return False
    from lade.backends.tree_attention.launch import interprets

    return interprets()


NOT_INTERPRETED = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter: make test-kernel")
DEVICES = [pytest.param("cpu", marks=NOT_INTERPRETED), pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


def build(case: Family) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model in the attention of its class, and the same with ours."""
    theirs, ours = case.build(), case.build(NAME)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", INSIDE, ids=str)
def test_the_logits_at_every_node_are_those_of_plain_passes(case, monkeypatch):
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(tree_attention, "kernel_for", lambda query, *_: asked.append(query))
    theirs, ours = build(case)
    support = lade.supports(ours)
    assert support.require().compact
    bound = 1e-5 if case.dtype == torch.float64 else 1e-4
    assert worst_error(ours, support.require(), beyond=WINDOW) < bound
    # Before layers that share keys transformers slices the masks of several tokens, which makes them dense.
    sliced = getattr(ours.config, "num_kv_shared_layers", 0)
    expected = 2 * ours.config.num_hidden_layers - sliced
    assert len(asked) == expected, "the masks of the two steps over trees did not arrive"
    with torch.no_grad():
        torch.testing.assert_close(ours(prompt(20)).logits, theirs(prompt(20)).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(22)
@pytest.mark.parametrize("name", DIFFERENT)
def test_it_writes_what_plain_decoding_writes(name, watch):
    theirs, ours = build(family(name))
    stats = assert_same(ours, prompt(20), CONFIGS[:3], max_new_tokens=40)
    assert torch.equal(lookahead(ours, prompt(20), max_new_tokens=40), plain(theirs, prompt(20), max_new_tokens=40))
    assert stats.tokens_per_step > 1, "no guess was ever accepted"
    assert watch.branched and watch.moved, "the trees were chains: nothing was put to the test"


@pytest.mark.slow
@pytest.mark.parametrize("case", INSIDE, ids=str)
def test_every_family_writes_what_plain_decoding_writes(case):
    assert_same(build(case)[1], prompt(20), CONFIGS)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_of_a_batch_and_beams(name):
    _, model = build(family(name))
    rows: dict[str, Any] = {**batch(9, 5, 9), "pad_token_id": 0}
    assert_same(model, **rows, max_new_tokens=24)
    for several in (rows, {"ids": prompt(9)}):
        assert_same(model, **several, num_beams=3, max_new_tokens=12)


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_classes_outside_of_the_interface_do_not_get_by(name):
    try:
        model = family(name).build(NAME)
    except KeyError as error:
        assert NAME in str(error)
    else:
        if lade.supports(model):  # from transformers 5.24 on
            assert_same(model, prompt(9), [PAPER], max_new_tokens=24)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_the_kernel_writes_what_plain_decoding_writes(name, device, watch, monkeypatch):
    model = family(name).build(NAME, dtype=torch.float32, num_hidden_layers=2)
    passes = watched(monkeypatch, tree_attention._kernel(), "attend", lambda *_, **__: None)
    config, tokens = (lade.LookaheadConfig(2, 3, 3), 24) if device == "cpu" else (PAPER, 40)
    stats = assert_same(model.to(device), prompt(20).to(device), [config], max_new_tokens=tokens)
    assert passes
    if device == "cpu":  # captured passes launch nothing again, and keep their rows elsewhere
        assert len(passes) == 2 * stats.steps and watch.branched and watch.moved
