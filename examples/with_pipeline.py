"""transformers' pipeline: python examples/with_pipeline.py [MODEL]."""

from __future__ import annotations

from typing import Any

from comparison import DTYPE, MODEL, compare
from transformers import pipeline

from lade.embedded import prompts

pipe = pipeline("text-generation", model=MODEL, dtype=DTYPE)


def run(**further: Any) -> str:
    """Further arguments of a call go to `generate`; given to `pipeline` itself, `trust_remote_code` would not."""
    text: str = pipe(prompts()[0], max_new_tokens=120, do_sample=False, **further)[0]["generated_text"]
    return text


compare(run)
