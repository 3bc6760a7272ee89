"""Toy models to be packed in int8 or int4, and what tests of either compare with plain decoding."""

import pytest
import torch

import lade
from lade.testing import toy_model

VOCABULARY = 48
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def build(family="llama", dtype=torch.float32):
    return toy_model(family, vocabulary=VOCABULARY, dtype=dtype)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def assert_texts_are_plains(model):
    """A row greedily and a batch with padding drawn, by the paper's method and the adaptive one."""
    left = {"input_ids": torch.tensor([[0, 0, 0, 7, 8, 9], [3, 1, 4, 1, 5, 9]]), "do_sample": True}
    left["attention_mask"] = (left["input_ids"] > 0).long()
    for arguments in ({"input_ids": IDS, "do_sample": False}, left):
        texts, given = [], {**arguments, "max_new_tokens": 25}
        for lookahead in (None, lade.LookaheadConfig(4, 3, 4), lade.LookaheadConfig(budget=16)):
            torch.manual_seed(7)
            plain = lookahead is None
            texts.append(model.generate(**given) if plain else lade.generate(model, lookahead=lookahead, **given))
        assert torch.equal(texts[1], texts[0]) and torch.equal(texts[2], texts[0])


def assert_decoded_plainly(model, weights):
    """Of a model with such weights whose attention does not round alike; a warning says so."""
    support = lade.supports(model)
    assert not support and f"packed in {weights}" in support.reason and "lade.invariant(model)" in support.reason
    with pytest.warns(lade.FallbackWarning, match=weights):
        found = lade.generate(model, input_ids=IDS, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, model.generate(IDS, max_new_tokens=5, do_sample=False))
