"""One generation as `model.generate` prepares it for a callable: what every way of decoding begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from lade.model.facts import ModelFacts

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """The arguments that `model.generate(custom_generate=...)` passes to a callable; nothing has been fed yet.

    Attributes:
        model: the causal language model.
        input_ids: `[B, L]` int64, padded on the left; with beams each prompt stands there `num_beams` times.
        logits_processor: called once per emitted token.
        stopping_criteria: called once per emitted token.
        generation_config: the final, merged one.
        model_kwargs: attention mask, positions, cache and whatever else `generate` prepared.
        wrapper: the model as the caller has it: a wrapper of PEFT or `torch.compile`, or `model` itself.
        inputs_tensor: what the encoder of an encoder-decoder model was fed, `[P, T]` ids or anything else; None where
            it is not known.
        predictions: ids of the text that the answer to each prompt is expected to follow; empty where none is.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    wrapper: Any
    inputs_tensor: torch.Tensor | None = None
    predictions: Sequence[Sequence[int]] = ()

    @property
    def positional(self) -> tuple[torch.Tensor, LogitsProcessorList, StoppingCriteriaList, GenerationConfig]:
        """What transformers' own loops take after the model."""
        return self.input_ids, self.logits_processor, self.stopping_criteria, self.generation_config

    @property
    def beams(self) -> int:
        """Beams per prompt; 1 without beam search."""
        return self.generation_config.num_beams or 1

    @property
    def prompts(self) -> torch.Tensor:
        """`[P, L]` int64: `input_ids` with each prompt once."""
        return self.input_ids[:: self.beams]

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is made of; looked at once a call."""
        return ModelFacts.of(self.model)

    @property
    def cache_name(self) -> str:
        """Under which name the model takes its cache."""
        return self.facts.cache_name or "past_key_values"

    @property
    def embeddings(self) -> torch.Tensor | None:
        """`[P, L, H]`, what a decoder is fed in place of the ids of its prompts; None where it is fed ids."""
        given: torch.Tensor | None = self.model_kwargs.get("inputs_embeds")
        return None if given is None or self.model.config.is_encoder_decoder else given[:: self.beams]

    @property
    def user_cache(self) -> Cache | None:
        """The `past_key_values` that the user gave; None for a cache that transformers made, which is empty."""
        cache: Any = self.model_kwargs.get(self.cache_name)
        return cache if getattr(cache, "_is_user_defined", False) else None


def preparing(
    use: Callable[[Prepared], T], wrapper: Any = None, predictions: Sequence[Sequence[int]] = ()
) -> Callable[..., T]:
    """The callable for `custom_generate=` that passes what `model.generate` has prepared to `use`.

    Args:
        use: its result is what `model.generate` returns.
        wrapper: see `Prepared`; None for the model itself.
        predictions: see `Prepared`.
    """

    def custom_generate(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> T:
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        given_to = model if wrapper is None else wrapper
        return use(Prepared(*arguments, wrapper=given_to, inputs_tensor=inputs_tensor, predictions=predictions))

    return custom_generate
