"""Prefill: grouping of prompts, safe split points, prepared prompts, the pass itself, and logits of all prompt tokens.

For most models a text may be split anywhere, as attention computes the same for a token whatever is fed with it. Two
kinds of models depend on the split:

- recurrent layers use another function for a single token than for several, and only the latter may clamp its values;
  some also start from an empty state whenever several tokens are fed;
- indexers select among the keys of all tokens of a pass, and how ties are broken depends on their number. A token that
  sees no more keys than are selected sees all of them, however it is fed.

Some prompts have more than ids: media inputs, embeddings, or masked tokens within the text. Only the prefill sees
these. So the prompts of such a batch are fed once, whole and together, as in plain decoding, padding included; then the
masked tokens are removed from the cache, and what follows is text.

`logits_to_keep` counts from the end of all rows alike, so it cannot select the last tokens of padded rows. Instead the
base model's output is replaced by the hidden states of the last tokens, from which the model itself computes the
logits, with any scaling or capping that it applies.

Prefill computes the logits of the last token only: those of a long prompt would take gigabytes. The hidden states
before the language model head are small, and the head is then applied to them in chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.loop import PromptLogitsHook, Texts
from lade.errors import UnsupportedArgumentError
from lade.model.facts import CACHE, ModelFacts, as_cache
from lade.model.inputs import MaskPlan
from lade.model.kv_cache import PositionOffsets, TreeCache
from lade.model.module_changes import hooked
from lade.model.prepared import Prepared, PromptTexts
from lade.model.registry import Role

MOST_TOKENS = 1024
"""Maximum number of last prompt tokens whose hidden states are kept, to bound the cost of the head."""
PIECE_LOGITS = 2**24


class HiddenStates:
    """Hidden states `[B, T, H]` of the last tokens of prompts, given or collected from the base model."""

    def __init__(self, model: PreTrainedModel, states: torch.Tensor | None = None) -> None:
        self._model: Any = model
        self._states = states

    @contextmanager
    def collecting(self) -> Iterator[Self]:
        """Collect the states from calls by this thread, while the context lasts."""
        with hooked(self._model.get_decoder(), after=self._collect):
            yield self

    def _collect(self, output: Any) -> None:
        states: torch.Tensor = output[0]  # [B, T, H]
        if self._states is not None and states.shape[1] < MOST_TOKENS:  # a chunk of a chunked prefill
            states = torch.cat([self._states, states], dim=1)
        if states.shape[1] > MOST_TOKENS:
            states = states[:, -MOST_TOKENS:].clone()  # a view would keep all of them alive
        self._states = states

    def prompt_logits(self, logits: torch.Tensor, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the logits of the prompt's last tokens in chunks of bounded size, given its length with cached tokens.

        Some models scale or cap the head's output: all logits are scaled by the factor that `logits` show, the `[B, V]`
        that the model returned for the last token.

        Yields:
            The index of a token, and logits `[B, T, V]` from there on, on the device of `logits`. In a model split over
            several devices the head may be on another one.
        """
        head, states = self._model.get_output_embeddings(), self._states
        if states is None or head is None or not _can_read(head, states):
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

    def report(
        self,
        hook: PromptLogitsHook,
        logits: torch.Tensor,
        length: int,
        rows: Sequence[Sequence[int]],
        paddings: Sequence[int] | None = None,
    ) -> None:
        """Call a hook with these logits, prompt by prompt; see `prompt_logits`.

        `rows` has for each prompt the indices of its rows, `paddings` the number of columns before it, None for zeros.
        `length` is the number of tokens in the prompt, cached ones and padding included.
        """
        for start, piece in self.prompt_logits(logits, length):
            for numbers, padding, own in zip(rows, paddings or [0] * len(rows), piece, strict=True):
                padded = max(0, padding - start)  # columns of this piece that are no tokens of the prompt
                if padded < len(own):
                    hook(numbers, start + padded - padding, own[padded:])


def _can_read(head: Any, states: torch.Tensor) -> bool:
    """Return whether a head accepts the decoder's output, as far as shapes and dtypes tell."""
    weight = getattr(head, "weight", None)
    reads = weight is None or not weight.is_floating_point() or weight.dtype == states.dtype
    return reads and states.ndim == 3 and states.shape[-1] == getattr(head, "in_features", states.shape[-1])


PASS_TOKENS = {"cpu": 64, "cuda": 256}
"""Fixed cost of a pass, in tokens, by device type. On a CPU three models of 0.3 to 134 million parameters took 45 to
75. A GPU reads all weights in the time that it takes to multiply some hundred tokens by them."""


def grouped(prompts: Mapping[int, int], pass_tokens: int) -> list[set[int]]:
    """Group lengths that are fed together, each prompt padded to the longest of its group, at the least total cost.

    A pass costs `pass_tokens` plus its number of prompts times its longest. Given are the number of prompts by length;
    the result are the lengths of each pass, shortest first.
    """
    lengths = sorted(prompts)
    best = [(0, 0)]  # for the n shortest lengths: their cost, and how many of them are before the last group
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


class FrequencySwitch:
    """Transformers' behaviour where a model changes its rotary frequencies (longrope), beyond `length` tokens."""

    def __init__(self, model: Any, length: int | None, device: torch.device) -> None:
        self._model, self._length, self._device = model, length, device

    def recomputes(self, rows: Texts, cache: TreeCache) -> bool:
        """Return whether plain decoding drops the cache here and recomputes the text with new frequencies."""
        if self._length is None or not cache.get_seq_length():
            return False
        return self._prepared(torch.tensor(rows, device=self._device), cache).get(CACHE) is None

    def drops_cache_wrongly(self) -> bool:
        """Return whether plain decoding drops the cache at the switch but feeds only the last token.

        Transformers up to 5.19 does that with Phi3; later versions feed the whole text again.
        """
        if self._length is None:
            return False
        ids = torch.zeros(1, self._length + 1, dtype=torch.long, device=self._device)
        prepared = self._prepared(ids, TreeCache.of_length(self._length))
        return prepared.get(CACHE) is None and prepared["input_ids"].shape != ids.shape

    def _prepared(self, ids: torch.Tensor, cache: TreeCache) -> dict[str, Any]:
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
            use_cache=True,
            **as_cache(cache),
        )
        return prepared


class TextPieces:
    """Split points of texts for one model.

    Attributes:
        anywhere: whether a text may be split anywhere; if not, an answer within it has to be fed as decoding fed it.
        shareable: number of first tokens whose keys and values any text with the same beginning shares. With recurrent
            layers it is 0, as states cannot be truncated.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._has_states, self._picked = facts.recurrence is not None, facts.picked_keys
        self._forgets = facts.recurrence is not None and facts.recurrence.forgets
        self.anywhere = not self._has_states and self._picked is None
        self.shareable = 0 if self._has_states else sys.maxsize if self._picked is None else self._picked

    def end(self, fed: int, most: int, length: int) -> int:
        """Return the end of the next piece of a prompt; the pieces give the same result as the whole.

        `fed` tokens are in the cache. A piece has at most `most` tokens, more only where it has to be longer.
        """
        end = min(length, fed + (max(most, 2) if self._has_states else most))
        if self._forgets or (self._picked is not None and end > self._picked):
            return length
        return length if self._has_states and end == length - 1 else end


@dataclass(frozen=True)
class PreparedPrompts:
    """Inputs of the prefill as plain decoding has prepared them.

    Attributes:
        input_ids: `[B * k, L]` int64, padded on the left; the k beams of a prompt are adjacent rows.
        arguments: all other arguments by name, except the cache.
        columns: `[B]`, ascending unmasked columns of each prompt.
        width: L, the number of columns fed.
        readable: whether a drafter may read the logits of all text tokens: there are ids, and no gaps.
        offsets: `[B]`, offsets of the positions after the prompt.
        beams: k, the number of beams per prompt.
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
        """Number of masked columns of each prompt, `[B]`."""
        return [self.width - len(seen) for seen in self.columns]

    def feed(self, model: Any, generation_config: GenerationConfig, cache: TreeCache) -> torch.Tensor:
        """Feed the tokens that are not cached yet, and remove masked ones from the cache; return logits `[B, V]`.

        The cache is empty or, for a single prompt without padding, holds its first tokens.
        """
        arguments = {name: dict(value) if type(value) is dict else value for name, value in self.arguments.items()}
        output = model._prefill(self.input_ids, generation_config, {**arguments, CACHE: cache})
        logits: torch.Tensor = output.logits[:, -1]
        if self.beams > 1:
            first = torch.arange(0, len(logits), self.beams)
            cache.batch_select_indices(first)
            logits = logits[first.to(logits.device)]
        if any(self.paddings):
            cache.keep(self.columns, fed=self.width)
        cache.offsets = self.offsets
        return logits


def _last(states: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the states of the prompts' last tokens, `[P, H]`, out of `[P, W, H]`."""
    ends = torch.tensor(lengths, device=states.device) - 1
    return states[torch.arange(len(lengths), device=states.device), ends]


class PromptPasses:
    """Feeds prompts to one model, a decoder that `lade.supports`.

    Transformers' prefill reads `prefill_chunk_size` from the final generation config.

    Attributes:
        pads: whether prompts of several lengths may share a pass.
        all_logits: whether hooks get the logits that the model itself returns, of one prompt at a time. Otherwise the
            head is applied to the hidden states, without the scaling or capping of some models.
    """

    def __init__(
        self, facts: ModelFacts, plan: MaskPlan, generation_config: GenerationConfig, device: torch.device
    ) -> None:
        self._model: Any = facts.model
        self._plan, self._generation_config, self._device = plan, generation_config, device
        # Not in chunked prefill: last tokens differ by chunk.
        self.pads = plan.pads and plan.attends and generation_config.prefill_chunk_size is None
        self.all_logits = False
        self._accepts, self._cache_name = facts.accepts, facts.cache_name or CACHE

    def feed(
        self, prompts: Texts, sharing: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None
    ) -> torch.Tensor:
        """Feed the tokens that are not cached yet; return the logits of the last tokens, `[P, V]`.

        Args:
            prompts: P prompts of equal length; of any length with an empty cache, if they may be padded.
            sharing: indices of the rows that have each prompt.
            cache: a cache that is empty or holds the first tokens of all of them.
            hook: called with the logits of their tokens; None for no call.
        """
        if len(set(map(len, prompts))) > 1:
            return self._feed_padded(prompts, sharing, cache, hook)
        ids = torch.tensor(prompts, device=self._device)
        kwargs = self._arguments(ids, cache)
        if "logits_to_keep" in self._accepts:
            kwargs["logits_to_keep"] = 1
        cached = cache.get_seq_length()
        if cached and self._plan.attends:
            kwargs["attention_mask"] = torch.ones_like(ids)  # its width tells transformers how much is cached
        with self._observing(hook) as hidden:
            missing = ids if self._plan.attends else ids[:, cached:]  # transformers cannot tell how much states hold
            output = self._model._prefill(missing, self._generation_config, kwargs)
        cache.count(len(ids), ids.shape[1] - cached)
        cache.settle()
        logits: torch.Tensor = output.logits[:, -1]
        if hook and hidden:
            hidden.report(hook, logits, ids.shape[1], sharing)
        elif hook:
            self._report_all(hook, sharing, cached, output.logits[:, cached - ids.shape[1] :], ids.shape[1] - cached)
        return logits

    def _observing(self, hook: PromptLogitsHook | None) -> AbstractContextManager[HiddenStates | None]:
        """Return the context of a pass in which a hook can read the logits of the prompt."""
        if hook is None:
            return nullcontext()
        if not self.all_logits:
            return HiddenStates(self._model).collecting()
        keep_all = {"logits_to_keep": 0} if "logits_to_keep" in self._accepts else {}
        return hooked(self._model, before=lambda _, kwargs: kwargs.update(keep_all))  # some models override it

    def _report_all(
        self, hook: PromptLogitsHook, sharing: Sequence[Sequence[int]], start: int, logits: torch.Tensor, fed: int
    ) -> None:
        """Call a hook with logits `[P, T, V]` that the model returned for T = `fed` tokens from index `start` on."""
        if logits.shape[1] != fed:
            why = f"prompt_logprobs cannot be used with {type(self._model).__name__}: it returns only some logits"
            raise UnsupportedArgumentError(why, "leave it out")
        for numbers, own in zip(sharing, logits, strict=True):
            hook(numbers, start, own)

    def _feed_padded(
        self, prompts: Texts, sharing: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None
    ) -> torch.Tensor:
        """Feed prompts of several lengths in one pass. Attention is causal, so no token sees the padding after it.

        Each row is padded with its own last token, so that no other row's NaN or infinity can enter it.
        """
        lengths = list(map(len, prompts))
        width = max(lengths)
        ids = torch.tensor(
            [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts], device=self._device
        )
        groups = {length: [n for n, other in enumerate(lengths) if other == length] for length in sorted(set(lengths))}
        kept: dict[int, torch.Tensor] = {}  # by length: hidden states `[B, T, H]` of the last tokens

        def keep_last(output: Any) -> Any:
            """Leave the states of each prompt's last token alone: the model computes no other logits."""
            states: torch.Tensor = output[0]  # [P, W, H]
            if hook:
                kept.update({end: states[rows, max(0, end - MOST_TOKENS) : end] for end, rows in groups.items()})
            last = _last(states, lengths)[:, None]
            if isinstance(output, tuple):
                return last, *output[1:]
            output[next(iter(output))] = last
            return output

        with hooked(self._model.get_decoder(), after=keep_last):
            output = self._model._prefill(ids, self._generation_config, self._arguments(ids, cache))
        cache.trim(lengths)
        logits: torch.Tensor = output.logits  # a model without a base model returns those of all tokens
        logits = logits[:, 0] if logits.shape[1] == 1 else _last(logits, lengths)
        if hook:
            for length, states in kept.items():
                rows = [sharing[number] for number in groups[length]]
                HiddenStates(self._model, states).report(hook, logits[groups[length]], length, rows)
        return logits

    def _arguments(self, ids: torch.Tensor, cache: TreeCache) -> dict[str, Any]:
        kwargs: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if "position_ids" in self._accepts:
            kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return kwargs


class _Media(Protocol):
    def prompts(self, prepared: Prepared, texts: PromptTexts) -> PreparedPrompts: ...


MEDIA: Role[_Media] = Role("media")
