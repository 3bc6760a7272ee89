"""Beam search by transformers itself, whose calls of the model are answered from a token tree.

`GenerationMixin._beam_search` runs as it is, so what a beam step is, processors, criteria, sampling, scores and the
choice of the beams are its own; only the model that it is given is a stand-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from lade.config import LookaheadConfig
from lade.decoding.beams.logits import BeamLogits
from lade.errors import UnsupportedArgumentError
from lade.hf.batch_rules import check_lengths
from lade.hf.plain import decoding_method
from lade.hf.refusals import check_cache, checked_paddings, refuse
from lade.hf.session import special_ids
from lade.model.kv_cache import TreeCache
from lade.model.position_limits import Positions
from lade.model.runner import EagerRunner
from lade.model.support.supports import supports
from lade.stats import Stats

BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
BeamOutput = torch.Tensor | GenerateBeamDecoderOnlyOutput


class BeamSession:
    """The beam search of one or more prompts, prepared by `model.generate` and not started yet.

    The arguments are those of `lade.hf.session.Session`, without the streamer: a beam search has no text to show before
    it ends.

    Raises:
        InputError: the prompt is empty, has ids out of the vocabulary, or is too long for a table of positions.
        UnsupportedModelError, UnsupportedArgumentError: it cannot be served exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        config: LookaheadConfig,
        stats: Stats,
        **model_kwargs: Any,
    ) -> None:
        for name in ("budget", "memory"):
            if getattr(config, name) is not None:
                refuse(f"{name} with num_beams", "beams are drafted at fixed sizes, with a memory of their own")
        plan = supports(model).require()
        prompts = input_ids[:: generation_config.num_beams]  # each stands there num_beams times
        paddings = checked_paddings(model, prompts, logits_processor, generation_config, model_kwargs, BEAM_MODES)
        given: Any = model_kwargs.get("past_key_values")
        users = getattr(given, "_is_user_defined", False)
        check_cache(given, paddings, prompts.shape[1])
        if users and (given.get_seq_length() or not isinstance(given, TreeCache)):
            refuse("past_key_values with num_beams", "a search of beams begins with an empty cache of its own")
        runner = EagerRunner(model, plan, generation_config)
        _check_lengths(runner.positions, prompts.shape[1], paddings, generation_config.max_length)

        self._model, self._padded = model, any(paddings)
        self._arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        self._cache: TreeCache = given if users else TreeCache()
        self._as_rows = bool(users or generation_config.return_dict_in_generate)
        self._answers = BeamLogits(
            [prompt[padding:].tolist() for prompt, padding in zip(prompts, paddings, strict=True)],
            generation_config.num_beams,
            config,
            runner,
            self._cache,
            stats,
            special_ids(generation_config),
        )

    def run(self) -> BeamOutput:
        """Search to the end; what `model.generate` returns. An error leaves a user's cache empty, as it came."""
        config = self._arguments[-1]
        search = decoding_method(self._model, config)
        stand_in = _StandIn(self._model, self._answers)
        try:
            try:
                output: BeamOutput = search(stand_in, *self._arguments, past_key_values=stand_in, use_cache=True)
            finally:
                self._answers.report()
            if self._as_rows:
                self._answers.leave_rows()
        except BaseException:
            self._cache.reset()  # it holds a trunk and part of a tree, which are not rows of beams
            raise
        if isinstance(output, GenerateBeamDecoderOnlyOutput):
            # Ours has no slots for padding, and plain decoding would count them.
            output.past_key_values = None if self._padded else self._cache
        return output


class _StandIn:
    """What `_beam_search` takes for the model and for its cache; all else is the model's own."""

    def __init__(self, model: PreTrainedModel, answers: BeamLogits[TreeCache]) -> None:
        self._model, self._answers = model, answers

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # an old model's own way to reorder caches, which would be preferred
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return _output(self._answers.prefill())

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """The beams `[k, L]`, as they are handed to the call."""
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        """Logits `[k, 1, V]` behind the beams."""
        return _output(self._answers.extend(input_ids[:, -1].tolist()))

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        return model_kwargs

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam i goes on from what was beam `beam_idx[i]`."""
        self._answers.reorder(beam_idx.tolist())


def _check_lengths(positions: Positions, width: int, paddings: list[int], max_length: int) -> None:
    """Refuse texts that cross a length from which on a pass would see what is cached in another way."""
    if len(paddings) > 1:
        check_lengths(positions, width, paddings, max_length)
    elif positions.longrope_switch is not None and width <= positions.longrope_switch < max_length:
        refuse(
            f"num_beams beyond {positions.longrope_switch} tokens",
            "there this model computes the text of each beam anew",
        )


def argument_of(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """What an argument of `model.generate` comes to, given these; None where nobody says anything."""
    given = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = [arguments.get(name), *(getattr(config, name, None) for config in given)]
    return next((value for value in values if value is not None), None)


def num_beams(model: Any, arguments: Mapping[str, Any]) -> int:
    """How many beams `model.generate` would search with, given these arguments."""
    return argument_of(model, arguments, "num_beams") or 1


def refuse_slow_beams(device: torch.device, prompts: int, beams: int) -> None:
    """For "auto": raise `UnsupportedArgumentError` for what lookahead decoding is known to make slower.

    A pass for several searches feeds some fifty tokens for each of them. On a CPU that takes longer than it saves.
    """
    if device.type == "cpu" and prompts > 1 and beams > 1:
        raise UnsupportedArgumentError(
            f"num_beams={beams} for {prompts} prompts is slower with lookahead decoding on a CPU",
            "give a LookaheadConfig to have it all the same",
        )


def refuse_streamed_beams(beams: int | None) -> None:
    """Raise `UnsupportedArgumentError` for a streamed beam search, plain or not; None where nothing is streamed."""
    if beams is not None and beams > 1:
        raise UnsupportedArgumentError(
            f"num_beams={beams} cannot be streamed: which beam wins is known only at its end",
            "use lade.generate without a streamer, or num_beams=1",
        )


def _output(logits: torch.Tensor) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=cast(torch.FloatTensor, logits[:, None]))
