"""Presence and frequency penalties, as OpenAI's API defines them; transformers has none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that the answer has already: `- frequency * count - presence * (count > 0)`.

    The prompt does not count. A processor like any other, for `model.generate`, too:

    >>> model.generate(ids, logits_processor=[Penalties(0.5, 0.5, prompt_length=ids.shape[1])], max_new_tokens=20)

    Source: OpenAI's API reference, "Frequency and presence penalties".

    Args:
        presence: for a token that has come up; below zero it is made likelier.
        frequency: for each time that it has.
        prompt_length: columns of the prompt, padding included.
    """

    def __init__(self, presence: float, frequency: float, *, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length
        self._counted = torch.empty(0, 0)  # [B, L], the text whose tokens are in the counts
        self._counts = torch.empty(0, 0)  # [B, V]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """Scores `[B, V]`, given the text so far, `[B, L]`."""
        new = input_ids[:, self._first_new(input_ids, scores) :]
        self._counts.scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        self._counted = input_ids.clone()
        return scores - self._frequency * self._counts - self._presence * (self._counts > 0)

    def _first_new(self, input_ids: torch.Tensor, scores: torch.Tensor) -> int:
        """The column from which on tokens have to be counted; all have, where it is not the text that was counted."""
        length = self._counted.shape[1]
        same = self._counts.shape == scores.shape and self._counts.device == scores.device
        if same and length >= self._prompt_length and torch.equal(self._counted, input_ids[:, :length]):
            return length
        with torch.inference_mode(False):  # a stream may go on outside of it
            self._counts = torch.zeros_like(scores)
        return self._prompt_length
