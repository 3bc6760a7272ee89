"""Beam search by transformers itself, whose model calls are answered from a token tree.

`GenerationMixin._beam_search` runs unchanged, so beam steps, processors, criteria, sampling, scores and the selection
of beams are transformers' own; only the model that it calls is a proxy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from lade.config import LookaheadConfig
from lade.decoding.beams.logits import BeamLogits
from lade.hf.batch_rules import check_lengths
from lade.hf.job import runner_of
from lade.hf.lock_step import ModelProxy
from lade.hf.plain import decoding_method
from lade.hf.refusals import check, refuse, warn_of_precision
from lade.model.config import Positions
from lade.model.kv_cache import TreeCache
from lade.model.prepared import Prepared, PromptTexts, placeholder_ids, special_ids
from lade.stats import Stats

BEAM_MODES = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
BeamOutput = torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput


class BeamSession:
    """The beam search of one or more prompts, prepared by `model.generate` and not started yet.

    Args:
        prepared: inputs prepared by `model.generate`.
        config: the method and its sizes.
        stats: figures to add to.

    Raises:
        InputError: the prompt is empty, has ids outside the vocabulary, or is too long for a table of positions.
        UnsupportedModelError, UnsupportedArgumentError: it cannot be decoded exactly.
    """

    def __init__(self, prepared: Prepared, *, config: LookaheadConfig, stats: Stats) -> None:
        for name in ("budget", "memory", "mtp"):
            if getattr(config, name) not in (None, False):
                refuse(f"{name} with num_beams", "beams are drafted at fixed sizes, with a memory of their own")
        if prepared.predictions:
            refuse("prediction with num_beams", "beams are drafted from a memory of their own")
        plan, texts, images = check(prepared, BEAM_MODES)
        if prepared.facts.recurrent:
            refuse("num_beams", "recurrent layers can advance along one path of a tree only, and beams need several")
        user_cache = prepared.user_cache
        if user_cache is not None and (user_cache.get_seq_length() or not isinstance(user_cache, TreeCache)):
            refuse("past_key_values with num_beams", "beam search starts from an empty lade.TreeCache only")
        runner = runner_of(prepared, plan, lock_step=True)
        _check_lengths(runner.positions, texts, prepared.generation_config.max_length)
        warn_of_precision(prepared)

        self._prepared, self._padded = prepared, bool(texts.padding)
        self._cache = user_cache if isinstance(user_cache, TreeCache) else runner.tree_cache()
        self._as_rows = bool(user_cache is not None or prepared.generation_config.return_dict_in_generate)
        self._answers = BeamLogits(
            texts.ids,
            prepared.beams,
            config,
            runner.for_prompts(images),
            self._cache,
            stats,
            special_ids(prepared.generation_config) | placeholder_ids(prepared.model),
            [prepared.source_text(number * prepared.beams) for number in range(len(texts))],
        )

    def run(self) -> BeamOutput:
        """Search to the end and return the result of `model.generate`. An error leaves a user's cache empty."""
        search, arguments = decoding_method(self._prepared), self._prepared.positional
        proxy = _BeamModelProxy(self._prepared.model, self._answers)
        try:
            try:
                output: BeamOutput = search(proxy, *arguments, past_key_values=proxy, use_cache=True)
            finally:
                self._answers.report()
            if self._as_rows:
                self._answers.leave_rows()
        except BaseException:
            self._cache.reset()  # it holds a trunk and part of a tree instead of a row per beam
            raise
        if isinstance(output, GenerateBeamDecoderOnlyOutput):
            # Our cache has no slots for padding, which plain decoding would expect.
            return replace(output, past_key_values=None if self._padded else self._cache)
        if isinstance(output, GenerateBeamEncoderDecoderOutput):
            return replace(output, past_key_values=self._cache.dynamic_pair())
        return output


class _BeamModelProxy(ModelProxy):
    """A model proxy that also reorders beams."""

    def __init__(self, model: PreTrainedModel, answers: BeamLogits[TreeCache]) -> None:
        super().__init__(model, answers)
        self._beams = answers

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # hide the method of older models, which transformers would prefer
            raise AttributeError(name)
        return super().__getattr__(name)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let beam i continue what was beam `beam_idx[i]`."""
        self._beams.reorder(beam_idx.tolist())


def _check_lengths(positions: Positions, texts: PromptTexts, max_length: int) -> None:
    """Refuse texts that cross a length beyond which a pass would change the frequencies of cached tokens."""
    if len(texts) > 1:
        check_lengths(positions, texts, max_length)
    elif positions.longrope_switch is not None and texts.width <= positions.longrope_switch < max_length:
        refuse(
            f"num_beams beyond {positions.longrope_switch} tokens",
            "beyond that length this model recomputes the text of each beam",
        )
