"""Batch execution: chunked prefill, one decode step for all running rows, preemption.

A preempted request is recomputed: its text, prompt and answer, is fed again. Models that give slightly different values
for several tokens at once (see `lade.model.prefill`) are fed the answer as trees without branches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.decoding.drafting.controller import LARGEST
from lade.decoding.drafting.drafter import Drafter, IsolatedDrafter
from lade.decoding.loop import DecodeLoop, prompt_hook
from lade.decoding.readout import read
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.hf.job import DecodeJob, Output, engine_runner
from lade.model.inputs import MaskPlan
from lade.model.runner import CAPTURED_RUNNERS, EagerRunner
from lade.serving.capacity import Capacity, default_max_tokens, default_prefix_bytes, row_bytes
from lade.serving.prefix_cache import PrefixReuse, prefill_group
from lade.serving.request import EngineRequest
from lade.serving.running import HEADROOM, ActiveRequest, KvAllocator, RunningSet
from lade.serving.snapshot import Tally
from lade.stats import Step

logger = logging.getLogger(__name__)

_MOST_FAILURES = 4
"""Faults that a request without a row in the batch may be in: more than its own passes can have brought it."""
_LOST_IN_A_ROW = 3
"""Requests that end alone in a failing pass, without a pass between them that succeeds, before the device is asked."""
_MAX_CHAIN = 64
"""Answer tokens per pass when an answer is fed again; memory of recurrent layers is quadratic in the tree size."""


def feed_chunk(active: ActiveRequest, row: Row, runner: EagerRunner, max_tokens: int) -> torch.Tensor:
    """Feed up to `max_tokens` more tokens of a request's text to its own cache; a prompt with images is fed whole.

    Returns:
        Logits of the last token fed, `[1, V]`.
    """
    text, images, pieces = active.text, active.request.images, runner.pieces
    prompt = len(text) if pieces.anywhere else active.request.prompt_tokens
    if active.fed >= prompt:
        return _feed_chain(active, text[active.fed : active.fed + min(max_tokens, _MAX_CHAIN)], runner)
    hook = None if row.written else prompt_hook([row])
    feeding = runner.for_prompts(images)
    if (logprobs := active.prompt_logprobs) is not None:
        feeding, hook = feeding.with_all_logits(), logprobs.chained_with(hook)
        max_tokens = min(max_tokens, logprobs.piece_tokens)
    end = prompt if images else pieces.end(active.fed, max_tokens, prompt)
    if logprobs is not None:
        logprobs.check_piece(end - active.fed)
    logits = feeding.prefill([text[:end]], active.cache, hook)
    active.fed = end
    return logits


def _feed_chain(active: ActiveRequest, ids: list[int], runner: EagerRunner) -> torch.Tensor:
    """Feed answer tokens as a tree without branches, as many of `ids` as it may hold."""
    tree = TokenTree(ids[0], runner.room(active.fed))
    tree.add_path(ids[1:], "text")
    logits = runner.forward([tree], [active.text[: active.fed + 1]], active.cache)  # [1, S, V]
    active.cache.keep([range(len(tree))], logits.shape[1])
    active.fed += len(tree)
    return logits[:, len(tree) - 1]


class EngineBatch:
    """All running requests: chunked prefill and decode steps. Not thread-safe.

    An exception in a request's drafts, processors, grammar, criteria, text or `on_step` ends that request only. If a
    joint prefill pass fails, each of its prompts is fed alone. If a decode pass fails, or what is done between passes,
    the texts are fed again and decoded without drafts; if that fails too, one after the other, and whoever fails alone
    is ended. Where that happens several times in a row, a single token is fed: if not even that succeeds, as on a
    device that is gone, `advance` raises.

    The limits are those of `lade.Engine`, and `headroom` the tokens of growth reserved per row at admission.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        *,
        prefill_tokens: int,
        max_rows: int,
        max_tokens: int | None,
        headroom: int = HEADROOM,
        prefix_cache: int | None = 0,
    ) -> None:
        self._model, self._prefill_tokens = model, prefill_tokens
        self._runner = engine_runner(model, plan)
        # the tree size that `capacity.largest_tree` assumes
        self._job = DecodeJob(model, self._runner, most=LARGEST, engine=True)
        self._prefill_runner = self._runner.eager()
        device_bytes, state_bytes = row_bytes(self._prefill_runner)
        token_bytes = sum(device_bytes.values())
        if max_tokens is None or prefix_cache is None:
            _release(model)  # captured graphs that are idle count as free memory
        if max_tokens is None:
            max_tokens = default_max_tokens(device_bytes)
        if prefix_cache is None:
            prefix_cache = 0 if state_bytes else default_prefix_bytes(device_bytes)
        self._cache = self._runner.new_cache(limit=max_tokens)
        state_slots = -(-state_bytes // token_bytes)
        capacity = Capacity(max_rows, max_tokens, token_bytes, self._runner.sizing, state_slots)
        own_kind: Any = self._cache  # the cache class that this runner expects
        self._loop = DecodeLoop(
            [], self._runner, own_kind, isolate=True, reader=self._runner.reader, leaving=self._cache_text
        )
        self.running = RunningSet(capacity, headroom)
        self._reuse = PrefixReuse(prefix_cache, self._runner.pieces.shareable, model)
        self._allocator = KvAllocator(self._cache, self.running)
        self.prefix_cache = prefix_cache
        self.tally = Tally()
        self.work: tuple[str, float] | None = None  # of `advance` and since when, see `CurrentWork`
        self._lost = 0  # requests that ended alone in a failing pass, since one succeeded

    @property
    def idle(self) -> bool:
        """True if no request is running or preempted."""
        return not self.running.active

    def _preempt(self) -> None:
        """Preempt rows until the next step fits in the cache, then resume those that fit again."""
        if self._allocator.is_enough:
            return
        while (active := self.running.next_preempted()) is not None:
            row = active.row
            if row is not None and row in self._loop.rows:
                self._cache_text(row, self._loop.rows.index(row))
                self._loop.remove(row)
                self._reset_if_empty()
            self.running.preempt(active)
            active.restart()
            self.tally.add("displacements", 1)
        self.running.resume()

    def _cache_text(self, row: Row, place: int) -> None:
        """Copy a row's text into the prefix cache before the row leaves the KV cache."""
        tokens = min(self._cache.lengths[place], len(row.tokens))
        self._reuse.put(self.running.decoding[row], row, tokens, self._cache.copy_row, place)

    def _reset_if_empty(self) -> None:
        if not self._loop.rows:
            self._cache.reset()

    def _drafter(self, request: EngineRequest) -> Drafter:
        (drafter,) = self._job.drafters([request.draft_spec], alone=len(self.running.active) == 1)
        self._loop.budget, self._loop.mtp = self._job.budget, self._job.mtp
        return self._reuse.drafter(IsolatedDrafter(drafter))

    def advance(self) -> None:
        """Evict cancelled requests, prefill up to `prefill_tokens`, run one decode step."""
        self.work = "admission", perf_counter()
        try:
            self._advance()
        except Exception as problem:  # forwarded to the requests that fail again
            logger.warning("a fault between passes: all texts are fed again", exc_info=problem)
            others = [*self.running.prefilling, *self.running.preempted]
            if self.running.decoding:
                self._recover(list(self.running.decoding), problem)
            for active in others:
                active.failures += 1
                active.restart()
                if active.failures > _MOST_FAILURES:
                    self._end(active, problem)
        if self._lost >= _LOST_IN_A_ROW:
            self._probe()
        self.work = None

    def _probe(self) -> None:
        """Feed one token; an error other than for lack of something ends the engine."""
        self.work, self._lost = ("probe", perf_counter()), 0
        with suppress(MemoryError, OSError, torch.OutOfMemoryError):  # these may pass
            self._prefill_runner.prefill([[0]], self._prefill_runner.tree_cache())

    def _advance(self) -> None:
        before = self._allocator.checked
        for active in [each for each in self.running.active if each.cancelled]:
            self._end(active, None)
        self._preempt()
        self._prefill()
        if self._loop.rows:
            self._step()
        if self.idle:
            self._cache.reset()
            self._save()
        if self._allocator.checked is not before or not self._allocator.is_enough:
            self._report_use()  # otherwise rows have only grown, which `add_pass` counts

    def _report_use(self) -> None:
        rows, slots = self._cache.room
        cached = self._reuse.prefix_cache
        held = {"slots": sum(self._cache.lengths), "room": rows * slots}
        self.tally.set_use(**held, prefix_texts=len(cached), prefix_bytes=cached.nbytes)

    def close(self, problem: BaseException | None = None) -> None:
        """End all requests, cancelled or with an error, and free their memory."""
        self.work = None
        self._loop.rows = []
        for active in self.running.clear():
            self._finish_handle(active, problem)
        self._cache.reset()
        self._reuse.prefix_cache.clear()
        self._report_use()
        _release(self._model)
        self._save()

    def _save(self) -> None:
        try:
            self._job.save()
        except Exception as problem:  # noqa: BLE001 - the next process measures again
            logger.warning("step costs were not saved: %s: %s", type(problem).__name__, problem)

    def _prefill(self) -> None:
        left = self._prefill_tokens
        while left > 0 and (queue := self.running.prefilling):
            group = prefill_group(queue, left, self._prefill_runner, self._reuse)
            if len(group) > 1:
                left -= self._prefill_together(group)
            elif left < self._prefill_tokens and self._can_wait(queue[0], left):
                break
            else:
                left -= self._prefill_chunk(queue[0], left)

    def _can_wait(self, active: ActiveRequest, left: int) -> bool:
        """Return True if the remaining chunk would cost more as a pass of its own than as part of a later one."""
        return left < min(len(active.text) - active.fed, self._prefill_runner.pass_tokens) and not active.pinned

    @contextmanager
    def _ending_on_error(self, active: ActiveRequest) -> Iterator[None]:
        """End the request with any exception raised in the block."""
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - forwarded to the request's handle
            self._end(active, problem)
            if self._loop.rows and self._cache.room == (0, 0):  # the failed pass took the shared cache with it
                rows, self._loop.rows = self._loop.rows, []
                for row in rows:
                    self._end(self.running.decoding[row], problem)

    def _prefill_chunk(self, active: ActiveRequest, max_tokens: int) -> int:
        """Feed the next chunk of a text, after the last of which the row joins; return the number of tokens fed."""
        with self._ending_on_error(active):
            start = perf_counter()
            self.work = "prefill", start
            row, before = self._start(active), active.fed
            active.handle.failed_alone = True  # unless this pass succeeds
            with self._loop.mtp.reading([row]):
                logits, resumed = feed_chunk(active, row, self._prefill_runner, max_tokens), bool(row.written)
            active.handle.failed_alone = False
            self._count_prefill(start, [] if resumed else [active])
            if active.fed == len(active.text):
                argmax_ids = None if resumed else read(logits, wants_entries=False).argmax_ids
                self._finish_prefill(active, row, logits, argmax_ids)
            return active.fed - before
        return 0

    def _prefill_together(self, group: Sequence[ActiveRequest]) -> int:
        """Feed whole prompts in one pass, after which their rows join; return the tokens fed, padding included."""
        start, rows = perf_counter(), {}
        self.work = "prefill", start
        for active in group:
            with self._ending_on_error(active):
                rows[active] = self._start(active)
        try:
            logits, argmax_ids = self._read_prompts(rows)
        except Exception as problem:  # noqa: BLE001 - feeding each prompt alone finds the culprit
            logger.info("joint prefill failed, feeding each prompt alone: %s: %s", type(problem).__name__, problem)
            argmax_ids = []
        if not argmax_ids:  # outside the handler, where the traceback's tensors are freed
            for active in rows:
                active.restart()
            return sum([self._prefill_chunk(active, len(active.text)) for active in rows])
        self._count_prefill(start, rows)
        for place, (active, row) in enumerate(rows.items()):
            with self._ending_on_error(active):
                self._finish_prefill(active, row, logits[place : place + 1], argmax_ids[place : place + 1])
        return self._prefill_runner.padded([len(active.text) for active in group])

    def _read_prompts(self, rows: Mapping[ActiveRequest, Row]) -> tuple[torch.Tensor, list[int]]:
        """Feed the prompts of rows and give each its own cache; return last-token logits `[B, V]` and their argmax."""
        texts, cache = [active.text for active in rows], self._prefill_runner.tree_cache()
        with self._loop.mtp.reading(list(rows.values())):
            logits = self._prefill_runner.prefill(texts, cache, prompt_hook(list(rows.values())))
        for place, active in enumerate(rows):
            active.cache, active.fed = cache.copy_row(place, len(texts[place])), len(texts[place])
        return logits, read(logits, wants_entries=False).argmax_ids

    def _finish_prefill(
        self, active: ActiveRequest, row: Row, logits: torch.Tensor, argmax_ids: Sequence[int] | None
    ) -> None:
        """Join a fully fed row to the batch and choose its first token, from the last token's logits `[1, V]`.

        An answer that is resumed has its first token, and None for `argmax_ids`.
        """
        start = perf_counter()
        if argmax_ids is not None:
            active.request.images = None
            self._reuse.put_prompt(active)
            row.choose_first(logits, argmax_ids)
            self._count_prefill(start, [active])
        self._join(active, row)
        if argmax_ids is not None:
            self._loop.drop_finished()  # the first token may have been the last
            cached = active.handle.cached_tokens
            step = Step(0, row.written, ["prefill"], active.fed - cached, active.seconds)
            self.tally.add_first(step, active.fed, cached)
            self._deliver(active, step)

    def _count_prefill(self, start: float, starting: Iterable[ActiveRequest]) -> None:
        """Count the time since `start` as prefill, both in total and for requests without a token yet."""
        seconds = perf_counter() - start
        self.tally.add("prefill_s", seconds)
        for active in starting:
            active.seconds += seconds

    def _start(self, active: ActiveRequest) -> Row:
        """Return the row of a request about to be fed, creating it and loading its cached prefix if needed."""
        if active.row is None:
            active.handle.mark_started()
            self._runner.refresh_facts()
            active.row = active.request.row(self._drafter(active.request))
            self._job.report_to(active.handle.stats, active.request.config)
        if not active.fed:
            active.cache = self._prefill_runner.tree_cache()
            active.scope = self._reuse.scope_of(active)
            self._reuse.take(active)
        return active.row

    def _join(self, active: ActiveRequest, row: Row) -> None:
        self.running.join(active, row)
        self._allocator.reserve(active.fed)
        self._cache.take(active.cache)
        self._loop.rows.append(row)

    def _step(self) -> None:
        rows = list(self._loop.rows)
        self.work = "decode", perf_counter()
        try:
            self._allocator.reserve()
            self._job.resize(len(rows))
            steps = self._loop.step()
        except Exception as problem:  # noqa: BLE001 - forwarded to the request that fails alone
            self._recover(rows, problem)
            return
        self._lost, forward_s = 0, self._runner.pass_time.wall_s
        self.tally.add_pass(steps, forward_s)
        for row, step in zip(rows, steps, strict=True):
            if step.tokens:  # a row that failed later in the step may have some
                self._deliver(self.running.decoding[row], step, forward_s)
            else:
                self._end(self.running.decoding[row], row.problem)

    def _recover(self, rows: Sequence[Row], problem: Exception) -> None:
        """After a failed pass, which leaves the cache in an unknown state, feed the texts of its rows again.

        From then on these rows draft nothing. A request that fails again is resumed alone, and ends if it fails alone.
        """
        actives = [self.running.decoding[row] for row in rows]
        logger.warning(
            "a pass over %d rows failed (%s: %s): they go on without drafts", len(rows), type(problem).__name__, problem
        )
        for row in rows:
            self._loop.mtp.leave(row)
        self._loop.rows = []
        self._cache.reset()
        for active in actives:
            active.failures += 1
            if self._settle(active):
                continue
            if active.pinned or active.row is None or (len(rows) == 1 and active.failures > 1):
                active.handle.failed_alone = len(rows) == 1
                self._end(active, problem)
                continue
            active.row.drafter.silence()
            self.running.preempt(active)
            active.restart()
        self.running.resume_alone |= any(active.failures > 1 for active in actives)

    def _settle(self, active: ActiveRequest) -> bool:
        """Deliver the tokens that a failed step has emitted, of unknown sources; return True if the request ends."""
        row = active.row
        assert row is not None
        if tokens := row.written[len(active.handle.tokens) :]:
            self._deliver(active, Step(row.steps, tokens, ["bonus"] * len(tokens), len(tokens), 0.0))
        elif row.done:
            self._end(active, self._result(active))
        return active.handle.done()

    @staticmethod
    def _result(active: ActiveRequest) -> Output | BaseException:
        """Return the output of a row that has ended, or its problem."""
        assert active.row is not None
        try:
            return active.row.problem or active.request.output(active.row)
        except Exception as problem:  # noqa: BLE001 - forwarded to the request
            return problem

    def _deliver(self, active: ActiveRequest, step: Step, forward_s: float = 0.0) -> None:
        row = active.row
        assert row is not None
        try:
            active.handle.add_step(active.request.annotated(step, last=row.done), forward_s)
        except Exception as problem:  # noqa: BLE001 - `on_step` is user code, tokenizers are others'
            self._end(active, problem)
            return
        if row.done:
            self._end(active, self._result(active))

    def _end(self, active: ActiveRequest, result: Output | BaseException | None) -> None:
        """End a request; see `Handle.end` for `result`."""
        if active.row is not None and active.row in self._loop.rows:
            active.row.done = True
            self._loop.drop_finished()
        self.running.remove(active)
        self._reset_if_empty()
        self._finish_handle(active, result)

    def _finish_handle(self, active: ActiveRequest, result: Output | BaseException | None) -> None:
        row, reason = active.row, None
        if row is not None:
            row.drafter.close()
        if row is not None and result is not None and not isinstance(result, BaseException):
            reason = active.request.reason(row)
        self._lost += active.handle.failed_alone and isinstance(result, BaseException)
        if active.handle.end(result, reason):
            self.tally.add_end(str(active.handle.reason))


def _release(model: PreTrainedModel) -> None:
    """Free captured graphs that no generation is using."""
    if CAPTURED_RUNNERS.loaded() is not None:
        from lade.backends.cuda_graphs.backend import release

        release(model)
