"""Kinds of texts, some of which are easier to guess than others."""

from __future__ import annotations

from transformers import GenerationConfig

from lade.config import LookaheadConfig


def kind_of_text(generation_config: GenerationConfig, config: LookaheadConfig) -> str:
    """A name of the kind of text that a call asks for, such as "sampled at 0.7, with a memory"."""
    drawn = f"sampled at {generation_config.temperature or 1.0:.1f}" if generation_config.do_sample else "greedy"
    return drawn if config.memory is None else f"{drawn}, with a memory"
