"""Prompts with more than text in them: images, whose features replace the embeddings of their placeholders.

Or embeddings that are given in place of ids, or masked tokens amid the text.

Only the prefill sees these. So the prompts of a batch are fed once, whole and together, just as plain decoding feeds
them, padding included; then what is masked is taken out of the cache, and what follows is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from lade.model.kv_cache import TreeCache
from lade.model.position_offsets import PositionOffsets


@dataclass(frozen=True)
class PreparedPrompts:
    """What plain decoding hands to its prefill.

    Attributes:
        input_ids: `[B * k, L]` int64, padded on the left; k beams of a prompt stand beneath each other.
        arguments: all others, by name, but for the cache.
        columns: `[B]`, those of each prompt that are text, ascending; the others are masked.
        width: L, columns that are fed.
        readable: whether a drafter may read the logits of all tokens of a text: its columns have no gaps, and ids.
        offsets: `[B]`, of the positions that come after.
        beams: k.
    """

    input_ids: torch.Tensor
    arguments: Mapping[str, Any]
    columns: Sequence[Sequence[int]]
    width: int
    readable: bool = True
    offsets: PositionOffsets = field(default_factory=PositionOffsets)
    beams: int = 1

    @property
    def paddings(self) -> list[int]:
        """`[B]`, masked columns of each prompt."""
        return [self.width - len(seen) for seen in self.columns]

    def feed(self, model: Any, generation_config: GenerationConfig, cache: TreeCache) -> torch.Tensor:
        """Feed what `cache` does not hold yet, and have its rows begin with their text.

        Args:
            model: the model whose `generate` has prepared the prompts.
            generation_config: transformers' prefill reads `prefill_chunk_size` from it.
            cache: empty, or, for a single prompt without padding, with the first tokens of it.

        Returns:
            Logits of each prompt's last token, `[B, V]`.
        """
        arguments = {name: dict(value) if type(value) is dict else value for name, value in self.arguments.items()}
        output = model._prefill(self.input_ids, generation_config, {**arguments, "past_key_values": cache})
        logits: torch.Tensor = output.logits[:, -1]
        if self.beams > 1:
            first = torch.arange(0, len(logits), self.beams)
            cache.batch_select_indices(first)
            logits = logits[first.to(logits.device)]
        if any(self.paddings):
            cache.keep(self.columns, fed=self.width)
        cache.offsets = self.offsets
        return logits
