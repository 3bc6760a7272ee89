"""Continuous batching: requests join one by one, are prefilled in pieces, decoded together, and leave as they end."""

from __future__ import annotations

import bisect
import itertools
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.drafting.batch_budget import BatchBudget
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.loop import DecodeLoop, prompt_hook
from lade.decoding.readout import read
from lade.decoding.row import Row
from lade.hf.ids import vocabulary_of
from lade.hf.output import Output
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.select_runner import release, runner_for
from lade.serving.active import ActiveRequest
from lade.serving.capacity import Capacity, Need, default_max_tokens
from lade.serving.handle import Handle
from lade.serving.request import Request
from lade.serving.snapshot import Tally
from lade.stats import Step
from lade.tuning.batch_cost import BatchCost
from lade.tuning.cost_cache import save_refreshed, step_cost_for

HEADROOM = 128
"""Tokens that each row is to have room for beyond its own when another one is seated beside it."""


class Batch:
    """Prefill and decode steps of all active requests; not to be used by two threads at a time.

    Rows are seated by the room that they take now, and some more. When they have grown too long for one another, the
    one that was seated last makes room: its keys and values are dropped, its row is kept, and its text is fed again
    when there is room for it, before anyone else is seated. The one seated first never makes room, so all come to their
    end.

    An error in a request's processors, criteria or `on_step` ends that request alone. One in a forward pass ends all
    requests that took part in it.

    Args:
        model: one that `lade.supports`.
        plan: how it takes its masks.
        prefill_tokens: prompt tokens fed between two decode steps, at most.
        max_rows: requests decoded at a time.
        max_tokens: slots of the cache; None for as many as this machine has memory for.
        headroom: see `HEADROOM`.

    Attributes:
        capacity: what fits at a time.
        tally: counts what is done.
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
    ) -> None:
        self._model, self._prefill_tokens, self._headroom = model, prefill_tokens, headroom
        self._runner = runner_for(model, plan, GenerationConfig())
        self._prefill_runner = self._runner.eager()
        token_bytes, state_bytes = self._row_bytes()
        if max_tokens is None:
            release(model)  # what no generation is using is free
            max_tokens = default_max_tokens(token_bytes, self._runner.device)
        self._cache = self._runner.new_cache(limit=max_tokens)
        state_slots = -(-state_bytes // token_bytes)
        self.capacity = Capacity(max_rows, max_tokens, token_bytes, self._runner.sizing, state_slots)
        own_kind: Any = self._cache  # the one that this runner expects
        self._loop = DecodeLoop([], self._runner, own_kind, isolate=True)
        self._prefilling: list[ActiveRequest] = []
        self._decoding: dict[Row, ActiveRequest] = {}  # after prefill
        self._displaced: list[ActiveRequest] = []  # in the order in which they were seated first
        self._numbers = itertools.count()
        self._cost: BatchCost | None = None
        self.tally = Tally()

    def _row_bytes(self) -> tuple[int, int]:
        """Bytes of a cached token and of a row's states, found by feeding one: no two families keep the same."""
        cache = TreeCache()
        with torch.random.fork_rng(devices=[]):
            self._prefill_runner.prefill([[0]], cache)
        return cache.token_bytes, cache.state_bytes

    @property
    def idle(self) -> bool:
        """Whether no request is active."""
        return not self.active

    @property
    def active(self) -> list[ActiveRequest]:
        """All requests that have been seated and not ended."""
        return [*self._seated, *self._displaced]

    @property
    def _seated(self) -> list[ActiveRequest]:
        return [*self._prefilling, *self._decoding.values()]

    @property
    def displaced(self) -> int:
        """How many of the active requests have made room for others."""
        return len(self._displaced)

    def has_room(self, request: Request) -> bool:
        """Whether one more request may be seated beside the active ones."""
        tokens = request.prompt_tokens + 1 + self._headroom
        need = request.need if request.images else request.need.limited(tokens)
        return not self._displaced and self._fits(need)

    def _fits(self, need: Need) -> bool:
        return self.capacity.fits([need, *(active.need(self._headroom) for active in self._seated)])

    def add(self, request: Request, handle: Handle) -> ActiveRequest:
        """Seat a request; it is prefilled after those before it."""
        active = ActiveRequest(request, handle, next(self._numbers))
        self._prefilling.append(active)
        return active

    def _arrange(self) -> None:
        """Have rows make room until the next step has enough of it; where there is more, have one of them go on."""
        while self._seated and not self.capacity.fits([active.need(0) for active in self._seated]):
            self._displace(max((each for each in self._seated if not each.pinned), key=lambda active: active.number))
        while self._displaced and self._fits(self._displaced[0].need(self._headroom)):
            self._prefilling.append(self._displaced.pop(0))

    def _displace(self, active: ActiveRequest) -> None:
        if active in self._prefilling:
            self._prefilling.remove(active)
        elif active.row is not None:
            del self._decoding[active.row]
            if len(self._loop.rows) > 1:
                self._loop.remove(active.row)
            else:
                self._loop.rows = []
                self._cache.reset()
        active.start_over()
        bisect.insort(self._displaced, active, key=lambda active: active.number)
        self.tally.add_displacement()

    def _drafter(self, request: Request) -> Drafter:
        config, weighs = request.config, request.config.adaptive and request.config.budget is None
        if weighs and self._loop.budget is None:
            self._cost = BatchCost(lambda rows: step_cost_for(self._model, self._runner, batch=rows), 1)
            self._loop.budget = BatchBudget(self._cost)
        budget = self._loop.budget if weighs else None
        return drafter_for(config, request.excluded, vocabulary=vocabulary_of(self._model), budget=budget)

    def advance(self) -> None:
        """Evict cancelled requests, prefill up to `prefill_tokens`, run one decode step."""
        for active in self.active:
            if active.cancelled:
                self._end(active, None)
        self._arrange()
        self._prefill()
        if self._loop.rows:
            self._step()
        if self.idle:
            self._cache.reset()
            save_refreshed(self._model)
        rows, slots = self._cache.room
        self.tally.set_slots(sum(self._cache.lengths), rows * slots)

    def close(self, problem: BaseException | None = None) -> None:
        """End all requests, with an error or as cancelled, and release what they took."""
        everyone, self._prefilling, self._decoding, self._displaced, self._loop.rows = self.active, [], {}, [], []
        for active in everyone:
            self._tell_end(active, problem)
        self._cache.reset()
        self.tally.set_slots(0, 0)
        release(self._model)
        save_refreshed(self._model)

    def _prefill(self) -> None:
        left = self._prefill_tokens
        while left > 0 and self._prefilling:
            active = self._prefilling[0]
            before = active.fed
            try:
                self._prefill_piece(active, left)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the request's handle gets it
                self._end(active, problem)
                if self._loop.rows and self._cache.room == (0, 0):  # the decoding rows have lost their cache
                    self._end_rows(problem)
            left -= active.fed - before

    def _prefill_piece(self, active: ActiveRequest, most: int) -> None:
        """Feed at most some `most` tokens of a text, a prompt with images whole; after the last one the row joins."""
        start = perf_counter()
        if active.row is None:
            active.handle.begin()
            active.row = active.request.row(self._drafter(active.request))
        row, text, images, goes_on = active.row, active.text, active.request.images, bool(active.row.written)
        end = len(text) if images else self._prefill_runner.piece_end(active.fed, most, len(text))
        runner = self._prefill_runner.for_prompts(images)
        logits = runner.prefill([text[:end]], active.cache, None if goes_on else prompt_hook([row]))  # [1, V]
        active.fed, whole = end, end == len(text)
        if begins := whole and not goes_on:
            active.request.images = None
            row.choose_first(logits, read(logits, wants_entries=False).argmax_ids)
        seconds = perf_counter() - start
        self.tally.add_prefill(seconds)
        if not goes_on:
            active.seconds += seconds
        if whole:
            self._join(active, row)
        if begins:
            self._loop.drop_finished()  # the first token may have been the last
            step = Step(0, row.written, ["prefill"], end, active.seconds)
            self.tally.add_first(step, end)
            self._deliver(active, step)

    def _join(self, active: ActiveRequest, row: Row) -> None:
        self._prefilling.remove(active)
        self._decoding[row] = active
        self._reserve(active.fed)
        self._cache.take(active.cache)
        self._loop.rows.append(row)

    def _step(self) -> None:
        rows = list(self._loop.rows)
        try:
            self._reserve()
            if self._cost is not None:
                self._cost.resize(len(rows))
            steps = self._loop.step()
        except Exception as problem:  # noqa: BLE001 - likewise; and what the cache holds now is unknown
            self._end_rows(problem)
            return
        self.tally.add_pass(steps, self._runner.forward_s)
        for row, step in zip(rows, steps, strict=True):
            if step.tokens:  # also of a row that then failed
                self._deliver(self._decoding[row], step)
            else:
                self._end(self._decoding[row], row.problem)

    def _end_rows(self, problem: BaseException) -> None:
        rows, self._loop.rows = self._loop.rows, []
        for row in rows:
            self._end(self._decoding[row], problem)

    def _reserve(self, joining: int = 0) -> None:
        """Reserve slots before the cache grows by itself, which knows no limits; `joining` tokens are about to join."""
        cache, longest, rows = self._cache, max(joining, *self._cache.lengths), self._decoding.values()
        spares = [sys.maxsize, *(self._headroom >> half for half in range(self._headroom.bit_length() + 1))]
        needs = next(filter(self.capacity.fits, ([row.need(spare) for row in rows] for spare in spares)))
        capacity = replace(self.capacity, sizing=cache)  # of the buffers that hold the rows now
        if not capacity.suffices(cache.room, needs, longest):
            cache.reserve(*capacity.room(needs, longest))

    def _deliver(self, active: ActiveRequest, step: Step) -> None:
        assert active.row is not None
        step = active.request.told(step, last=active.row.done)
        try:
            active.handle.tell(step, 0.0 if step.index == 0 else self._runner.forward_s)
        except Exception as problem:  # noqa: BLE001 - on_step is the user's
            self._end(active, problem)
            return
        if active.row.done:
            self._end(active, active.row.problem or active.request.output(active.row))

    def _end(self, active: ActiveRequest, result: Output | BaseException | None) -> None:
        """End a request; see `Handle.end` for the result."""
        if active in self._prefilling:
            self._prefilling.remove(active)
        elif active in self._displaced:
            self._displaced.remove(active)
        elif active.row is not None:
            del self._decoding[active.row]
            active.row.done = True
            self._loop.drop_finished()
            if not self._loop.rows:
                self._cache.reset()
        self._tell_end(active, result)

    def _tell_end(self, active: ActiveRequest, result: Output | BaseException | None) -> None:
        row, reason = active.row, None
        if row is not None and result is not None and not isinstance(result, BaseException):
            reason = active.request.reason(row)
        if active.handle.end(result, reason):
            self.tally.add_end(str(active.handle.reason))
