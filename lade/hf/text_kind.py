"""Kinds of texts, some of which are easier to guess than others."""

from __future__ import annotations

from lade.config import LookaheadConfig
from lade.hf.grammar.processor import GrammarProcessor
from lade.hf.prepared import Prepared


def kind_of_text(prepared: Prepared, config: LookaheadConfig) -> str:
    """A name of the kind of text that a call asks for, such as "sampled at 0.7, with a memory"."""
    generation_config = prepared.generation_config
    kind = f"sampled at {generation_config.temperature or 1.0:.1f}" if generation_config.do_sample else "greedy"
    if any(isinstance(each, GrammarProcessor) for each in prepared.logits_processor):
        kind += ", by a grammar"
    return kind if config.memory is None else f"{kind}, with a memory"
