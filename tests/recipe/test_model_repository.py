"""A model's own folder holds the recipe: `from_pretrained(trust_remote_code=True)` puts it in place of `generate`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import lade
from lade.recipe import export_recipe
from lade.testing import toy_model

PROMPT = torch.tensor([[5, 9, 2, 7, 5, 9, 2]])
GREEDY = {"do_sample": False, "max_new_tokens": 40}
FIXED = lade.LookaheadConfig(7, 5, 7)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    toy_model().save_pretrained(folder)
    export_recipe(folder, force=True)
    return folder


@pytest.fixture(scope="module")
def plain(repository: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(repository, dtype=torch.float64)


@pytest.fixture(scope="module")
def model(repository: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(repository, dtype=torch.float64, trust_remote_code=True)


def test_every_generate_is_accelerated(model: Any, plain: Any) -> None:
    expected, stats = plain.generate(PROMPT, **GREEDY), lade.Stats()
    assert torch.equal(model.generate(input_ids=PROMPT, **GREEDY), expected)
    assert torch.equal(model.generate(PROMPT, **GREEDY, lookahead=FIXED, stats=stats), expected)
    assert stats.tokens_per_step > 1


def test_positional_arguments_are_those_of_generate(model: Any, plain: Any) -> None:
    config = GenerationConfig(do_sample=False, max_new_tokens=9)
    assert torch.equal(model.generate(PROMPT, config), plain.generate(PROMPT, config))
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        model.generate(PROMPT, inputs=PROMPT)


def test_what_cannot_be_served_falls_back_to_the_classs_own_generate(model: Any, plain: Any) -> None:
    arguments = {**GREEDY, "prompt_lookup_num_tokens": 3}
    with pytest.warns(lade.FallbackWarning, match="prompt_lookup_num_tokens"):
        assert torch.equal(model.generate(PROMPT, **arguments), plain.generate(PROMPT, **arguments))
    with pytest.raises(lade.UnsupportedArgumentError, match="prompt_lookup_num_tokens"):
        model.generate(PROMPT, **arguments, lookahead=FIXED)


def test_without_trust_nothing_of_it_runs(repository: Path, plain: Any) -> None:
    assert "generate" not in vars(plain)
    with pytest.raises(ValueError, match=re.escape("trust_remote_code=True")):
        plain.generate(PROMPT, custom_generate=str(repository), trust_remote_code=False)
