"""The decoding loop, which reads like the paper: draft, forward, verify, learn, keep.

    draft     each row's drafter proposes a tree of tokens that may follow
    forward   one forward pass of the model over the trees of all rows
    verify    in each tree, walk along the tokens that the model itself chooses: these are accepted
    learn     drafters learn from the model's choices at all nodes, accepted or not
    keep      the KV cache keeps the accepted paths and drops all other nodes

`DecodeLoop.step` is these five lines; the code around them keeps tokens and cache consistent when one of them fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch.nn.functional import pad

from lade.clock import Clock, Duration
from lade.decoding.drafting.controller import Controller, common_progress
from lade.decoding.mtp import BatchDrafter, DraftedRow
from lade.decoding.readout import Readout, read
from lade.decoding.row import Row, RowStep
from lade.decoding.tree import TokenTree
from lade.stats import Stats, Step


class KVCache(Protocol):
    """Keys and values of B rows of different lengths."""

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each row, `[B]`."""

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep the tokens on each row's path, out of its last `fed` ones, and drop the others."""

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its place."""


CacheT = TypeVar("CacheT", bound=KVCache)
CacheT_contra = TypeVar("CacheT_contra", bound=KVCache, contravariant=True)


Texts = Sequence[Sequence[int]]
"""Token ids of several rows or prompts."""
PromptLogitsHook = Callable[[Sequence[int], int, torch.Tensor], None]
"""Called with `(rows, start, logits)`: indices of the rows that share a prompt, and the logits `[T, V]` of its tokens
from index `start` on."""


class PromptRunner(Protocol[CacheT_contra]):
    """Runs the model's forward passes over prompts on the type of cache that it needs; base of all runners."""

    @property
    def clock(self) -> Clock:
        """Clock that times the passes."""

    @property
    def pass_time(self) -> Duration:
        """Time spent in the model by the last pass over trees."""

    @property
    def prepared(self) -> bool:
        """Whether the last pass over trees did work that is done once, such as capturing a graph."""

    def room(self, cached: int) -> int | None:
        """Return how deep a tree may be whose root is at position `cached`; None for no limit."""

    def prefill(self, rows: Texts, cache: CacheT_contra, hook: PromptLogitsHook | None = None) -> torch.Tensor:
        """Feed the tokens that are not cached yet, of rows of any length; return the logits after each row, `[B, V]`.

        `hook` may be called with the logits of the prompt tokens, in chunks of bounded size. If the cache is not empty,
        all rows have the same length.
        """


class Runner(PromptRunner[CacheT_contra], Protocol[CacheT_contra]):
    """Runs passes over trees of which nothing is cached yet."""

    def forward(self, trees: Sequence[TokenTree], rows: Texts, cache: CacheT_contra) -> torch.Tensor:
        """Feed one tree per row; return the logits of all nodes, `[B, S, V]`, S being the size of the largest tree."""


class Reader(Protocol[CacheT_contra]):
    """Makes a runner's passes without returning the logits, which are reduced on the device that holds them."""

    def readouts(
        self, trees: Sequence[TokenTree], rows: Texts, cache: CacheT_contra, *, wants_entries: bool
    ) -> list[Readout]:
        """Feed one tree per row; return a readout of each tree's logits."""


@dataclass
class DecodeLoop(Generic[CacheT]):
    """Decodes the rows of one batch until their stop rules end them.

    Attributes:
        rows: the unfinished rows; their order changes when one leaves.
        runner, cache: runs the model on the keys and values of these rows.
        stats: figures to add to; None for none.
        budget: chooses one tree size for all rows; None if none of them needs that.
        waits_for_all: whether the caller waits for the slowest row; otherwise `budget` goes by the mean row.
        isolate: let an error raised by a row's processors or stop rules end that row alone, as its `problem`. Otherwise
            it ends the step, and `run` raises it.
        reader: makes the passes in which all rows are greedy; None to use `runner`.
        leaving: called with each finished row and its index in the cache, before the cache drops it.
        mtp: passes of the checkpoint's MTP layer, if there is one.
        settled: `[B]`, number of cached tokens of each row that are certainly text. An interrupted forward pass may
            leave more in some layers or all, which must be dropped before the cache is used again.
    """

    rows: list[Row]
    runner: Runner[CacheT]
    cache: CacheT
    stats: Stats | None = None
    budget: Controller | None = None
    waits_for_all: bool = False
    isolate: bool = False
    reader: Reader[CacheT] | None = None
    leaving: Callable[[Row, int], None] | None = None
    mtp: BatchDrafter = field(default_factory=BatchDrafter)
    settled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.settled = list(self.cache.lengths)

    def run(self) -> Iterator[list[Step]]:
        """Prefill, then decode step by step; yield one `Step` for every row that took part.

        The consumer may stop at any step: tokens and cache are consistent whenever this generator is suspended. If it
        raises, the first `settled` tokens of the cache are text: as in plain decoding, all from which tokens were
        chosen, unless the forward pass itself was interrupted.
        """
        yield self.prefill()
        while self.rows:
            rows = list(self.rows)
            if steps := [step for step in self.step() if step.tokens]:
                yield steps  # before any error is raised, since these tokens were emitted
            _raise_problem(rows)

    def prefill(self) -> list[Step]:
        """Feed the prompts of all rows and choose the first token of each."""
        start = self.runner.clock.start()
        cached = self.cache.lengths[0]
        fed = [len(row.tokens) - cached for row in self.rows]
        texts, hook = [row.tokens for row in self.rows], prompt_hook(self.rows)
        with self.mtp.reading(self.rows):
            logits = self.runner.prefill(texts, self.cache, hook)  # [B, V]
        self.settled = list(self.cache.lengths)
        ids = read(logits, wants_entries=False).argmax_ids  # [B]
        tokens = [row.choose_first(logits[place : place + 1], [ids[place]]) for place, row in enumerate(self.rows)]
        seconds = self.runner.clock.since(start).wall_s
        self.drop_finished()
        steps = [Step(0, [token], ["prefill"], size, seconds) for token, size in zip(tokens, fed, strict=True)]
        self._report(steps, 0.0)
        return steps

    def step(self) -> list[Step]:
        """Draft, forward, verify, learn, keep; then drop the rows that have ended.

        Returns:
            One step per row, without tokens if the walk failed at its first node.
        """
        start = self.runner.clock.start()
        self.settled = list(self.cache.lengths)
        parts, fed = self._draft(), 0
        try:
            trees, texts = [part.draft.tree for part in parts], [part.row.tokens for part in parts]
            with self.mtp.watching():
                if self.reader is not None and all(row.is_greedy for row in self.rows):
                    wants_entries = any(part.draft.wants_entries for part in parts)
                    readouts = self.reader.readouts(trees, texts, self.cache, wants_entries=wants_entries)
                    fed = max(map(len, trees))
                else:
                    readouts, logits = None, self.runner.forward(trees, texts, self.cache)  # [B, S, V]
                    fed = logits.shape[1]
            if readouts is None:
                self._choose(parts, logits, fed)
            else:
                for part, readout in zip(parts, readouts, strict=True):
                    part.readout = readout
            self._verify(parts)
            self._learn(parts)
        finally:  # also after an error: drop the rejected nodes, report the emitted tokens
            if fed:
                self._keep(parts, fed)
                self.mtp.accept(parts, fed)
            took = self.runner.clock.since(start)
            steps = [part.report(took.wall_s) for part in parts]
            if emitted := [step for step in steps if step.tokens]:
                self._report(emitted, self.runner.pass_time.wall_s)
        self._observe(steps, fed, took)
        self.drop_finished()
        return steps

    def _draft(self) -> list[RowStep]:
        """Collect the candidates of all rows before building any draft, so that a shared budget can compare them."""
        depths = [self.runner.room(cached) for cached in self.settled]
        self.mtp.draft(self.rows, depths)
        candidates = [row.drafter.candidates(row.tokens, depth) for row, depth in zip(self.rows, depths, strict=True)]
        if self.budget is not None:
            emitted = [row.emitted for row in self.rows] if self.waits_for_all else None
            self.budget.decide([each.scores for each in candidates], emitted)
        for row in self.rows:
            row.steps += 1
            if row.drafter.problem is not None:
                row.fail(row.drafter.problem)
        return [RowStep(row, each.draft()) for row, each in zip(self.rows, candidates, strict=True)]

    def _choose(self, parts: Sequence[RowStep], logits: torch.Tensor, fed: int) -> None:
        """Choose at all nodes at once where the chooser can, and read the logits `[B, S, V]`, S being `fed`."""
        for place, part in enumerate(parts):
            if not part.row.is_greedy:
                size = len(part.draft.tree)
                part.logits = logits[place] if size == fed else logits[place, :size]
                part.choose_all()
        if any(part.draft.teaches or part.choices is not None or part.row.is_greedy for part in parts):
            _read(parts, logits)

    def _verify(self, parts: Sequence[RowStep]) -> None:
        """Walk the rows' trees in turn, up to the first error unless rows are isolated."""
        for part in parts:
            if part.row.problem is None:
                part.walk()
            if part.row.problem is not None and not self.isolate:
                return

    def _learn(self, parts: Sequence[RowStep]) -> None:
        for part in parts:
            if part.row.problem is None and part.verdict.tokens:  # without tokens the walk never began
                part.row.drafter.learn(part.row.tokens, part.draft, part.readout, part.verdict)

    def _keep(self, parts: Sequence[RowStep], fed: int) -> None:  # tests of faults patch it
        self.cache.keep([part.verdict.path for part in parts], fed)
        self.settled = list(self.cache.lengths)

    def _observe(self, steps: Sequence[Step], fed: int, took: Duration) -> None:
        """Report cost and yield of a step to the size controllers; its largest tree had `fed` nodes."""
        pass_time = self.runner.pass_time
        forward_s = pass_time.undisturbed_s
        seconds = forward_s + (took - pass_time).undisturbed_s
        without_mtp_s = max(forward_s, seconds - self.mtp.spent_s)
        for row, step in zip(self.rows, steps, strict=True):
            row.drafter.observe(len(step.tokens), seconds)
        if self.budget is not None:
            times, prepared = (without_mtp_s, forward_s), self.runner.prepared
            self.budget.observe(fed, self._progress(steps), *times, rows=len(steps), prepared=prepared)
        self.mtp.observe(steps, seconds)

    def _progress(self, steps: Sequence[Step]) -> float:
        """Return the tokens that a step has brought: to the mean row, or to a call that waits for all of them."""
        if not self.waits_for_all:
            return sum(len(step.tokens) for step in steps) / len(steps)
        emitted = [row.emitted for row in self.rows]
        before = [count - len(step.tokens) for count, step in zip(emitted, steps, strict=True)]
        return common_progress(emitted) - common_progress(before)

    def _report(self, steps: Sequence[Step], forward_s: float) -> None:
        if self.stats is not None:
            self.stats.add(*steps, forward_s=forward_s)

    def drop_finished(self) -> None:
        """Drop finished rows from the batch. The last ones stay in the cache for its owner."""
        if not any(row.done for row in self.rows):
            return
        for place, row in enumerate(self.rows):
            if row.done:
                row.drafter.end()
                self.mtp.leave(row)
                if self.leaving is not None:
                    self.leaving(row, place)
        if all(row.done for row in self.rows):
            self.rows = []
        for row in [row for row in reversed(self.rows) if row.done]:
            self.remove(row)

    def remove(self, row: Row) -> None:
        """Remove a row, finished or not; the last one takes its place."""
        place = self.rows.index(row)
        self.mtp.leave(row)
        self.cache.leave(place)
        self.rows[place] = self.rows[-1]
        self.rows.pop()


def prompt_hook(rows: Sequence[DraftedRow]) -> PromptLogitsHook | None:
    """Return a hook that teaches the drafters their prompts; None if none of them wants to learn."""
    if not any(row.drafter.wants_prompt_entries for row in rows):
        return None

    def learn(same_prompt: Sequence[int], start: int, logits: torch.Tensor) -> None:
        entries = read(logits).entries
        assert entries is not None
        for row in (rows[number] for number in same_prompt):
            if row.drafter.wants_prompt_entries:
                row.drafter.learn_prompt(row.tokens, start, entries)

    return learn


def _read(parts: Sequence[RowStep], logits: torch.Tensor) -> None:
    """Read what the rows need of the logits `[B, S, V]`: the only place where a step waits for the device."""
    if len(parts) == 1:
        (part,) = parts
        part.readout = read(logits, part.choices, wants_entries=part.draft.wants_entries)
        return
    size, choices = logits.shape[1], None
    if any(part.choices is not None for part in parts):
        none = logits.new_empty(0, dtype=torch.long)
        columns = [none if part.choices is None else part.choices for part in parts]
        choices = torch.cat([pad(column, (0, size - len(column))) for column in columns])  # [B * S]
    readout = read(logits, choices, wants_entries=any(part.draft.wants_entries for part in parts))
    for place, part in enumerate(parts):
        part.readout = readout.rows(place * size, len(part.draft.tree))


def _raise_problem(rows: Sequence[Row]) -> None:
    """Raise the error that ended one of these rows, if any."""
    for row in rows:
        if row.problem is not None:
            try:
                raise row.problem
            finally:
                row.problem = None  # breaks a reference cycle through the traceback, which would keep the cache alive
