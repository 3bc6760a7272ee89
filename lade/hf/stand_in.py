"""What transformers' own loops take for the model, where the logits come from token trees."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Answers(Protocol):
    """Gives the logits that the loop asks the model for."""

    def prefill(self) -> torch.Tensor:
        """Logits after the prompts, `[B, V]`."""
        ...

    def extend(self, tokens: list[int]) -> torch.Tensor:
        """Logits after the texts `[B, V]`, whose last tokens are these."""
        ...


class StandIn:
    """The model and its cache, as far as a loop asks them for logits; all else is the model's own."""

    def __init__(self, model: PreTrainedModel, answers: Answers) -> None:
        self._model, self._answers = model, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return _output(self._answers.prefill())

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """The texts `[B, L]`, as they are passed to the call."""
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        """Logits `[B, 1, V]` after the texts."""
        return _output(self._answers.extend(input_ids[:, -1].tolist()))

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        return model_kwargs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """No: a compiled call would be the model's."""
        return False


def _output(logits: torch.Tensor) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=cast(torch.FloatTensor, logits[:, None]))
