"""What a step feeds where no row drafts anything: the last tokens of the texts, as plain decoding does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lade.model.attention_span import FULL, AttentionSpan
from lade.model.host_to_device import upload


@dataclass(frozen=True)
class RootInputs:
    """Tensors of such a step over B rows; K = max(P) + 1.

    A single row needs no mask where a layer sees all of the text, so that the model takes the way of plain decoding.

    Attributes:
        ids: `[B, 1]` int64.
        positions: `[B, 1]` int64.
        slots: K, those of the cache and of the step.
        allowed: `[B, 1, 1, K]` bool, what each token may see; None for all of the text of a single row.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: int
    allowed: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], lengths: Sequence[int], device: torch.device) -> RootInputs:
        """The token of each row after so many cached ones."""
        slots = max(lengths) + 1
        if len(tokens) == 1:
            ids, positions = (torch.full((1, 1), number, device=device) for number in (*tokens, *lengths))
            return cls(ids, positions, slots)
        before = np.array(lengths)[:, None]
        allowed = np.arange(slots) < before
        allowed[:, -1] = True  # where all tokens fed lie
        ids, positions, seen = upload((np.array(tokens)[:, None], before, allowed[:, None, None]), device)
        return cls(ids, positions, slots, seen)

    @property
    def key_positions(self) -> torch.Tensor:
        """`[B, K]` int64, position of every slot of the cache and of the step."""
        cached = torch.arange(self.slots - 1, device=self.ids.device).expand(len(self.ids), -1)
        return torch.cat([cached, self.positions], dim=1)

    def mask(self, span: AttentionSpan) -> torch.Tensor | None:
        """What each token may see of what is near enough, `[B, 1, 1, K]` bool; None for all of a single row's text."""
        if span == FULL:
            return self.allowed
        near = span(self.positions[:, :, None], self.key_positions[:, None, :])[:, None]
        return near if self.allowed is None else near & self.allowed
