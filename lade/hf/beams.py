"""Beam search by transformers itself, whose calls of the model are answered from a token tree.

`GenerationMixin._beam_search` runs as it is, so what a beam step is, processors, criteria, sampling, scores and the
choice of the beams are its own; only the model that it is given is a stand-in.
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
from lade.hf.lock_step import StandIn
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
        prepared: what `model.generate` has prepared.
        config: the method and its sizes.
        stats: is added to.

    Raises:
        InputError: the prompt is empty, has ids out of the vocabulary, or is too long for a table of positions.
        UnsupportedModelError, UnsupportedArgumentError: it cannot be served exactly.
    """

    def __init__(self, prepared: Prepared, *, config: LookaheadConfig, stats: Stats) -> None:
        for name in ("budget", "memory", "mtp"):
            if getattr(config, name) not in (None, False):
                refuse(f"{name} with num_beams", "beams are drafted at fixed sizes, with a memory of their own")
        if prepared.predictions:
            refuse("prediction with num_beams", "beams are drafted from a memory of their own")
        plan, texts, images = check(prepared, BEAM_MODES)
        if prepared.facts.recurrent:
            refuse("num_beams", "recurrent layers fold one path of a tree into their states, and beams keep several")
        users = prepared.user_cache
        if users is not None and (users.get_seq_length() or not isinstance(users, TreeCache)):
            refuse("past_key_values with num_beams", "a search of beams begins with an empty cache of its own")
        runner = runner_of(prepared, plan, lock_step=True)
        _check_lengths(runner.positions, texts, prepared.generation_config.max_length)
        warn_of_precision(prepared.wrapper)

        self._prepared, self._padded = prepared, bool(texts.padding)
        self._cache = users if isinstance(users, TreeCache) else runner.tree_cache()
        self._as_rows = bool(users is not None or prepared.generation_config.return_dict_in_generate)
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
        """Search to the end; what `model.generate` returns. An error leaves a user's cache empty, as it came."""
        search, arguments = decoding_method(self._prepared), self._prepared.positional
        stand_in = _StandIn(self._prepared.model, self._answers)
        try:
            try:
                output: BeamOutput = search(stand_in, *arguments, past_key_values=stand_in, use_cache=True)
            finally:
                self._answers.report()
            if self._as_rows:
                self._answers.leave_rows()
        except BaseException:
            self._cache.reset()  # it holds a trunk and part of a tree, which are not rows of beams
            raise
        if isinstance(output, GenerateBeamDecoderOnlyOutput):
            # Ours has no slots for padding, and plain decoding would count them.
            return replace(output, past_key_values=None if self._padded else self._cache)
        if isinstance(output, GenerateBeamEncoderDecoderOutput):
            return replace(output, past_key_values=self._cache.dynamic_pair())
        return output


class _StandIn(StandIn):
    """Reorders beams, too."""

    def __init__(self, model: PreTrainedModel, answers: BeamLogits[TreeCache]) -> None:
        super().__init__(model, answers)
        self._beams = answers

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # an old model's own way to reorder caches, which would be preferred
            raise AttributeError(name)
        return super().__getattr__(name)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam i continues what was beam `beam_idx[i]`."""
        self._beams.reorder(beam_idx.tolist())


def _check_lengths(positions: Positions, texts: PromptTexts, max_length: int) -> None:
    """Refuse texts that cross a length from which on a pass would see what is cached in another way."""
    if len(texts) > 1:
        check_lengths(positions, texts, max_length)
    elif positions.longrope_switch is not None and texts.width <= positions.longrope_switch < max_length:
        refuse(
            f"num_beams beyond {positions.longrope_switch} tokens",
            "there this model computes the text of each beam again",
        )
