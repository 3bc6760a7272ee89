"""The loop. It reads like the paper: grow a tree, one forward pass, walk, learn, keep the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch

from lade.decoding.joint import JointBudget
from lade.decoding.kernels import Ints
from lade.decoding.readout import best_tokens, read
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
        picks = best_tokens(logits[:, None])  # [B, 1]
        tokens = [row.open(*said) for row, *said in zip(self.rows, logits[:, None], picks, strict=True)]
        seconds = perf_counter() - start
        self.drop_finished()
        return self._report([Step(0, [new], ["prefill"], size, seconds) for new, size in zip(tokens, fed, strict=True)])

    def _show_prompt(self, alike: Sequence[int], start: int, logits: torch.Tensor) -> None:
        said = read(logits)[1]
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
        picks, best = self._read(logits)
        return [
            self._walk(row, tree, logits[place, : len(tree)], picks[place], None if best is None else best[place])
            for place, (row, tree) in enumerate(zip(self.rows, trees, strict=True))
        ]

    def _read(self, logits: torch.Tensor) -> tuple[list[list[int]], Ints | None]:
        """What rows want to know of the logits `[B, S, V]`: the one place where a step waits for the device.

        Returns:
            `[B, S]`, the argmax at each node, and `[B, S, WIDTH]`, see `read`, if a drafter asks for them.
        """
        if not any(row.drafter.reads for row in self.rows):
            return best_tokens(logits), None
        rows, size, _ = logits.shape
        picks, best = read(logits.flatten(0, 1))  # [B * S], [B * S, WIDTH]
        return [picks[first : first + size] for first in range(0, rows * size, size)], best.reshape(rows, size, -1)

    def _walk(self, row: Row, tree: TokenTree, logits: torch.Tensor, picks: list[int], best: Ints | None) -> Verdict:
        """Verify one row's tree, given the logits `[S, V]` of its nodes, and what was read of them."""
        try:
            verdict = walk(tree, row.chooser.open(logits, picks, row.tokens), row.emit)
        except Exception as problem:
            if not self.isolate:
                raise
            row.fail(problem)
            return Verdict([ROOT], [], [], done=True)
        row.learn(picks, best if row.drafter.reads else None, verdict)
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
