"""What a step feeds where a single row drafts nothing: the last token of its text, as plain decoding does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lade.model.attention_span import FULL, AttentionSpan


@dataclass(frozen=True)
class RootInputs:
    """Tensors of such a step.

    It needs no mask where a layer sees all of the text, so that the model takes the way of plain decoding.

    Attributes:
        ids: `[1, 1]` int64.
        positions: `[1, 1]` int64.
        length: P, cached tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    length: int

    @classmethod
    def of(cls, token: int, length: int, device: torch.device) -> RootInputs:
        """The token after `length` cached ones."""
        ids, positions = (torch.full((1, 1), number, device=device) for number in (token, length))
        return cls(ids, positions, length)

    @property
    def key_positions(self) -> torch.Tensor:
        """`[1, P + 1]` int64, position of every slot of the cache and of the step."""
        return torch.arange(self.length + 1, device=self.ids.device)[None]

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """What the token may see of what is near enough, `[1, 1, 1, P + 1]` bool; None for all of it."""
        if span == FULL:
            return None
        return span(self.positions[:, :, None], self.key_positions[:, None, :])[:, None]
