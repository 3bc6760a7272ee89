"""The hidden states of prompts that are padded behind: the head is to see the last token of each, wherever it lies.

`logits_to_keep` counts from the end of all rows alike. So what the base model returns is exchanged for the states of
the last tokens, and the model itself makes logits of them, scaled and capped as it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.model import prompt_logits


class PaddedStates(prompt_logits.DecoderOutput):
    """Has the model compute the logits of last tokens alone, while the context is open and this thread calls it.

    Args:
        model: is fed prompts, padded behind to the longest.
        lengths: `[P]`, of the prompts.
        kept: whether to keep the states of all prompt tokens, for `prompt_logits`.
    """

    def __init__(self, model: PreTrainedModel, lengths: Sequence[int], *, kept: bool) -> None:
        super().__init__(model)
        self._lengths, self._kept = lengths, kept
        self._states: dict[int, torch.Tensor] = {}  # by length, `[B, T, H]` of the last tokens of these prompts

    def _collect(self, output: Any) -> Any:
        states: torch.Tensor = output[0]  # [P, W, H]
        if self._kept:
            for length in set(self._lengths):
                rows = states[self._rows_of(length)]
                self._states[length] = rows[:, max(0, length - prompt_logits.MOST_TOKENS) : length]
        last = _last(states, self._lengths)[:, None]
        if isinstance(output, tuple):
            return last, *output[1:]
        output[next(iter(output))] = last
        return output

    def _rows_of(self, length: int) -> list[int]:
        return [number for number, other in enumerate(self._lengths) if other == length]

    def last_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Those of the last tokens `[P, V]`, of what the model returned; which is more where it has no base model."""
        return logits[:, 0] if logits.shape[1] == 1 else _last(logits, self._lengths)

    def prompt_logits(self, logits: torch.Tensor) -> Iterator[tuple[list[int], int, torch.Tensor]]:
        """Logits of the prompts' last tokens, a bounded number at a time, shorter prompts first.

        Args:
            logits: `[P, V]`; see `HiddenStates.prompt_logits`.

        Yields:
            Numbers of B prompts of equal length, the number of a token, and their logits `[B, T, V]` from there on.
        """
        for length in sorted(self._states):
            rows = self._rows_of(length)
            for start, piece in prompt_logits.logits_of(self._model, self._states[length], logits[rows], length):
                yield rows, start, piece


def _last(states: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Of states `[P, W, H]` those of the prompts' last tokens, `[P, H]`."""
    ends = torch.tensor(lengths, device=states.device) - 1
    return states[torch.arange(len(lengths), device=states.device), ends]
