"""The requests that are decoded together: they join one by one, prompt piece by piece, and leave as they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.drafting.batch_budget import JointBudget
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.loop import Engine
from lade.decoding.readout import read
from lade.decoding.row import Row
from lade.hf.ids import vocabulary_of
from lade.hf.output import Output
from lade.model.cuda_graphs.workspace import release
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.select_runner import runner_for
from lade.serving.capacity import Capacity, default_max_tokens
from lade.serving.handle import Handle
from lade.serving.request import Request
from lade.stats import Step
from lade.tuning.batch_cost import BatchCost
from lade.tuning.cost_cache import save_refreshed, step_cost_for


@dataclass(eq=False)
class Seat:
    """A request that is being decoded.

    Attributes:
        request: what is asked for.
        handle: who is told.
        row: writes the answer; made when the prompt's turn has come.
        cache: of the prompt, until the row joins the others.
        fed: tokens of the prompt that the cache holds.
        seconds: that prefill has taken.
        leaves: whether it is to end before the next step.
    """

    request: Request
    handle: Handle
    row: Row = field(init=False)
    cache: TreeCache = field(default_factory=TreeCache)
    fed: int = 0
    seconds: float = 0.0
    leaves: bool = False


class Batch:
    """One pass after the other for all requests that have joined; not to be used by two threads at a time.

    An error in a request's processors, criteria or `on_step` ends that request alone. One in a pass of the model ends
    all that took part in it.

    Args:
        model: that `lade.supports`.
        plan: how it takes its masks.
        prefill_tokens: of prompts fed between two steps, at most.
        max_rows: decoded at a time.
        max_tokens: slots of the cache; None for as many as this machine has memory for.

    Attributes:
        capacity: what may be seated.
    """

    def __init__(
        self, model: PreTrainedModel, plan: MaskPlan, *, prefill_tokens: int, max_rows: int, max_tokens: int | None
    ) -> None:
        self._model, self._prefill_tokens = model, prefill_tokens
        self._runner = runner_for(model, plan, GenerationConfig())
        token_bytes = self._token_bytes()
        if max_tokens is None:
            release(model)  # what no generation is using is free
            max_tokens = default_max_tokens(token_bytes, self._runner.device)
        self._cache = self._runner.new_cache(limit=max_tokens)
        self.capacity = Capacity(max_rows, max_tokens, token_bytes, self._cache.sizing)
        own_kind: Any = self._cache  # which this runner knows
        self._engine = Engine([], self._runner, own_kind, isolate=True)
        self._opening: list[Seat] = []
        self._seats: dict[Row, Seat] = {}  # those that have joined
        self._cost: BatchCost | None = None

    def _token_bytes(self) -> int:
        """Found by feeding a token: no two families keep the same."""
        cache = TreeCache()
        with torch.random.fork_rng(devices=[]):
            self._runner.prefill([[0]], cache)
        return cache.token_bytes

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._opening and not self._seats

    @property
    def seats(self) -> list[Seat]:
        """All requests that are being decoded."""
        return [*self._opening, *self._seats.values()]

    def has_room(self, request: Request) -> bool:
        """Whether one more fits beside those that are there."""
        return self.capacity.fits([request.need, *(seat.request.need for seat in self.seats)])

    def add(self, request: Request, handle: Handle) -> Seat:
        """Let a request take a seat; its prompt is fed when those before it have been."""
        seat = Seat(request, handle)
        self._opening.append(seat)
        return seat

    def _drafter(self, request: Request) -> Drafter:
        config, weighs = request.config, request.config.adaptive and request.config.budget is None
        if weighs and self._engine.budget is None:
            self._cost = BatchCost(lambda rows: step_cost_for(self._model, self._runner, batch=rows), 1)
            self._engine.budget = JointBudget(self._cost)
        budget = self._engine.budget if weighs else None
        return drafter_for(config, request.excluded, vocabulary=vocabulary_of(self._model), budget=budget)

    def advance(self) -> None:
        """Let go who is to leave, feed a bounded piece of the prompts, then make a step."""
        for seat in self.seats:
            if seat.leaves:
                self._end(seat, None)
        self._feed()
        if self._engine.rows:
            self._step()
        if self.idle:
            self._cache.reset()
            save_refreshed(self._model)

    def close(self, problem: BaseException | None = None) -> None:
        """End all requests, with an error or as cancelled, and give back what they took."""
        seats, self._opening, self._seats, self._engine.rows = self.seats, [], {}, []
        for seat in seats:
            seat.handle.end(problem)
        self._cache.reset()
        release(self._model)
        save_refreshed(self._model)

    def _feed(self) -> None:
        left = self._prefill_tokens
        while left > 0 and self._opening:
            seat = self._opening[0]
            before = seat.fed
            try:
                self._feed_piece(seat, left)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the request's owner gets it
                self._end(seat, problem)
                if self._engine.rows and self._cache.room == (0, 0):  # the others have lost what they had
                    self._end_rows(problem)
            left -= seat.fed - before

    def _feed_piece(self, seat: Seat, most: int) -> None:
        """Feed at most so many tokens of a prompt; behind the last one the answer begins."""
        start = perf_counter()
        if seat.fed == 0:
            seat.row = seat.request.row(self._drafter(seat.request))
        row = seat.row
        end = min(len(row.tokens), seat.fed + most)

        def show(alike: Sequence[int], first: int, logits: torch.Tensor) -> None:
            said = read(logits).entries
            assert said is not None
            row.drafter.read_prompt(row.tokens, first, said)

        logits = self._runner.prefill([row.tokens[:end]], seat.cache, show if row.drafter.reads else None)  # [1, V]
        seat.fed = end
        if end < len(row.tokens):
            seat.seconds += perf_counter() - start
            return
        token = row.open(logits, read(logits, likeliest=False).picks)
        seat.seconds += perf_counter() - start
        self._join(seat)
        self._engine.drop_finished()  # the first token may have been the last
        self._tell(seat, Step(0, [token], ["prefill"], end, seat.seconds))

    def _join(self, seat: Seat) -> None:
        self._opening.remove(seat)
        self._seats[seat.row] = seat
        self._make_room(seat.fed)
        self._cache.take(seat.cache)
        self._engine.rows.append(seat.row)

    def _step(self) -> None:
        rows = list(self._engine.rows)
        try:
            self._make_room()
            if self._cost is not None:
                self._cost.resize(len(rows))
            steps = self._engine.step()
        except Exception as problem:  # noqa: BLE001 - likewise; and who knows what the cache holds now
            self._end_rows(problem)
            return
        for row, step in zip(rows, steps, strict=True):
            if step.tokens:  # also of a row that then failed
                self._tell(self._seats[row], step)
            else:
                self._end(self._seats[row], row.problem)

    def _end_rows(self, problem: BaseException) -> None:
        rows, self._engine.rows = self._engine.rows, []
        for row in rows:
            self._end(self._seats[row], problem)

    def _make_room(self, joining: int = 0) -> None:
        """Before the cache would grow by itself, which knows nothing of limits; `joining` tokens are about to come."""
        cache, needs = self._cache, [seat.request.need for seat in self._seats.values()]
        longest = max(joining, *cache.lengths)
        capacity = replace(self.capacity, sizing=cache.sizing)  # of what holds the rows now
        if not capacity.suffices(cache.room, needs, longest):
            cache.reserve(*capacity.room(needs, longest))

    def _tell(self, seat: Seat, step: Step) -> None:
        try:
            seat.handle.tell(step, 0.0 if step.index == 0 else self._runner.forward_s)
        except Exception as problem:  # noqa: BLE001 - on_step is the user's
            self._end(seat, problem)
            return
        if seat.row.done:
            self._end(seat, seat.row.problem or seat.request.output(seat.row))

    def _end(self, seat: Seat, result: Output | BaseException | None) -> None:
        """Let a request go; see `Handle.end` for the result."""
        if seat in self._opening:
            self._opening.remove(seat)
        else:
            del self._seats[seat.row]
            seat.row.done = True
            self._engine.drop_finished()
            if not self._engine.rows:
                self._cache.reset()
        seat.handle.end(result)
