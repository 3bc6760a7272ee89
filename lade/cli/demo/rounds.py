"""What `lade demo` shows: which texts, decoded how; and the memory of its last rounds."""

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

ADAPTIVE, KEPT = "adaptive", "memory kept"
_LEARNING_S = 6.0


@dataclass(frozen=True)
class Round:
    """One text decoded twice, plainly and otherwise.

    Attributes:
        text: the prompt.
        choices: settled ones.
        config: of the method beside plain decoding.
        name: of that method.
    """

    text: str
    choices: Choices
    config: LookaheadConfig
    name: str

    @property
    def keeps_memory(self) -> bool:
        """Whether it begins with what was learned from other texts."""
        return self.config.memory is not None


def adaptive_rounds(texts: Sequence[str], choices: Choices, memory: Memory) -> list[Round]:
    """The adaptive method as it comes, then the same texts with a memory that is kept from round to round."""
    cold = fixed_rounds(texts, choices, LookaheadConfig(), ADAPTIVE)
    return [*cold, *fixed_rounds(texts, choices, LookaheadConfig(memory=memory), KEPT)]


def fixed_rounds(texts: Sequence[str], choices: Choices, config: LookaheadConfig, name: str) -> list[Round]:
    """One method for all texts."""
    return [Round(text, choices, config, name) for text in texts]


def learn(loaded: LoadedModel, memory: Memory, shown: Sequence[str], max_new_tokens: int) -> int:
    """Decode texts that come with the project, for what the memory learns by it; never those that are shown.

    Args:
        loaded: what generates.
        memory: learns with every step.
        shown: texts to pass over.
        max_new_tokens: of each text.

    Returns:
        How many texts there was time for; the last one may be incomplete.
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
