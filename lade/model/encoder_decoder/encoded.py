"""What the encoder has made of the inputs of a batch: computed once, and seen by every pass of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for B rows.

    Attributes:
        outputs: what it returned, the hidden states `[B, T, H]` first.
        mask: `[B, T]`, which of the states are no padding; None where none is. Whisper, whose decoder looks at none, is
            given that of all sounds also with the segments of some: one of other than B rows stays as it is.
    """

    outputs: Any
    mask: torch.Tensor | None = None

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel, input_ids: torch.Tensor) -> Encoded:
        """Run the encoder on ids `[B, T]` without padding."""
        encoder: Any = model.get_encoder()
        return cls(encoder(input_ids=input_ids, return_dict=True))

    @property
    def states(self) -> torch.Tensor:
        """`[B, T, H]`, the hidden states."""
        states: torch.Tensor = self.outputs[0]
        return states

    def __len__(self) -> int:
        """B."""
        return self.states.shape[0]

    def rows(self, numbers: Sequence[int]) -> Encoded:
        """Only these rows, in this order; a row may occur twice."""
        if list(numbers) == list(range(len(self))):
            return self
        rows = torch.tensor(numbers, device=self.states.device)
        outputs = BaseModelOutput(last_hidden_state=self.states[rows])
        mask = self.mask
        if mask is not None and len(mask) == len(self):
            mask = mask[rows.to(mask.device)]
        return Encoded(outputs, mask)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `forward` for these rows."""
        arguments: dict[str, Any] = {"encoder_outputs": self.outputs}
        if self.mask is not None:
            arguments["attention_mask"] = self.mask
        return arguments
