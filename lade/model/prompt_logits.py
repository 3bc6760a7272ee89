"""The hidden states of a prefill, from which the language model head computes the logits of all prompt tokens.

Prefill has the model compute the logits of the last token only: those of a long prompt would take gigabytes. The hidden
states before the head are small. The head then runs over them in pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from lade.decoding.loop import PromptLogitsHook
from lade.errors import InputError
from lade.model.thread_patches import hooked
from lade.stats import TokenLogprobs

MOST_TOKENS = 1024
"""Of a longer prompt only the hidden states of the last tokens are kept: the head is not free."""
_PIECE_LOGITS, _MOST_LOGITS = 2**24, 2**28


class DecoderOutput(ABC):
    """Sees what the base model returns to this thread while the context is open."""

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
        """Take in what was returned; what is returned instead, None for the same."""


class HiddenStates(DecoderOutput):
    """Collects what the base model returns to this thread while the context is open."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._states: torch.Tensor | None = None  # [B, T, H], of the last tokens

    def _collect(self, output: Any) -> None:
        states: torch.Tensor = output[0]  # [B, T, H]
        if self._states is not None and states.shape[1] < MOST_TOKENS:  # a chunk of a prefill in chunks
            states = torch.cat([self._states, states], dim=1)
        if states.shape[1] > MOST_TOKENS:
            states = states[:, -MOST_TOKENS:].clone()  # a view would keep those before, too
        self._states = states

    def prompt_logits(self, logits: torch.Tensor, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of the prompt's last tokens, a bounded number at a time.

        Args:
            logits: `[B, V]` that the model returned for the last token. Some models scale what the head returns, or cap
                it: the others are scaled likewise.
            length: tokens in the prompt, cached ones included.

        Yields:
            The number of a token, and logits `[B, T, V]` from there on, on the device of `logits`. In a model that is
            split over several devices the head may lie on another one.
        """
        if self._states is not None:
            yield from logits_of(self._model, self._states, logits, length)

    def tell(
        self,
        hook: PromptLogitsHook,
        logits: torch.Tensor,
        length: int,
        rows: Iterable[Sequence[int]],
        paddings: Sequence[int] | None = None,
    ) -> None:
        """Call a hook with these logits, prompt by prompt.

        Args:
            hook: what to call.
            logits: see `prompt_logits`.
            length: likewise, padding included.
            rows: for each prompt the numbers of the rows that have it.
            paddings: how many columns before each prompt are no tokens of it; None for nowhere any.
        """
        places = [(numbers, 0) for numbers in rows] if paddings is None else list(zip(rows, paddings, strict=True))
        for start, piece in self.prompt_logits(logits, length):
            for (numbers, padding), own in zip(places, piece, strict=True):
                padded = max(0, padding - start)  # columns of this piece that are no tokens of the prompt
                if padded < len(own):
                    hook(numbers, start + padded - padding, own[padded:])


class PromptLogprobs:
    """How likely a model finds the tokens of a prompt, taken in while it is fed.

    Args:
        ids: of the prompt.
        top: so many of the likeliest ids are kept for each place.
        vocabulary: V.

    Attributes:
        piece_tokens: that may be fed at a time, as each of them has V logits.
    """

    def __init__(self, ids: Sequence[int], top: int, vocabulary: int) -> None:
        self._ids, self._top = ids, top
        self._most_tokens, self.piece_tokens = _MOST_LOGITS // vocabulary, max(1, _PIECE_LOGITS // vocabulary)
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def check_piece(self, tokens: int) -> None:
        """Raise `InputError` where more have to be fed at a time than there is memory for."""
        if tokens > self._most_tokens:
            raise InputError(
                f"prompt_logprobs: this model has to be fed {tokens} tokens at once, and the logits of more than "
                f"{self._most_tokens} take too much memory: give a shorter prompt"
            )

    def take(self, start: int, logits: torch.Tensor) -> None:
        """Take in logits `[T, V]` of tokens from number `start` on; a prompt that is fed again begins with 0."""
        if start == 0:
            self._pieces = []
        following = torch.tensor(self._ids[start + 1 : start + 1 + len(logits)], device=logits.device)  # what they say
        logprobs = logits[: len(following)].to(torch.float32).log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._top, logprobs.shape[1]))
        self._pieces.append((logprobs.gather(1, following[:, None])[:, 0].cpu(), ids.cpu(), values.cpu()))

    def beside(self, hook: PromptLogitsHook | None) -> PromptLogitsHook:
        """A hook that has both see the logits of the prompt."""

        def see(same_prompt: Sequence[int], start: int, logits: torch.Tensor) -> None:
            self.take(start, logits)
            if hook is not None:
                hook(same_prompt, start, logits)

        return see

    def tokens(self) -> list[TokenLogprobs | None]:
        """Those of all tokens that were fed; None for the first one, about which nothing is said."""
        made: list[TokenLogprobs | None] = [None]
        for own, ids, values in self._pieces:
            for value, top_ids, top_values in zip(own.tolist(), ids.tolist(), values.tolist(), strict=True):
                top = list(zip(top_ids, top_values, strict=True))
                made.append(TokenLogprobs(self._ids[len(made)], value, top))
        return made


def logits_of(
    model: Any, states: torch.Tensor, logits: torch.Tensor, length: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """See `HiddenStates.prompt_logits`; of states `[B, T, H]`, which are those of the prompts' last tokens."""
    head = model.get_output_embeddings()
    if head is None or not _can_read(head, states):
        return  # something lies between decoder and head: nothing is known about the prompt then
    piece = max(1, _PIECE_LOGITS // (logits.shape[0] * logits.shape[1]))
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
    """Whether a head takes what the decoder returned, as far as shapes and dtypes tell."""
    weight = getattr(head, "weight", None)
    reads = weight is None or not weight.is_floating_point() or weight.dtype == states.dtype
    return reads and states.ndim == 3 and states.shape[-1] == getattr(head, "in_features", states.shape[-1])
