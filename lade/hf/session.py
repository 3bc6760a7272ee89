"""One generation, of one row or of a batch, prepared by `model.generate` and not started yet."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lade.config import LookaheadConfig
from lade.decoding.drafting.batch_budget import BatchBudget
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row, StopRule
from lade.decoding.verify import Chooser, Greedy
from lade.hf.batch_rules import check_lengths, check_rows, processors_of_row
from lade.hf.processors import Processed, Record, StopRules, Streamed, Transcript
from lade.hf.refusals import check_cache, check_switch, checked_paddings
from lade.hf.sampling import Draws, LoneSampler, RowSampler, Sampler
from lade.hf.tree_processors import AtOnce, can_be_asked_at_once, pays_at_once
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.model.select_runner import runner_for
from lade.model.support.supports import supports
from lade.stats import Stats, Step
from lade.tuning.batch_cost import BatchCost
from lade.tuning.cost_cache import save_refreshed, step_cost_for
from lade.tuning.step_cost import StepCost

Output = torch.Tensor | GenerateDecoderOnlyOutput


class Session:
    """Iterate over it for its steps; `output` then is what `model.generate` would have returned.

    The arguments are those that `model.generate(custom_generate=...)` hands to a callable, and these:

    Args:
        config: the method and its sizes.
        stats: is added to.
        streamer: is given the prompt and every token, as `model.generate` does.
        prompt_streamed: whether it has been given the prompt already.
        drafter: drafts in place of the one that `config` asks for; a new one for each generation.

    Raises:
        InputError: the prompt is empty, has ids out of the vocabulary, or is too long for a table of positions.
        ValueError: a drafter for several rows.
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
        streamer: BaseStreamer | None = None,
        prompt_streamed: bool = False,
        drafter: Drafter | None = None,
        **model_kwargs: Any,
    ) -> None:
        plan = supports(model).require()
        self._paddings = checked_paddings(model, input_ids, logits_processor, generation_config, model_kwargs)
        check_cache(model_kwargs.get("past_key_values"), self._paddings, input_ids.shape[1])
        given: Any = model_kwargs.get("past_key_values")
        self._users = bool(getattr(given, "_is_user_defined", False))
        runner = runner_for(model, plan, generation_config, own_cache=not self._users)
        check_switch(runner, input_ids.shape[1], generation_config.max_length)
        if self._is_batch:
            check_rows(logits_processor, stopping_criteria, generation_config, streamed=streamer is not None)
            check_lengths(runner.positions, input_ids.shape[1], self._paddings, generation_config.max_length)

        self._model = model
        self._input_ids, self._generation_config = input_ids, generation_config
        self._streamer, self._prompt_streamed = streamer, prompt_streamed
        self._known = sys.maxsize  # tokens of the text that the caller knows
        # The cache that transformers makes where the user gave none is empty, and of no use for a tree.
        self._given_cache: Cache = given if self._users else TreeCache()
        handed_out = bool(generation_config.return_dict_in_generate) and not self._is_batch
        self._cache = runner.borrow(self._given_cache, generation_config.max_length, handed_out=handed_out)
        self._record = record_for(generation_config)
        self._draws = Draws(len(self._paddings)) if self._is_batch and generation_config.do_sample else None
        self._cost = None if drafter else self._cost_of_steps(config, runner)
        budget = BatchBudget(self._cost) if isinstance(self._cost, BatchCost) else None
        if self._is_batch and config.adaptive and config.memory is None:
            config = replace(config, memory=ContextMemory())  # one caller's rows may learn from each other
        self._rows: list[Row] = []
        for number in range(len(self._paddings)):
            if drafter and number:
                raise ValueError("a drafter serves one row: give it with one prompt")
            own = drafter or drafter_for(
                config, special_ids(generation_config), vocabulary=vocabulary_of(model), cost=self._cost, budget=budget
            )
            self._rows.append(self._row(number, own, logits_processor, stopping_criteria))
        cache: Any = self._cache  # the runner's own kind
        self._engine = DecodeLoop(list(self._rows), runner, cache, stats, budget)

    @property
    def _is_batch(self) -> bool:
        return len(self._paddings) > 1

    def _cost_of_steps(self, config: LookaheadConfig, runner: EagerRunner) -> StepCost | BatchCost | None:
        if not config.adaptive or config.budget is not None:
            return None
        if not self._is_batch:
            return step_cost_for(self._model, runner)
        return BatchCost(lambda rows: step_cost_for(self._model, runner, batch=rows), len(self._paddings))

    def _row(
        self, number: int, drafter: Drafter, processors: LogitsProcessorList, criteria: StoppingCriteriaList
    ) -> Row:
        """One row of the batch, without its padding."""
        sampler: Sampler | None = None
        if self._generation_config.do_sample:
            sampler = LoneSampler() if self._draws is None else RowSampler(self._draws, number)
        if self._is_batch:
            processors = processors_of_row(processors, number, len(self._paddings))
        prompt = self._input_ids[number : number + 1]
        return row_for(
            prompt,
            self._paddings[number],
            drafter,
            processors,
            criteria,
            sampler=sampler,
            record=self._record,
            streamer=self._streamer,
        )

    def __iter__(self) -> Iterator[Step]:
        """Decode; one `Step` per forward pass and row.

        However the iteration ends, a user's cache then holds only text that the steps have yielded.
        """
        self._known = self._input_ids.shape[1]
        with closing(self._decode()) as passes:
            for steps in passes:
                self._known = len(self._rows[0].tokens)
                yield from steps

    def run(self) -> Output:
        """Decode to the end. An error leaves a user's cache as it leaves it in plain decoding."""
        with closing(self._decode()) as passes:
            for _ in passes:
                pass
        return self.output()

    def _decode(self) -> Generator[list[Step], None, None]:
        """The steps of each pass."""
        with ExitStack() as stack:
            stack.push(self._end_stream)
            stack.callback(save_refreshed, self._model)
            stack.push(self._give_back)
            if self._streamer is not None and not self._prompt_streamed:
                self._streamer.put(self._input_ids.cpu())
            for steps in self._engine.run():
                self._follow()
                yield steps

    def _give_back(self, problem: type[BaseException] | None, *_: object) -> None:
        """Give the cache back, without what is not text; empty where nobody is going to use it."""
        used = not self._is_batch and (self._users or problem is None)
        self._cache.give_back(min(self._engine.settled[0], self._known) if used else 0)

    def _end_stream(self, problem: type[BaseException] | None, *_: object) -> None:
        """After an error, too: the reader of a TextIteratorStreamer would wait for ever."""
        if self._streamer is None:
            return
        with suppress(Exception) if problem else nullcontext():  # a broken streamer must not hide the first error
            self._streamer.end()

    def _follow(self) -> None:
        """Tell those that serve all rows of a batch what a pass did to it."""
        if self._draws is not None:
            for number, row in enumerate(self._rows):
                if row.done:
                    self._draws.leave(number)
        if isinstance(self._cost, BatchCost):
            self._cost.resize(len(self._engine.rows))

    def output(self) -> Output:
        """What `model.generate` returns: ids `[B, L]` int64, prompts included, or an output object with them.

        Behind a row that ended before others stands padding.
        """
        # Ours has no slots for padding, and plain decoding would count them; of a batch it has the last rows only.
        cache = None if self._is_batch or self._paddings[0] else self._given_cache
        written = [row.written for row in self._rows]
        return output_of(self._input_ids, written, self._generation_config, self._record, cache)


def row_for(
    prompt: torch.Tensor,
    padding: int,
    drafter: Drafter,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    *,
    sampler: Sampler | None,
    record: Record,
    streamer: BaseStreamer | None = None,
) -> Row:
    """A row that asks transformers' processors and criteria about its tokens.

    Args:
        prompt: `[1, L]` int64.
        padding: columns left of it that are none of its tokens.
        drafter: of this row alone.
        processors: as they are for this row.
        criteria: likewise.
        sampler: draws its tokens; None for the argmax.
        record: is told scores and logits.
        streamer: gets each token.
    """
    transcript = Transcript(prompt, padding)
    chooser: Chooser = Greedy()
    if processors or sampler or record:
        at_once = pays_at_once(prompt.device) and can_be_asked_at_once(processors) and not record
        make = AtOnce if at_once else Processed
        chooser = make(processors, transcript, sampler=sampler, record=record)
    stop: StopRule = StopRules(criteria, transcript, record)
    if streamer is not None:
        stop = Streamed(stop, streamer)
    return Row(prompt[0, padding:].tolist(), drafter, chooser, stop)


def output_of(
    prompts: torch.Tensor,
    written: list[list[int]],
    generation_config: GenerationConfig,
    record: Record,
    cache: Cache | None = None,
) -> Output:
    """What `model.generate` returns.

    Args:
        prompts: `[B, L]` int64.
        written: the tokens behind each of them.
        generation_config: says whether an output object is wanted, and what stands behind a row that ended early.
        record: scores and logits for the object.
        cache: likewise.
    """
    longest = max(map(len, written))
    pad: Any = generation_config._pad_token_tensor  # which is the end of sequence where no pad_token_id is
    pad = None if pad is None else int(pad)
    new = [tokens + [pad] * (longest - len(tokens)) for tokens in written]
    ids = torch.cat([prompts, prompts.new_tensor(new)], dim=1)
    if not generation_config.return_dict_in_generate:
        return ids
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, ids),
        scores=cast(Any, record.scores),
        logits=cast(Any, record.logits),
        past_key_values=cache,
    )


def vocabulary_of(model: PreTrainedModel) -> int:
    """V: ids below it can be fed."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def special_ids(generation_config: GenerationConfig) -> set[int]:
    """Ids behind which nothing is to be guessed: end of sequence and padding."""
    return ids_of(generation_config.eos_token_id) | ids_of(generation_config.pad_token_id)


def ids_of(tokens: Any) -> set[int]:
    """One id, several, or None, as `generate` takes them."""
    several = tokens.flatten().tolist() if isinstance(tokens, torch.Tensor) else tokens
    return {int(token) for token in (several if isinstance(several, list) else [several]) if token is not None}


def record_for(generation_config: GenerationConfig) -> Record:
    """An empty record of what the output object is to have."""
    wanted = generation_config.return_dict_in_generate
    return Record(
        scores=() if wanted and generation_config.output_scores else None,
        logits=() if wanted and generation_config.output_logits else None,
    )
