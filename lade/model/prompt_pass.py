"""One pass over prompts of text, as transformers' own prefill makes it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig

from lade.decoding.loop import PromptLogitsHook
from lade.errors import UnsupportedArgumentError
from lade.model.facts import ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.padded_states import PaddedStates
from lade.model.prompt_logits import HiddenStates
from lade.model.thread_hooks import hooked


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
