"""The loop. It reads like the paper: grow a tree, one forward pass, walk, learn, keep the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch
from torch.nn.functional import pad

from lade.decoding.joint import JointBudget
from lade.decoding.readout import Readout, read
from lade.decoding.row import Row
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict, walk
from lade.stats import Stats, Step


class Cache(Protocol):
    """Keys and values of B rows, each with a length of its own."""

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row."""
        ...

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the `fed` tokens that came last, keep in each row those of its path and drop the others."""
        ...

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place and its number."""
        ...

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        ...


CacheT = TypeVar("CacheT", bound=Cache)
CacheT_contra = TypeVar("CacheT_contra", bound=Cache, contravariant=True)


Watch = Callable[[Sequence[int], int, torch.Tensor], None]
"""Is shown rows that are alike, the number of a token in them, and logits `[T, V]` behind it and the T - 1 after it."""


class Runner(Protocol[CacheT_contra]):
    """Runs the model, with the kind of cache that suits it.

    Attributes:
        forward_s: seconds that the last call of `forward` spent in the model.
    """

    forward_s: float

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        ...

    def prefill(self, rows: Sequence[Sequence[int]], cache: CacheT_contra, watch: Watch | None = None) -> torch.Tensor:
        """Feed what is not cached yet of rows of any length; logits of each row's last token, `[B, V]`.

        Where a `watch` is given it may be shown the logits of tokens before, in pieces of bounded size. A cache that
        holds something has rows of equal length.
        """
        ...

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: CacheT_contra) -> torch.Tensor:
        """Feed one tree a row; logits of all nodes, `[B, S, V]`, S being the largest tree's size."""
        ...


@dataclass
class Engine(Generic[CacheT]):
    """Decodes the rows of one batch until their stop rules end them.

    Attributes:
        rows: those that have not ended; their order changes when one leaves.
        runner: runs the model.
        cache: of these rows.
        stats: is added to, if there are any.
        budget: that the rows share, if they do.
        isolate: whether an error that a row's processors or stop rules raise ends that row alone, which then has it as
            its `problem`; else it is raised.
    """

    rows: list[Row]
    runner: Runner[CacheT]
    cache: CacheT
    stats: Stats | None = None
    budget: JointBudget | None = None
    isolate: bool = False

    def run(self) -> Iterator[list[Step]]:
        """Prefill, then step after step; each yields one `Step` for every row that took part.

        A consumer may stop at any step: tokens and cache agree whenever this generator is suspended.
        """
        yield self.prefill()
        while self.rows:
            yield self.step()

    def prefill(self) -> list[Step]:
        """Feed the prompts of all rows, and choose the first token of each."""
        start = perf_counter()
        fed = [len(row.tokens) - self.cache.lengths[0] for row in self.rows]
        watch = self._show_prompt if any(row.drafter.reads for row in self.rows) else None
        logits = self.runner.prefill([row.tokens for row in self.rows], self.cache, watch)  # [B, V]
        picks = read(logits, likeliest=False).picks  # [B]
        tokens = [row.open(said, [pick]) for row, said, pick in zip(self.rows, logits[:, None], picks, strict=True)]
        seconds = perf_counter() - start
        self.drop_finished()
        return self._report([Step(0, [new], ["prefill"], size, seconds) for new, size in zip(tokens, fed, strict=True)])

    def _show_prompt(self, alike: Sequence[int], start: int, logits: torch.Tensor) -> None:
        said = read(logits).entries
        assert said is not None
        for row in (self.rows[number] for number in alike):
            row.drafter.read_prompt(row.tokens, start, said)

    def step(self) -> list[Step]:
        """Grow a tree for each row, feed them in one forward pass, walk, and let those leave that have ended."""
        start = perf_counter()
        trees = self._grow()
        logits = self.runner.forward(trees, [row.tokens for row in self.rows], self.cache)  # [B, S, V]
        verdicts = self._verify(trees, logits)
        self.cache.keep([verdict.path for verdict in verdicts], fed=logits.shape[1])
        seconds = perf_counter() - start
        self._observe(logits.shape[1], verdicts, seconds)
        indices = [row.steps for row in self.rows]
        self.drop_finished()
        steps = [
            Step(index, verdict.tokens, verdict.sources, len(tree), seconds)
            for index, verdict, tree in zip(indices, verdicts, trees, strict=True)
        ]
        return self._report(steps, self.runner.forward_s)

    def _grow(self) -> list[TokenTree]:
        rooms = [self.runner.room(cached) for cached in self.cache.lengths]
        if self.budget is not None:
            self.budget.decide([row.look(room) for row, room in zip(self.rows, rooms, strict=True)])
        return [row.grow(room) for row, room in zip(self.rows, rooms, strict=True)]

    def _verify(self, trees: Sequence[TokenTree], logits: torch.Tensor) -> list[Verdict]:
        views = [logits[place, : len(tree)] for place, tree in enumerate(trees)]
        ahead = [self._look_ahead(*each) for each in zip(self.rows, trees, views, strict=True)]
        said = self._read(logits, ahead)
        return [self._walk(*each) for each in zip(self.rows, trees, views, said, strict=True)]

    def _look_ahead(self, row: Row, tree: TokenTree, logits: torch.Tensor) -> torch.Tensor | None:
        """What a row's chooser can find on the device for all nodes at once; see `Chooser.look_ahead`."""
        try:
            return row.chooser.look_ahead(logits, tree.depths)
        except Exception as problem:
            if not self.isolate:
                raise
            row.fail(problem)
            return None

    def _read(self, logits: torch.Tensor, ahead: Sequence[torch.Tensor | None]) -> list[Readout]:
        """What rows want to know of the logits `[B, S, V]`: the one place where a step waits for the device."""
        size = logits.shape[1]
        choices: torch.Tensor | None = None
        if any(found is not None for found in ahead):
            nothing = logits.new_empty(0, dtype=torch.long)
            columns = [nothing if found is None else found for found in ahead]
            choices = torch.cat([pad(column, (0, size - len(column))) for column in columns])
        likeliest = any(row.drafter.reads for row in self.rows)
        said = read(logits.flatten(0, 1), choices, likeliest=likeliest)
        return said.split([found is not None for found in ahead])

    def _walk(self, row: Row, tree: TokenTree, logits: torch.Tensor, said: Readout) -> Verdict:
        """Verify one row's tree, given the logits `[S, V]` of its nodes, and what was read of them."""
        if row.done:  # looking ahead has failed
            return Verdict([ROOT], [], [], done=True)
        answers = said.picks if said.choices is None else said.choices
        try:
            verdict = walk(tree, row.chooser.open(logits, answers, row.tokens), row.emit)
        except Exception as problem:
            if not self.isolate:
                raise
            row.fail(problem)
            return Verdict([ROOT], [], [], done=True)
        row.learn(said.picks, said.entries if row.drafter.reads else None, verdict)
        return verdict

    def _observe(self, fed: int, verdicts: Sequence[Verdict], seconds: float) -> None:
        """Tell whoever decides about sizes what a pass took and yielded; its largest tree had `fed` nodes."""
        for row in self.rows:
            row.drafter.observe(seconds, self.runner.forward_s)
        if self.budget is not None:
            emitted = sum(len(verdict.tokens) for verdict in verdicts) / len(verdicts)
            self.budget.passed(fed, emitted, seconds, self.runner.forward_s)

    def drop_finished(self) -> None:
        """Finished rows leave the batch: they cost nothing any more. The last ones stay, for who wants the cache."""
        if all(row.done for row in self.rows):
            self.rows = []
        for place in reversed(range(len(self.rows))):
            if self.rows[place].done:
                self.cache.leave(place)
                self.rows[place] = self.rows[-1]
                self.rows.pop()

    def _report(self, steps: list[Step], forward_s: float = 0.0) -> list[Step]:
        if self.stats is not None:
            self.stats.add(*steps, forward_s=forward_s)
        return steps
