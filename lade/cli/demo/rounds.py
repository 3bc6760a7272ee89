"""Rounds of `lade demo`, and the draft memory of its last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from lade.cli.options.decoding import Choices
from lade.config import LookaheadConfig

if TYPE_CHECKING:
    from lade.cli.loading.load import LoadedModel
    from lade.memory import Memory

ADAPTIVE, KEPT = "lade", "lade, memory kept"
_LEARNING_S = 6.0


@dataclass(frozen=True)
class Round:
    """A text that is decoded by `model.generate` and by lookahead decoding.

    Attributes:
        text: text of the prompt.
        choices: settled choices of all methods.
        config: configuration of lookahead decoding.
        name: name of lookahead decoding with this configuration.
    """

    text: str
    choices: Choices
    config: LookaheadConfig
    name: str

    @property
    def keeps_memory(self) -> bool:
        """True if the round starts with a draft memory."""
        return self.config.memory is not None


def adaptive_rounds(texts: Sequence[str], choices: Choices, memory: Memory) -> list[Round]:
    """Return rounds of the adaptive method, then the same with a memory kept from round to round."""
    cold = fixed_rounds(texts, choices, LookaheadConfig(), ADAPTIVE)
    return [*cold, *fixed_rounds(texts, choices, LookaheadConfig(memory=memory), KEPT)]


def fixed_rounds(texts: Sequence[str], choices: Choices, config: LookaheadConfig, name: str) -> list[Round]:
    """Return a round of one method for each text."""
    return [Round(text, choices, config, name) for text in texts]


def learn(loaded: LoadedModel, memory: Memory, shown: Sequence[str], max_new_tokens: int) -> int:
    """Fill the memory by decoding bundled texts other than those shown.

    Args:
        loaded: model to generate with, and its tokenizer.
        memory: draft memory to fill.
        shown: texts to skip, as they are shown later.
        max_new_tokens: token limit of each text.

    Returns:
        Number of texts that there was time for; the last may be incomplete.
    """
    import torch

    from lade.embedded import files as embedded
    from lade.hf.generate import stream

    others = [text for text in (*embedded.prompts(), *embedded.builtin_prompts()) if text not in shown]
    config, end, learned = LookaheadConfig(memory=memory), perf_counter() + _LEARNING_S, 0
    for text in others:
        ids: list[int] = loaded.tokenizer(text)["input_ids"]
        if loaded.context and len(ids) >= loaded.context:
            continue
        prompt, learned = torch.tensor([ids], device=loaded.model.device), learned + 1
        room = loaded.room(ids, max_new_tokens, within=True)
        mask = torch.ones_like(prompt)
        for _ in stream(loaded.model, input_ids=prompt, attention_mask=mask, max_new_tokens=room, lookahead=config):
            if perf_counter() > end:
                return learned
    return learned
