"""A checkpoint's MTP layer in the lab: the table of tokens per step, and chains of it alone."""

import functools

import pytest
import torch
from mtp_toys import llama_with_mtp

from experiments.mtp_layers import table, tokens_per_step
from lade import LookaheadConfig, Stats
from lade.hf.session import Session
from lade.model.prepared import custom_generate_for
from lade_lab.mtp_chain import MtpChainDrafter


def test_the_table_has_each_way_with_and_without_the_layer(tmp_path):
    model = llama_with_mtp(tmp_path)
    prompts = [torch.tensor([[3, 1, 4, 1]]), torch.tensor([[5, 9, 2]])]
    lines = table(model, prompts, 12, (4, 8))
    assert len(lines) == 8 and all(line.count("|") == 4 for line in lines)
    assert all(float(cell) >= 1 for line in lines[2:] for cell in line.split("|")[2:4])


def test_a_text_that_differs_is_an_error(tmp_path, monkeypatch):
    model = llama_with_mtp(tmp_path)
    monkeypatch.setattr("lade.generate", lambda *_, **__: torch.zeros(1, 16, dtype=torch.long))
    with pytest.raises(AssertionError, match="text 0 differs"):
        tokens_per_step(model, [torch.tensor([[3, 1, 4, 1]])], LookaheadConfig(budget=4), 12)


def test_chains_of_the_checkpoints_layer_are_verified(tmp_path):
    """The same tokens as plain decoding, and as many drafted in each step as passes were asked for."""
    model, prompt = llama_with_mtp(tmp_path), torch.tensor([[3, 1, 4, 1, 5]])
    arguments = {"max_new_tokens": 30, "do_sample": False}
    make = functools.partial(Session, config=LookaheadConfig(), stats=Stats(), drafter=MtpChainDrafter(3))
    steps = list(model.generate(prompt, **arguments, custom_generate=custom_generate_for(make)))
    assert [token for step in steps for token in step.tokens] == model.generate(prompt, **arguments)[0, 5:].tolist()
    assert {step.fed for step in steps[1:]} == {4}
