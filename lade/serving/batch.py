"""Continuous batching: chunked prefill, joint decoding, removal of finished requests.

A request that made room for others has its text fed again, prompt and answer. Decoding has fed the prompt at once and
the answer token by token, and some models tell; see `lade.model.prefill`. There the answer goes in as trees
without branches: what they give is what single tokens give, many to a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.decoding.drafting.controller import LARGEST
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.loop import DecodeLoop, prompt_hook
from lade.decoding.readout import read
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.hf.job import DecodeJob, Output, engine_runner
from lade.model import joint
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner
from lade.serving.capacity import Capacity, default_max_tokens, row_bytes
from lade.serving.prefix_cache import Reuse, first_together
from lade.serving.request import Request
from lade.serving.running import HEADROOM, ActiveRequest, Room, Seats
from lade.serving.snapshot import Tally
from lade.stats import Step

_CHAIN = 64
"""Tokens of an answer in a pass, at most: what recurrent layers compute for a tree takes memory by its square."""


def feed_piece(active: ActiveRequest, row: Row, runner: EagerRunner, most: int) -> torch.Tensor:
    """Feed the next tokens of a text, some `most` at most; a prompt with images whole.

    Args:
        active: the request; its cache gets them.
        row: its row, which learns from the prompt.
        runner: feeds them.
        most: tokens to feed.

    Returns:
        Logits of the last token fed, `[1, V]`.
    """
    text, images, pieces = active.text, active.request.images, runner.pieces
    prompt = len(text) if pieces.anywhere else active.request.prompt_tokens
    if active.fed >= prompt:
        return _feed_chain(active, text[active.fed : active.fed + min(most, _CHAIN)], runner)
    hook = None if row.written else prompt_hook([row])
    feeding = runner.for_prompts(images)
    if (logprobs := active.prompt_logprobs) is not None:
        feeding, hook = feeding.with_all_logits(), logprobs.beside(hook)
        most = min(most, logprobs.piece_tokens)
    end = prompt if images else pieces.end(active.fed, most, prompt)
    if logprobs is not None:
        logprobs.check_piece(end - active.fed)
    logits = feeding.prefill([text[:end]], active.cache, hook)
    active.fed = end
    return logits


def _feed_chain(active: ActiveRequest, ids: list[int], runner: EagerRunner) -> torch.Tensor:
    """Feed tokens of an answer, as many of these as a tree may have here."""
    tree = TokenTree(ids[0], runner.room(active.fed))
    tree.add_path(ids[1:], "text")
    logits = runner.forward([tree], [active.text[: active.fed + 1]], active.cache)  # [1, S, V]
    active.cache.keep([range(len(tree))], logits.shape[1])
    active.fed += len(tree)
    return logits[:, len(tree) - 1]


logger = logging.getLogger(__name__)


class Batch:
    """Prefill and decode steps of all active requests; not to be used by two threads at a time.

    An error in a request's processors, criteria or `on_step` ends that request alone. One in a forward pass ends all
    requests that took part in it; but prompts whose common pass fails are fed again, each by itself.

    Args:
        model: one that `lade.supports`.
        plan: how it takes its masks.
        prefill_tokens: prompt tokens fed between two decode steps, at most.
        max_rows: requests decoded at a time.
        max_tokens: slots of the cache; None for as many as this machine has memory for.
        headroom: see `seats.HEADROOM`.
        prefix_cache: bytes of texts that are kept for prompts that begin like them.

    Attributes:
        seats: who is served at a time.
        tally: counts what is done.
        prefix_cache: as given.
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
        prefix_cache: int = 0,
    ) -> None:
        self._model, self._prefill_tokens = model, prefill_tokens
        self._runner = engine_runner(model, plan)
        # a request's need counts on trees of at most so many tokens: see `capacity.largest_tree`
        self._job = DecodeJob(model, self._runner, "engine", batched=True, most=LARGEST)
        self._prefill_runner = self._runner.eager()
        device_bytes, state_bytes = row_bytes(self._prefill_runner)
        token_bytes = sum(device_bytes.values())
        if max_tokens is None:
            _release(model)  # what no generation is using is free
            max_tokens = default_max_tokens(device_bytes)
        self._cache = self._runner.new_cache(limit=max_tokens)
        state_slots = -(-state_bytes // token_bytes)
        capacity = Capacity(max_rows, max_tokens, token_bytes, self._runner.sizing, state_slots)
        own_kind: Any = self._cache  # the one that this runner expects
        self._loop = DecodeLoop([], self._runner, own_kind, isolate=True, reader=self._job.reader, leaving=self._shelve)
        self.seats = Seats(capacity, headroom)
        self._reuse = Reuse(prefix_cache, self._runner.pieces.shareable)
        self._room = Room(self._cache, self.seats)
        self.prefix_cache = prefix_cache
        self.tally = Tally()

    @property
    def capacity(self) -> Capacity:
        """What fits at a time."""
        return self.seats.capacity

    @property
    def idle(self) -> bool:
        """Whether no request is active."""
        return not self.seats.active

    def _arrange(self) -> None:
        """Have rows make room until the next step has enough of it; where there is more, have them go on."""
        if self._room.is_enough:
            return
        while (active := self.seats.next_to_make_room()) is not None:
            row = active.row
            if row is not None and row in self._loop.rows:
                self._shelve(row, self._loop.rows.index(row))
                self._loop.remove(row)
                self._reset_if_empty()
            self.seats.displace(active)
            active.start_over()
            self.tally.add_displacement()
        self.seats.recall()

    def _shelve(self, row: Row, place: int) -> None:
        """Keep the text of a row before it leaves the cache."""
        tokens = min(self._cache.lengths[place], len(row.tokens))
        self._reuse.put(self.seats.decoding[row], row, tokens, self._cache.copy_row, place)

    def _reset_if_empty(self) -> None:
        if not self._loop.rows:
            self._cache.reset()

    def _drafter(self, request: Request) -> Drafter:
        drafter = self._job.drafter(request.draft_spec, alone=len(self.seats.active) == 1)
        self._loop.budget, self._loop.mtp = self._job.budget, self._job.mtp
        return self._reuse.drafter(drafter)

    def advance(self) -> None:
        """Evict cancelled requests, prefill up to `prefill_tokens`, run one decode step."""
        before = self._room.found
        for active in [each for each in self.seats.active if each.cancelled]:
            self._end(active, None)
        self._arrange()
        self._prefill()
        if self._loop.rows:
            self._step()
        if self.idle:
            self._cache.reset()
            self._job.save()
        if self._room.found is not before or not self._room.is_enough:
            self._report_use()  # else rows have only grown, which the tally knows of

    def _report_use(self) -> None:
        rows, slots = self._cache.room
        shelf = self._reuse.shelf
        self.tally.set_use(sum(self._cache.lengths), rows * slots, len(shelf), shelf.nbytes)

    def close(self, problem: BaseException | None = None) -> None:
        """End all requests, with an error or as cancelled, and release what they took."""
        self._loop.rows = []
        for active in self.seats.clear():
            self._tell_end(active, problem)
        self._cache.reset()
        self._reuse.shelf.clear()
        self._report_use()
        _release(self._model)
        self._job.save()

    def _prefill(self) -> None:
        left = self._prefill_tokens
        while left > 0 and (line := self.seats.prefilling):
            group = first_together(line, left, self._prefill_runner, self._reuse)
            if len(group) > 1:
                left -= self._prefill_together(group)
            elif left < self._prefill_tokens and self._can_wait(line[0], left):
                break
            else:
                left -= self._prefill_piece(line[0], left)

    def _can_wait(self, active: ActiveRequest, left: int) -> bool:
        """Whether less than a pass costs would be fed of a text, which needs one more later on anyway."""
        return left < min(len(active.text) - active.fed, self._prefill_runner.pass_tokens) and not active.pinned

    @contextmanager
    def _blaming(self, active: ActiveRequest) -> Iterator[None]:
        """A block whose errors end a request."""
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - whatever it is, the request's handle gets it
            self._end(active, problem)
            if self._loop.rows and self._cache.room == (0, 0):  # the decoding rows have lost their cache
                self._end_rows(problem)

    def _reading(self, rows: Sequence[Row]) -> AbstractContextManager[object]:
        """Return a block in which texts of these rows are fed; an MTP layer is shown the states, if there is one."""
        return nullcontext() if self._loop.mtp is None else self._loop.mtp.reading(rows)

    def _prefill_piece(self, active: ActiveRequest, most: int) -> int:
        """Feed the next piece of a text, see `feed_piece`; after the last one the row joins.

        Returns:
            How many tokens were fed; 0 after an error, which ends the request.
        """
        with self._blaming(active):
            start = perf_counter()
            row, before = self._begun(active), active.fed
            with self._reading([row]):
                logits, goes_on = feed_piece(active, row, self._prefill_runner, most), bool(row.written)
            self._spent(start, [] if goes_on else [active])
            if active.fed == len(active.text):
                argmax_ids = None if goes_on else read(logits, wants_entries=False).argmax_ids
                self._finish_text(active, row, logits, argmax_ids)
            return active.fed - before
        return 0

    def _prefill_together(self, group: Sequence[ActiveRequest]) -> int:
        """Feed whole prompts in one pass; then their rows join.

        Returns:
            How many tokens were fed, padding included.
        """
        start, rows = perf_counter(), {}
        for active in group:
            with self._blaming(active):
                rows[active] = self._begun(active)
        try:
            logits, argmax_ids = self._read_prompts(rows)
        except Exception as problem:  # noqa: BLE001 - whose it is shows when each prompt is fed by itself
            logger.info("prompts cannot be fed together, so each is by itself: %s: %s", type(problem).__name__, problem)
            argmax_ids = []
        if not argmax_ids:  # here, where what the error's frames held is freed
            for active in rows:
                active.start_over()
            return sum([self._prefill_piece(active, len(active.text)) for active in rows])
        self._spent(start, rows)
        for place, (active, row) in enumerate(rows.items()):
            with self._blaming(active):
                self._finish_text(active, row, logits[place : place + 1], argmax_ids[place : place + 1])
        return self._prefill_runner.padded([len(active.text) for active in group])

    def _read_prompts(self, rows: Mapping[ActiveRequest, Row]) -> tuple[torch.Tensor, list[int]]:
        """Feed the prompts of rows, each of which then has its cache; logits `[B, V]` of last tokens, and argmax."""
        texts, cache = [active.text for active in rows], self._prefill_runner.tree_cache()
        with self._reading(list(rows.values())):
            logits = self._prefill_runner.prefill(texts, cache, prompt_hook(list(rows.values())))
        for place, active in enumerate(rows):
            active.cache, active.fed = cache.copy_row(place, len(texts[place])), len(texts[place])
        return logits, read(logits, wants_entries=False).argmax_ids

    def _finish_text(
        self, active: ActiveRequest, row: Row, logits: torch.Tensor, argmax_ids: Sequence[int] | None
    ) -> None:
        """A text has been fed: its row joins, with a first token unless its answer goes on.

        Args:
            active: the request.
            row: its row.
            logits: `[1, V]`, of the last token.
            argmax_ids: `[1]`; None for an answer that goes on.
        """
        start = perf_counter()
        if argmax_ids is not None:
            active.request.images = None
            active.handle.tell_prompt(active.prompt_logprobs)
            self._reuse.put_prompt(active)
            row.choose_first(logits, argmax_ids)
            self._spent(start, [active])
        self._join(active, row)
        if argmax_ids is not None:
            self._loop.drop_finished()  # the first token may have been the last
            cached = active.handle.cached_tokens
            step = Step(0, row.written, ["prefill"], active.fed - cached, active.seconds)
            self.tally.add_first(step, active.fed, cached)
            self._deliver(active, step)

    def _spent(self, start: float, begun: Iterable[ActiveRequest]) -> None:
        """Count the time since `start` as prefill, and for requests whose answers begin."""
        seconds = perf_counter() - start
        self.tally.add_prefill(seconds)
        for active in begun:
            active.seconds += seconds

    def _begun(self, active: ActiveRequest) -> Row:
        """The row of a request whose text is going to be fed; it takes what is known of the text."""
        if active.row is None:
            active.handle.begin()
            self._runner.look_again()
            active.row = active.request.row(self._drafter(active.request))
        if not active.fed:
            active.cache = self._prefill_runner.tree_cache()
            self._reuse.take(active)
        return active.row

    def _join(self, active: ActiveRequest, row: Row) -> None:
        self.seats.join(active, row)
        self._room.reserve(active.fed)
        self._cache.take(active.cache)
        self._loop.rows.append(row)

    def _step(self) -> None:
        rows = list(self._loop.rows)
        try:
            self._room.reserve()
            self._job.resize(len(rows))
            steps = self._loop.step()
        except Exception as problem:  # noqa: BLE001 - likewise; and what the cache holds now is unknown
            self._end_rows(problem)
            return
        forward_s = self._runner.pass_time.wall_s
        self.tally.add_pass(steps, forward_s)
        for row, step in zip(rows, steps, strict=True):
            if step.tokens:  # also of a row that then failed
                self._deliver(self.seats.decoding[row], step, forward_s)
            else:
                self._end(self.seats.decoding[row], row.problem)

    def _end_rows(self, problem: BaseException) -> None:
        rows, self._loop.rows = self._loop.rows, []
        for row in rows:
            self._end(self.seats.decoding[row], problem)

    def _deliver(self, active: ActiveRequest, step: Step, forward_s: float = 0.0) -> None:
        assert active.row is not None
        step = active.request.told(step, last=active.row.done)
        try:
            active.handle.tell(step, forward_s)
        except Exception as problem:  # noqa: BLE001 - on_step is the user's
            self._end(active, problem)
            return
        if active.row.done:
            self._end(active, active.row.problem or active.request.output(active.row))

    def _end(self, active: ActiveRequest, result: Output | BaseException | None) -> None:
        """End a request; see `Handle.end` for the result."""
        if active.row is not None and active.row in self._loop.rows:
            active.row.done = True
            self._loop.drop_finished()
        self.seats.remove(active)
        self._reset_if_empty()
        self._tell_end(active, result)

    def _tell_end(self, active: ActiveRequest, result: Output | BaseException | None) -> None:
        row, reason = active.row, None
        if row is not None and result is not None and not isinstance(result, BaseException):
            reason = active.request.reason(row)
        if active.handle.end(result, reason):
            self.tally.add_end(str(active.handle.reason))


def _release(model: PreTrainedModel) -> None:
    """Give back the memory of captured passes that no generation is using."""
    graphs = joint.loaded("cuda_graphs")
    if graphs is not None:
        graphs.release(model)
