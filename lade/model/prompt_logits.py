"""Logits of all prompt tokens, computed from the hidden states of a prefill.

Prefill computes the logits of the last token only: those of a long prompt would take gigabytes. The hidden states
before the language model head are small, and the head is then applied to them in chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from lade.decoding.loop import PromptLogitsHook
from lade.model.module_changes import hooked

MOST_TOKENS = 1024
"""Maximum number of last prompt tokens whose hidden states are kept, to bound the cost of the head."""
PIECE_LOGITS = 2**24


class DecoderOutput(ABC):
    """Intercepts the output of the base model in calls by this thread, while the context is open."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._hook = hooked(self._model.get_decoder(), after=self._collect)

    def __enter__(self) -> Self:
        self._hook.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.__exit__(kind, problem, trace)

    @abstractmethod
    def _collect(self, output: Any) -> Any:
        """Receive the output; return a replacement, or None to leave it."""


class HiddenStates(DecoderOutput):
    """Collects the base model's hidden states in calls by this thread, while the context is open."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._states: torch.Tensor | None = None  # [B, T, H], of the last tokens

    def _collect(self, output: Any) -> None:
        states: torch.Tensor = output[0]  # [B, T, H]
        if self._states is not None and states.shape[1] < MOST_TOKENS:  # a chunk of a chunked prefill
            states = torch.cat([self._states, states], dim=1)
        if states.shape[1] > MOST_TOKENS:
            states = states[:, -MOST_TOKENS:].clone()  # a view would keep all of them alive
        self._states = states

    def prompt_logits(self, logits: torch.Tensor, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the logits of the prompt's last tokens in chunks of bounded size.

        Args:
            logits: `[B, V]` that the model returned for the last token. Some models scale or cap the head's output: the
                other logits are scaled by the same factor.
            length: number of tokens in the prompt, cached ones included.

        Yields:
            The index of a token, and logits `[B, T, V]` from there on, on the device of `logits`. In a model split over
            several devices the head may be on another one.
        """
        if self._states is not None:
            yield from logits_of(self._model, self._states, logits, length)

    def report(
        self,
        hook: PromptLogitsHook,
        logits: torch.Tensor,
        length: int,
        rows: Iterable[Sequence[int]],
        paddings: Sequence[int] | None = None,
    ) -> None:
        """Call a hook with these logits, prompt by prompt.

        Args:
            hook: the hook to call.
            logits: `[B, V]` that the model returned for the last token, see `prompt_logits`.
            length: number of tokens in the prompt, cached ones and padding included.
            rows: for each prompt the indices of the rows that have it.
            paddings: number of padding columns before each prompt; None for zeros.
        """
        places = [(numbers, 0) for numbers in rows] if paddings is None else list(zip(rows, paddings, strict=True))
        for start, piece in self.prompt_logits(logits, length):
            for (numbers, padding), own in zip(places, piece, strict=True):
                padded = max(0, padding - start)  # columns of this piece that are no tokens of the prompt
                if padded < len(own):
                    hook(numbers, start + padded - padding, own[padded:])


def logits_of(
    model: Any, states: torch.Tensor, logits: torch.Tensor, length: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield logits from states `[B, T, H]` of the prompts' last tokens; see `HiddenStates.prompt_logits`."""
    head = model.get_output_embeddings()
    if head is None or not _can_read(head, states):
        return  # another layer is between decoder and head: the logits cannot be computed here
    piece = max(1, PIECE_LOGITS // (logits.shape[0] * logits.shape[1]))
    first = length - states.shape[1]
    whole = head(states) if states.shape[1] <= piece else None
    last = head(states[:, -1]) if whole is None else whole[:, -1]
    scale = (last * logits.to(last.device)).sum() / (last * last).sum()
    # Scaled in place, since these are the largest tensors of a call: some take longer to allocate than to compute.
    if whole is not None:
        yield first, whole.mul_(scale).to(logits.device)
        return
    for start in range(0, states.shape[1], piece):
        yield first + start, head(states[:, start : start + piece]).mul_(scale).to(logits.device)


def _can_read(head: Any, states: torch.Tensor) -> bool:
    """Return whether a head accepts the decoder's output, as far as shapes and dtypes tell."""
    weight = getattr(head, "weight", None)
    reads = weight is None or not weight.is_floating_point() or weight.dtype == states.dtype
    return reads and states.ndim == 3 and states.shape[-1] == getattr(head, "in_features", states.shape[-1])
