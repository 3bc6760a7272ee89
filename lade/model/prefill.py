"""Prefill: prompt groups, chunk boundaries, multimodal prompts, and the pass itself.

For most models any will do: attention computes the same for a token, whatever is fed with it. Two kinds of models give
other results when the same text is fed in other pieces:

- recurrent layers feed a single token with another function than several, and what the latter limits, the former may
  not; some begin with an empty state whenever several tokens are fed;
- indexers pick among the keys of all that is fed at once, and which of equal ones they pick depends on how many there
  are. A token that sees no more keys than they pick sees all of these, however it is fed.

Or embeddings that are given in place of ids, or masked tokens amid the text.

Only the prefill sees these. So the prompts of a batch are fed once, whole and together, just as plain decoding feeds
them, padding included; then what is masked is taken out of the cache, and what follows is text.

`logits_to_keep` counts from the end of all rows alike. So what the base model returns is exchanged for the states of
the last tokens, and the model itself makes logits of them, scaled and capped as it does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.loop import PromptLogitsHook
from lade.errors import UnsupportedArgumentError
from lade.model import prompt_logits
from lade.model.cache_layers import Recurrence
from lade.model.facts import ModelFacts
from lade.model.kv_cache import PositionOffsets, TreeCache
from lade.model.masks import MaskPlan
from lade.model.prompt_logits import HiddenStates
from lade.model.slot_patches import SlotPatches
from lade.model.thread_patches import hooked

PASS_TOKENS = {"cpu": 64, "cuda": 256}
"""What a pass costs beside its tokens, in tokens, by the type of device. On a CPU three models of 0.3 to 134 million
parameters took 45 to 75. A GPU reads all weights in the time in which it multiplies some hundred tokens by them."""


def grouped(prompts: Mapping[int, int], pass_tokens: int) -> list[set[int]]:
    """Lengths that are fed together, each prompt padded to the longest of its group, so that all costs least.

    Args:
        prompts: how many prompts there are of each length.
        pass_tokens: what a pass costs beside its tokens, in tokens.

    Returns:
        The lengths of each pass, shorter prompts first. A group costs `pass_tokens`, and its prompts times its longest.
    """
    lengths = sorted(prompts)
    best = [(0, 0)]  # of the n shortest lengths: what they cost, and how many of them are in groups before the last
    for end, longest in enumerate(lengths, start=1):
        rows, choices = 0, []
        for first in range(end - 1, -1, -1):
            rows += prompts[lengths[first]]
            choices.append((best[first][0] + pass_tokens + rows * longest, first))
        best.append(min(choices))
    groups, end = [], len(lengths)
    while end:
        first = best[end][1]
        groups.append(set(lengths[first:end]))
        end = first
    return groups[::-1]


class TextPieces:
    """The pieces into which texts are cut for one model.

    Args:
        recurrence: of its recurrent layers; None without any.
        slots: its indexers are among them.

    Attributes:
        anywhere: whether a text may be cut anywhere; if not, an answer in it has to be fed as decoding fed it.
        shareable: first tokens of a text whose keys and values are those of any text that begins like it. Where there
            are states, these are not of first tokens, so none.
    """

    def __init__(self, recurrence: Recurrence | None, slots: SlotPatches) -> None:
        self._has_states, self._picked = recurrence is not None, slots.picked_keys
        self._forgets = recurrence is not None and recurrence.forgets
        self.anywhere = not self._has_states and self._picked is None
        self.shareable = 0 if self._has_states else sys.maxsize if self._picked is None else self._picked

    def end(self, fed: int, most: int, length: int) -> int:
        """Where the next piece of a prompt ends, so that pieces give what the whole prompt gives.

        Args:
            fed: tokens that the cache holds.
            most: tokens to feed, at most, unless the pieces have to be longer.
            length: of the prompt.
        """
        end = min(length, fed + (max(most, 2) if self._has_states else most))
        if self._forgets or (self._picked is not None and end > self._picked):
            return length
        return length if self._has_states and end == length - 1 else end


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


class PromptPasses:
    """Feeds prompts to one model.

    Args:
        model: a decoder-only model that `lade.supports`.
        plan: how it takes its masks.
        generation_config: transformers' prefill reads `prefill_chunk_size` from it.
        device: where ids are fed in.
    """

    def __init__(
        self, facts: ModelFacts, plan: MaskPlan, generation_config: GenerationConfig, device: torch.device
    ) -> None:
        self._model: Any = facts.model
        self._plan, self._generation_config, self._device = plan, generation_config, device
        self._all_logits = False
        self._accepts, self._cache_name = facts.accepts, facts.cache_name or "past_key_values"

    @property
    def pad(self) -> bool:
        """Whether they may be of several lengths; of chunks, the last one has not the last tokens of all."""
        return self._plan.pads and self._plan.attends and self._generation_config.prefill_chunk_size is None

    def with_all_logits(self) -> PromptPasses:
        """The same, for one prompt at a time, whose hooks are called with the logits that the model itself returns.

        Otherwise they get what its head makes of the hidden states, which models may scale or cap.
        """
        passes = copy.copy(self)
        passes._all_logits = True
        return passes

    def feed(
        self,
        prompts: Sequence[Sequence[int]],
        sharing: Sequence[Sequence[int]],
        cache: TreeCache,
        hook: PromptLogitsHook | None,
    ) -> torch.Tensor:
        """Feed what the cache does not hold yet.

        Args:
            prompts: of equal length; of any length to an empty cache, if they may be padded.
            sharing: numbers of the rows that have each prompt.
            cache: holds the first tokens of all of them, or nothing.
            hook: is called with the logits of their tokens.

        Returns:
            Logits of the last tokens, `[P, V]`.
        """
        if len(set(map(len, prompts))) > 1:
            return self._feed_padded(prompts, sharing, cache, hook)
        ids = torch.tensor(prompts, device=self._device)
        kwargs = self._arguments(ids, cache)
        if "logits_to_keep" in self._accepts:
            kwargs["logits_to_keep"] = 1
        cached = cache.get_seq_length()
        if cached and self._plan.attends:
            kwargs["attention_mask"] = torch.ones_like(ids)  # by its width transformers knows what is cached already
        with self._watched(hook) as hidden:
            missing = ids if self._plan.attends else ids[:, cached:]  # of states transformers does not know how much
            output = self._model._prefill(missing, self._generation_config, kwargs)
        cache.count(len(ids), ids.shape[1] - cached)
        cache.settle()
        logits: torch.Tensor = output.logits[:, -1]
        if hook and hidden:
            hidden.tell(hook, logits, ids.shape[1], sharing)
        elif hook:
            self._tell_all(hook, sharing, cached, output.logits[:, cached - ids.shape[1] :], ids.shape[1] - cached)
        return logits

    def _watched(self, hook: PromptLogitsHook | None) -> AbstractContextManager[HiddenStates | None]:
        """What a pass is made in, so that a hook can be told the logits of the prompt."""
        if hook is None or not self._all_logits:
            return nullcontext() if hook is None else HiddenStates(self._model)
        return hooked(self._model, before=self._keep_all)  # some models have a word of their own in what is kept

    def _keep_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "logits_to_keep" in self._accepts:
            kwargs["logits_to_keep"] = 0

    def _tell_all(
        self, hook: PromptLogitsHook, sharing: Sequence[Sequence[int]], start: int, logits: torch.Tensor, fed: int
    ) -> None:
        """Call a hook with logits `[P, T, V]` that the model returned for T = `fed` tokens from number `start` on."""
        if logits.shape[1] != fed:
            why = f"prompt_logprobs cannot be used with {type(self._model).__name__}: it returns few logits of a prompt"
            raise UnsupportedArgumentError(why, "leave it out")
        for numbers, own in zip(sharing, logits, strict=True):
            hook(numbers, start, own)

    def _feed_padded(
        self,
        prompts: Sequence[Sequence[int]],
        sharing: Sequence[Sequence[int]],
        cache: TreeCache,
        hook: PromptLogitsHook | None,
    ) -> torch.Tensor:
        """The same of prompts of several lengths; attention is causal, so nothing sees what they are padded with.

        That is their own last token: nobody else's numbers get into a row, should they be none.
        """
        lengths = list(map(len, prompts))
        width = max(lengths)
        ids = torch.tensor(
            [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts], device=self._device
        )
        with PaddedStates(self._model, lengths, kept=hook is not None) as states:
            output = self._model._prefill(ids, self._generation_config, self._arguments(ids, cache))
        cache.trim(lengths)
        logits = states.last_logits(output.logits)
        if hook:
            for numbers, start, piece in states.prompt_logits(logits):
                for number, prompt_logits in zip(numbers, piece, strict=True):
                    hook(sharing[number], start, prompt_logits)
        return logits

    def _arguments(self, ids: torch.Tensor, cache: TreeCache) -> dict[str, Any]:
        kwargs: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if "position_ids" in self._accepts:
            kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return kwargs
