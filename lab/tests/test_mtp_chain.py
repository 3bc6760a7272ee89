"""Chains of a checkpoint's MTP layer."""

import functools
from pathlib import Path

import torch
from mtp_toys import llama_with_mtp

from lade import LookaheadConfig, Stats
from lade.hf.session import Session
from lade.model.prepared import custom_generate_for
from lade_lab.mtp_chain import MtpChainDrafter


def test_chains_of_the_checkpoints_layer_are_verified(tmp_path: Path) -> None:
    """The same tokens as plain decoding, and as many drafted in each step as passes were asked for."""
    model, prompt = llama_with_mtp(tmp_path), torch.tensor([[3, 1, 4, 1, 5]])
    arguments = {"max_new_tokens": 30, "do_sample": False}
    make = functools.partial(Session, config=LookaheadConfig(), stats=Stats(), drafter=MtpChainDrafter(3))
    steps = list(model.generate(prompt, **arguments, custom_generate=custom_generate_for(make)))
    assert [token for step in steps for token in step.tokens] == model.generate(prompt, **arguments)[0, 5:].tolist()
    assert {step.fed for step in steps[1:]} == {4}
