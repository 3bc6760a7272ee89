"""`model.generate(custom_generate=FOLDER, trust_remote_code=True)`: plain's tokens in fewer passes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerating import RECIPE
from small_models import small_model

import lade
from lade.testing import toy_model

PROMPT = torch.tensor([[5, 9, 2, 7, 5, 9, 2]])
PADDED = {
    "input_ids": torch.tensor([[0, 0, 5, 9, 2], [3, 8, 3, 8, 3]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "pad_token_id": 0,
}
GREEDY = {"do_sample": False, "max_new_tokens": 40}
FIXED = "window=7;ngram=5;guesses=7"  # "auto" may find plain steps the best, on a busy machine
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def toy() -> Any:
    return toy_model("llama")


def seeded(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"input_ids": PROMPT, **GREEDY},
        {"inputs": PROMPT, **SAMPLED},
        {"input_ids": PROMPT, **GREEDY, "num_beams": 3},
        {**PADDED, **SAMPLED},
    ],
    ids=["greedy", "sampled", "beams", "batch"],
)
def test_the_tokens_are_those_of_plain_generate(toy: Any, arguments: dict[str, Any]) -> None:
    stats = lade.Stats()
    expected = seeded(toy, **arguments)
    state = torch.get_rng_state()
    assert torch.equal(seeded(toy, **arguments, **RECIPE), expected)
    assert torch.equal(seeded(toy, **arguments, **RECIPE, lookahead=FIXED, stats=stats), expected)
    assert torch.equal(torch.get_rng_state(), state), "the generator is left in another state"
    assert stats.steps < sum(stats.accepted), "nothing was accelerated"


def test_a_streamer_gets_prompt_tokens_and_end(toy: Any) -> None:
    plain, ours = Mock(), Mock()
    toy.generate(PROMPT, **GREEDY, streamer=plain)
    toy.generate(PROMPT, **GREEDY, streamer=ours, **RECIPE)
    told = [torch.cat([call.args[0].flatten() for call in each.put.call_args_list]) for each in (plain, ours)]
    assert torch.equal(*told) and len(told[0]) == PROMPT.numel() + 40
    assert ours.end.call_count == plain.end.call_count == 1


def test_stop_strings_stop_at_plains_token(model: Any, tokenizer: Any, text: str) -> None:
    arguments = {**tokenizer(text, return_tensors="pt"), "do_sample": False, "max_new_tokens": 80}
    arguments |= {"stop_strings": ["using", "never said"], "tokenizer": tokenizer}
    expected = model.generate(**arguments)
    stats = lade.Stats()
    assert torch.equal(model.generate(**arguments, **RECIPE, lookahead=FIXED, stats=stats), expected)
    assert stats.new_tokens < 80 and stats.tokens_per_step > 1


def test_a_model_that_cannot_be_served_is_decoded_plainly() -> None:
    neo = small_model("gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]])
    expected = neo.generate(PROMPT, **GREEDY)
    with pytest.warns(lade.FallbackWarning, match="local attention"):
        assert torch.equal(neo.generate(PROMPT, **GREEDY, **RECIPE), expected)
    with pytest.raises(lade.UnsupportedModelError, match="local attention"):
        neo.generate(PROMPT, **GREEDY, **RECIPE, lookahead="budget=16")
