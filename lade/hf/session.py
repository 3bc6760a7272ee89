"""One generation, of one row or of a batch: checked and composed, decoded, and its result returned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any, cast

from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from lade.config import LookaheadConfig
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.errors import UnsupportedError
from lade.hf.batch_rules import check_lengths, needs_lock_step
from lade.hf.call import Call, Generated
from lade.hf.job import DecodeJob, DraftSpec, Output, output_of, record_for, runner_of, with_use_mtp
from lade.hf.processors import row_for
from lade.hf.refusals import check, check_switch, refuse_slow_beams, warn_of_precision
from lade.hf.sampling import Draws, LoneSampler, RowSampler
from lade.model.inputs import MaskPlan
from lade.model.prepared import Prepared
from lade.model.runner import EagerRunner
from lade.stats import Stats, Step

Run = Callable[[], Generated]


class Session:
    """A generation: iterate over it for its steps; `output()` then returns the result of `model.generate`.

    Args:
        prepared: inputs prepared by `model.generate`; several rows advance at their own pace, see `batch_rules`.
        config: the method and its sizes.
        stats: figures to add to.
        streamer: gets the prompt, unless `prompt_streamed`, and every token, as from `model.generate`; None for none.
        drafter: a drafter to use instead of the one that `config` describes; a new one for each generation.

    Raises:
        InputError: the prompt is empty, has ids outside the vocabulary, or is too long for a table of positions.
        ValueError: a drafter is given for several rows.
        UnsupportedModelError, UnsupportedArgumentError: it cannot be decoded exactly.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        config: LookaheadConfig,
        stats: Stats,
        streamer: BaseStreamer | None = None,
        prompt_streamed: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self._prepared, self._streamer, self._prompt_streamed = prepared, streamer, prompt_streamed
        config = with_use_mtp(prepared.generation_config, config)
        plan, self._texts, images = check(prepared)
        self._is_batch = len(self._texts.ids) > 1
        # Ours has no slots for padding, which plain decoding would expect, and only the last rows of a batch.
        self._as_batch = self._is_batch or bool(self._texts.padding)
        runner = self._checked_runner(plan)
        warn_of_precision(prepared)
        handed_out = bool(prepared.generation_config.return_dict_in_generate) and not self._as_batch
        # Without a user's cache transformers makes one, which is empty and cannot hold a tree.
        self._given_cache: Cache = runner.tree_cache() if prepared.user_cache is None else prepared.user_cache
        max_length = prepared.generation_config.max_length
        self._cache = runner.borrow(self._given_cache, max_length, handed_out=handed_out)
        self._record = record_for(prepared.generation_config)
        self._draws = Draws(len(self._texts.ids)) if self._is_batch and prepared.generation_config.do_sample else None
        without_mtp = "" if images is None else "prompts with media, embeddings or gaps have different positions"
        self._job = DecodeJob(prepared.model, runner, rows=len(self._texts.ids), without_mtp=without_mtp)
        self._rows = self._make_rows(self._drafters(config, drafter))
        self._job.report_to(stats, config)
        self._known = sys.maxsize  # number of tokens that the caller has received
        cache: Any = self._cache  # of the type that the runner needs
        self._loop = DecodeLoop(
            list(self._rows),
            runner if images is None else runner.for_prompts(images),
            cache,
            stats,
            self._job.budget,
            waits_for_all=True,
            reader=runner.reader,
            mtp=self._job.mtp,
        )

    def _checked_runner(self, plan: MaskPlan) -> EagerRunner:
        """Return the runner, after checking that it can make all passes of these texts."""
        prepared, config = self._prepared, self._prepared.generation_config
        runner = runner_of(prepared, plan)
        check_switch(runner, self._texts.width, config.max_length - self._texts.shown + self._texts.width)
        if self._is_batch:
            check_lengths(runner.positions, self._texts, config.max_length)
        return runner

    def _drafters(self, config: LookaheadConfig, given: Drafter | None) -> list[Drafter]:
        """Return one drafter per row."""
        if given is not None:
            if self._is_batch:
                raise ValueError("a drafter serves one row: give it with one prompt")
            return [self._job.adopt(given)]
        specs = DraftSpec.of_rows(self._prepared, config, self._texts.ids)
        return self._job.drafters(specs, alone=not self._is_batch)

    def _make_rows(self, drafters: list[Drafter]) -> list[Row]:
        make = partial(row_for, self._prepared, record=self._record, streamer=self._streamer)
        rows = []
        for number, (text, drafter) in enumerate(zip(self._texts.ids, drafters, strict=True)):
            sampler: RowSampler | None = None
            if self._prepared.generation_config.do_sample:
                sampler = LoneSampler() if self._draws is None else RowSampler(self._draws, number)
            rows.append(make(number, text, drafter, sampler=sampler))
        return rows

    def __iter__(self) -> Iterator[Step]:
        """Decode, yielding one `Step` per forward pass and row.

        However the iteration ends, a user's cache then holds only text of the steps that were yielded.
        """
        self._known = len(self._texts.ids[0])
        with self._running():
            for steps in self._loop.run():
                self._after_pass()
                self._known = len(self._rows[0].tokens)
                yield from steps

    def run(self) -> Output:
        """Decode to the end. An error leaves a user's cache as plain decoding would."""
        with self._running():
            for _ in self._loop.run():
                self._after_pass()
        return self.output()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Stream the prompt; at the end, end the streamer, give the cache back and save the measured costs."""
        with ExitStack() as stack:
            stack.push(self._end_stream)
            stack.callback(self._job.save)
            for row in self._rows:
                stack.callback(row.drafter.close)
            stack.push(self._give_back)
            if self._streamer is not None and not self._prompt_streamed:
                self._streamer.put(self._prepared.input_ids.cpu())
            yield

    def _give_back(self, problem: type[BaseException] | None, *_: object) -> None:
        """Give the cache back with accepted text only; empty if it is not used again."""
        used = not self._is_batch and (self._prepared.user_cache is not None or problem is None)
        self._cache.give_back(min(self._loop.settled[0], self._known) if used else 0)

    def _end_stream(self, problem: type[BaseException] | None, *_: object) -> None:
        """End the streamer, even after an error: the reader of a TextIteratorStreamer would block forever."""
        if self._streamer is None:
            return
        with suppress(Exception) if problem else nullcontext():  # a broken streamer must not hide the first error
            self._streamer.end()

    def _after_pass(self) -> None:
        """Update the state that all rows of a batch share."""
        if self._draws is not None:
            for number, row in enumerate(self._rows):
                if row.done:
                    self._draws.leave(number)
        self._job.resize(len(self._loop.rows))

    def output(self) -> Output:
        """Return the result of `model.generate`: ids `[B, L]` int64, padded, or an output object with them."""
        cache = None if self._as_batch else self._given_cache
        return output_of(self._prepared, [row.written for row in self._rows], self._record, cache)


def run_of(call: Call, prepared: Prepared) -> Run | None:
    """Return the `run` of the session that decodes prepared inputs, or None to decode them plainly.

    This is the single place for refusals, before anything is fed, drawn or streamed; errors are those of `Session`.
    """
    if call.config is None:
        return None
    try:
        options: dict[str, Any] = {"config": call.config, "stats": Stats() if call.stats is None else call.stats}
        if prepared.beams > 1:
            if call.auto:
                refuse_slow_beams(prepared)
            return cast(Run, import_module("lade.hf.lock_step").BeamSession(prepared, **options).run)
        options["streamer"] = call.streamer
        rules, several = prepared.positional[1:], len(prepared.prompts) > 1
        if several and needs_lock_step(*rules, streamed=call.streamer is not None):  # few calls need it
            return cast(Run, import_module("lade.hf.lock_step").LockStepSession(prepared, **options).run)
        return Session(prepared, **options).run
    except UnsupportedError as problem:
        call.fall_back(problem)
        return None
