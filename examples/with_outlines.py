"""Outlines: text that fits a pattern, python examples/with_outlines.py [MODEL]."""

from __future__ import annotations

from typing import Any

import outlines
from comparison import DTYPE, MODEL, compare
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade.embedded import prompts

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPE)
generator = outlines.from_transformers(model, AutoTokenizer.from_pretrained(MODEL))
line = r"    [a-z_]{2,9} = [a-z_.]{2,16}(\(\))?\n"
functions = outlines.regex(rf"(\n\ndef [a-z_]{{3,16}}\([a-z_, ]{{0,20}}\):\n({line}){{2,6}}){{1,4}}")


def run(**further: Any) -> str:
    """Further arguments of a call go to `generate`, beside the processor that Outlines makes of the pattern."""
    text: str = generator(prompts()[0], functions, max_new_tokens=120, do_sample=False, **further)
    return text


compare(run)
