"""The table of tokens per step with an MTP layer."""

import pytest
import torch
from mtp_toys import llama_with_mtp

from experiments.mtp_layers import table, tokens_per_step
from lade import LookaheadConfig


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
