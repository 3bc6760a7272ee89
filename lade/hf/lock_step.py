"""Lock-step batches and beam search: transformers' own loops, with a model proxy that answers from token trees.

`GenerationMixin._sample` and `_beam_search` run unchanged, so processors, criteria, streamers, scores, sampling and the
selection of beams are transformers' own, called in its order with all rows `[B, L]`, rows that have ended included.
Only the model that they call is a proxy.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from lade.config import LookaheadConfig
from lade.decoding.beams.logits import BeamLogits
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.lock_step import LockStepLogits, LockStepRow
from lade.hf.batch_rules import check_lengths
from lade.hf.job import DecodeJob, DraftSpec, Output, runner_of
from lade.hf.plain import decoding_method
from lade.hf.refusals import check, warn_of_precision
from lade.model.config import Positions
from lade.model.facts import CACHE, as_cache
from lade.model.kv_cache import TreeCache
from lade.model.prepared import USER_CACHES, Prepared, PromptTexts, ids_of, placeholder_ids, refuse, special_ids
from lade.stats import Stats


class ModelProxy:
    """Replaces the model and its cache in a loop's requests for logits; everything else is forwarded to the model."""

    def __init__(self, model: PreTrainedModel, answers: LockStepLogits[Any] | BeamLogits[TreeCache]) -> None:
        self._model, self._answers = model, answers

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # hide the method of older models, which transformers would prefer
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return _output(self._answers.prefill())

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """Return the texts `[B, L]`, to be passed to `__call__`."""
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        """Return the logits `[B, 1, V]` after the texts."""
        return _output(self._answers.extend(input_ids[:, -1].tolist()))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let beam i continue what was beam `beam_idx[i]`; called by beam search only."""
        cast(BeamLogits[TreeCache], self._answers).reorder(beam_idx.tolist())

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        return model_kwargs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Return False, since a compiled call would bypass the proxy."""
        return False


def _output(logits: torch.Tensor) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=cast(torch.FloatTensor, logits[:, None]))


_WITHOUT_MTP = "rows in lock-step are verified by transformers' own loop, which does not keep hidden states"


class LockStepSession:
    """A batch whose rows emit their tokens together; arguments and errors are those of `Session`."""

    def __init__(
        self, prepared: Prepared, *, config: LookaheadConfig, stats: Stats, streamer: BaseStreamer | None = None
    ) -> None:
        self._prepared, self._streamer = prepared, streamer
        if config.sources:
            refuse("sources in a batch in lock-step", "texts of such a batch are drafted beyond tokens not chosen yet")
        plan, texts, images = check(prepared)
        runner = runner_of(prepared, plan, lock_step=True)
        check_lengths(runner.positions, texts, prepared.generation_config.max_length)
        warn_of_precision(prepared)
        self._job = DecodeJob(prepared.model, runner, rows=len(texts), without_mtp=_WITHOUT_MTP)
        drafters = self._job.drafters(DraftSpec.of_rows(prepared, config, texts.ids))
        self._job.report_to(stats, config)
        rows = [self._row(number, text, drafters[number]) for number, text in enumerate(texts.ids)]
        feeding: Any = runner.for_prompts(images)
        cache = runner.tree_cache()
        if prepared.facts.recurrent:
            from lade.backends.recurrent.backend import RefedCache, RefeedingRunner

            feeding, cache = RefeedingRunner(feeding), RefedCache()
        self._answers = LockStepLogits[Any](rows, feeding, cache, stats, self._job.budget)

    def _row(self, number: int, prompt: list[int], drafter: Drafter) -> LockStepRow:
        config, criteria = self._prepared.generation_config, self._prepared.stopping_criteria
        padding: Any = config._pad_token_tensor
        if padding is not None:  # as in `_sample`: without EOS, rows that have ended continue
            padding = int(padding) if any(hasattr(each, "eos_token_id") for each in criteria) else None
        source = self._prepared.source_text(number)
        return LockStepRow(prompt, drafter, padding, ids_of(config.eos_token_id), source)

    def run(self) -> Output:
        """Decode to the end and return the result of `model.generate`."""
        prepared, streamer = self._prepared, self._streamer
        sample, answers = decoding_method(prepared), self._answers
        proxy, criteria = ModelProxy(prepared.model, answers), _ObservedCriteria(prepared.stopping_criteria, answers)
        ids, processors, _, config = prepared.positional
        streamed = {} if streamer is None else {"streamer": streamer}
        try:
            if streamer is not None:
                streamer.put(ids.cpu())
            output: Output = sample(
                proxy, ids, processors, criteria, config, use_cache=True, **as_cache(proxy), **streamed
            )
        except BaseException:
            if streamer is not None:
                with suppress(Exception):  # else the reader of a TextIteratorStreamer would block forever
                    streamer.end()
            raise
        finally:
            answers.report()
            self._job.save()
        if isinstance(output, GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput):
            return replace(output, **as_cache(USER_CACHES.load().output_cache(prepared, output.sequences, None)))
        return output


class _ObservedCriteria(StoppingCriteriaList):
    """Stopping criteria whose calls reveal the chosen tokens and the rows that end."""

    def __init__(self, criteria: StoppingCriteriaList, answers: LockStepLogits[Any]) -> None:
        super().__init__(criteria)
        self._criteria, self._answers = criteria, answers

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._answers.emit(input_ids[:, -1].tolist())
        ended: torch.Tensor = self._criteria(input_ids, scores, **kwargs)
        self._answers.end(ended.tolist())
        return ended


BeamOutput = torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput


class BeamSession:
    """The beam search of one or more prompts; arguments and errors are those of `Session`."""

    def __init__(self, prepared: Prepared, *, config: LookaheadConfig, stats: Stats) -> None:
        for name in ("budget", "memory", "mtp", "sources"):
            if getattr(config, name) not in (None, False, ()):
                refuse(f"{name} with num_beams", "beams are drafted at fixed sizes, with a memory of their own")
        if prepared.predictions:
            refuse("prediction with num_beams", "beams are drafted from a memory of their own")
        plan, texts, images = check(prepared, (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE))
        if prepared.facts.recurrent:
            refuse("num_beams", "recurrent layers can advance along one path of a tree only, and beams need several")
        user_cache = prepared.user_cache
        if user_cache is not None and (user_cache.get_seq_length() or not isinstance(user_cache, TreeCache)):
            refuse(f"{CACHE} with num_beams", "beam search starts from an empty lade.TreeCache only")
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
        proxy = ModelProxy(self._prepared.model, self._answers)
        try:
            try:
                output: BeamOutput = search(proxy, *arguments, use_cache=True, **as_cache(proxy))
            finally:
                self._answers.report()
            if self._as_rows:
                self._answers.leave_rows()
        except BaseException:
            self._cache.reset()  # it holds a trunk and part of a tree instead of a row per beam
            raise
        if isinstance(output, GenerateBeamDecoderOnlyOutput):
            # Our cache has no slots for padding, which plain decoding would expect.
            made = USER_CACHES.load().output_cache(self._prepared, output.sequences, self._cache)
            return replace(output, **as_cache(None if self._padded else made))
        if isinstance(output, GenerateBeamEncoderDecoderOutput):
            return replace(output, **as_cache(self._cache.dynamic_pair()))
        return output


def _check_lengths(positions: Positions, texts: PromptTexts, max_length: int) -> None:
    """Refuse texts that cross a length beyond which a pass would change the frequencies of cached tokens."""
    if len(texts) > 1:
        check_lengths(positions, texts, max_length)
    elif positions.longrope_switch is not None and texts.width <= positions.longrope_switch < max_length:
        refuse(
            f"num_beams beyond {positions.longrope_switch} tokens",
            "beyond that length this model recomputes the text of each beam",
        )
