"""Outlines' transformers backend: a processor of its own restricts every token."""

from __future__ import annotations

import functools
import json
from typing import Any, Literal

import pytest
import torch
from accelerating import RECIPE, Way, accelerated

from lade.embedded.files import prompts

outlines = pytest.importorskip("outlines")

# It compiles a kernel for its masks, and torch's compiler still imports what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

GREEDY = {"do_sample": False, "max_new_tokens": 60}
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}}, "required": ["name"]}'
CALLS = r"def [a-z_]{3,12}\([a-z]{0,9}\):\n(    [a-z]{2,9} = [a-z]{2,9}\n){3,9}"


@pytest.fixture(scope="module")
def generator(model: Any, tokenizer: Any) -> Any:
    return outlines.from_transformers(model, tokenizer)


def test_a_pattern(generator: Any, way: Way, text: str) -> None:
    answer = accelerated(way, generator.model, functools.partial(generator, text, outlines.regex(CALLS), **GREEDY))
    assert answer.startswith("def ")


def test_a_schema(generator: Any, way: Way, text: str) -> None:
    def run(**further: Any) -> str:
        torch.manual_seed(2)
        answer: str = generator(text, outlines.json_schema(SCHEMA), do_sample=True, max_new_tokens=60, **further)
        return answer

    assert json.loads(accelerated(way, generator.model, run)).keys() == {"name"}


def test_a_choice(generator: Any, text: str) -> None:
    choice = functools.partial(generator, text, Literal["yes", "no"], **GREEDY)
    assert choice() == choice(**RECIPE, lookahead="budget=16") and choice() in ("yes", "no")


def test_several_prompts_at_once_go_in_lock_step(generator: Any, way: Way) -> None:
    """Its processor counts on all rows at once."""
    accelerated(
        way, generator.model, functools.partial(generator.batch, prompts()[:2], outlines.regex(CALLS), **GREEDY)
    )
