"""Prompts of which a mask hides tokens, and prompts of embeddings: the tokens of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import ADAPTIVE, PAPER, assert_same, batch, lookahead, prompt
from families import family

import lade
from lade.model.facts import CACHE

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7},
    "beams": {"num_beams": 3},
    "processor": {"repetition_penalty": 1.2},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}


def embedded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.get_input_embeddings()(ids).detach()  # type: ignore[no-any-return]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_masked_tokens_amid_the_text(name, way):
    model = family(name).build(dtype=torch.float32 if name == "bloom" else None)  # its eager masks of padding
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[0, [0, 5, 6, 11]] = 0
    stats = assert_same(model, prompt(24), attention_mask=mask, **WAYS[way])
    assert way != "greedy" or stats.tokens_per_step > 1
    rows = batch(20, 9, 15)
    rows["attention_mask"][0, 3:5] = rows["attention_mask"][2, 10] = 0
    assert_same(model, **rows, pad_token_id=0, **WAYS[way])


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
@pytest.mark.one_in(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_embeddings_in_place_of_ids(name, way):
    """Embeddings that are those of no tokens, with ids beside them or not, and in batches."""
    model = family(name).build()
    others = embedded(model, prompt(24)) * 1.1
    stats = assert_same(model, None, inputs_embeds=others, **WAYS[way])
    assert way != "greedy" or stats.tokens_per_step > 1
    assert_same(model, None, [ADAPTIVE[0] if way != "beams" else PAPER], inputs_embeds=others, **WAYS[way])
    assert_same(model, prompt(24), inputs_embeds=others, **WAYS[way])
    rows = batch(20, 9, 15)
    embeddings = embedded(model, rows.pop("ids"))
    assert_same(model, None, inputs_embeds=embeddings, **rows, pad_token_id=0, **WAYS[way])


def test_what_comes_with_embeddings():
    """Streams, and a cache that holds as many tokens as plain decoding leaves."""
    model = family("llama").build()
    given = {"inputs_embeds": embedded(model, prompt(9)), "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**given, return_dict_in_generate=True)
    steps = lade.stream(model, lookahead=PAPER, **given)
    assert [token for step in steps for token in step.tokens] == expected.sequences[0].tolist()
    ours = lade.generate(model, lookahead=PAPER, **given, return_dict_in_generate=True)
    assert ours.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == 28


def test_an_engine_takes_embeddings_beside_ids():
    model = family("llama").build()
    given = {"input_ids": prompt(9), "inputs_embeds": embedded(model, prompt(9)) * 1.1, "max_new_tokens": 20}
    expected = model.generate(**given, do_sample=False)
    with lade.Engine(model, max_rows=2, prefill_tokens=4) as engine:
        assert torch.equal(engine.add(**given, do_sample=False).result(60.0), expected)


REFUSED = {
    "counts masked tokens in the windows": ("mistral-window", {"input_ids": prompt(20)}),
    "may count masked tokens": ("ministral", {"input_ids": prompt(20)}),
    "that ends with 0": ("llama", {"input_ids": prompt(20), "attention_mask": torch.tensor([[1] * 19 + [0]])}),
    f"masked tokens or padding with {CACHE}": ("llama", {"input_ids": prompt(20), "past_key_values": lade.TreeCache()}),
    "input_ids have 5 columns, which do not match": (
        "llama",
        {"input_ids": prompt(5), "inputs_embeds": torch.zeros(1, 20, 32, dtype=torch.float64)},
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_told_apart_is_refused(said):
    name, arguments = REFUSED[said]
    mask = torch.tensor([[1, 1, 0] + [1] * 17])
    with pytest.raises(lade.UnsupportedArgumentError, match=said):
        lookahead(family(name).build(), arguments.pop("input_ids"), **{"attention_mask": mask, **arguments})
