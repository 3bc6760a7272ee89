"""The loop. It reads like the paper: grow a tree, one forward pass, walk, learn, keep the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch

from lade.decoding.joint import JointBudget
from lade.decoding.readout import best_tokens, read, read_rows
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
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

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
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
        rows: those that have not ended.
        runner: runs the model.
        cache: of these rows.
        stats: is added to.
        budget: that the rows share, if they do.
    """

    rows: list[Row]
    runner: Runner[CacheT]
    cache: CacheT
    stats: Stats
    budget: JointBudget | None = None

    def run(self) -> Iterator[list[Step]]:
        """Prefill, then step after step; each yields one `Step` for every row that took part.

        A consumer may stop at any step: tokens and cache agree whenever this generator is suspended.
        """
        yield self._prefill()
        index = 0
        while self.rows:
            index += 1
            yield self._step(index)

    def _prefill(self) -> list[Step]:
        start = perf_counter()
        fed = [len(row.tokens) - self.cache.lengths[0] for row in self.rows]
        watch = self._show_prompt if any(row.drafter.reads for row in self.rows) else None
        logits = self.runner.prefill([row.tokens for row in self.rows], self.cache, watch)  # [B, V]
        picks = best_tokens(logits[:, None])  # [B, 1]
        tokens = []
        for row, row_logits, row_picks in zip(self.rows, logits[:, None], picks, strict=True):
            tokens.append(row.chooser.open(row_logits, row_picks, row.tokens)(0))
            row.emit(tokens[-1])
            row.begin()
        seconds = perf_counter() - start
        self._drop_finished()
        return self._report([Step(0, [new], ["prefill"], size, seconds) for new, size in zip(tokens, fed, strict=True)])

    def _show_prompt(self, alike: Sequence[int], start: int, logits: torch.Tensor) -> None:
        said = read(logits)[1]
        for row in (self.rows[number] for number in alike):
            row.drafter.read_prompt(row.tokens, start, said)

    def _step(self, index: int) -> list[Step]:
        start = perf_counter()
        trees = self._grow()
        logits = self.runner.forward(trees, [row.tokens for row in self.rows], self.cache)  # [B, S, V]
        verdicts = []
        said = read_rows(logits, [len(tree) for tree in trees], [row.drafter.reads for row in self.rows])
        for row, tree, row_logits, (picks, best) in zip(self.rows, trees, logits, said, strict=True):
            verdict = walk(tree, row.chooser.open(row_logits[: len(tree)], picks, row.tokens), row.emit)
            row.learn(picks, best, verdict)
            verdicts.append(verdict)
        self.cache.keep([verdict.path for verdict in verdicts], fed=logits.shape[1])
        seconds = perf_counter() - start
        self._observe(logits.shape[1], verdicts, seconds)
        self._drop_finished()
        return self._report(self._steps(index, trees, verdicts, seconds), self.runner.forward_s)

    def _grow(self) -> list[TokenTree]:
        rooms = [self.runner.room(cached) for cached in self.cache.lengths]
        if self.budget is not None:
            self.budget.decide([row.look(room) for row, room in zip(self.rows, rooms, strict=True)])
        return [row.grow(room) for row, room in zip(self.rows, rooms, strict=True)]

    def _observe(self, fed: int, verdicts: Sequence[Verdict], seconds: float) -> None:
        """Tell whoever decides about sizes what a pass took and yielded; its largest tree had `fed` nodes."""
        for row in self.rows:
            row.drafter.observe(seconds, self.runner.forward_s)
        if self.budget is not None:
            emitted = sum(len(verdict.tokens) for verdict in verdicts) / len(verdicts)
            self.budget.passed(fed, emitted, seconds, self.runner.forward_s)

    @staticmethod
    def _steps(index: int, trees: list[TokenTree], verdicts: list[Verdict], seconds: float) -> list[Step]:
        return [Step(index, v.tokens, v.sources, len(t), seconds) for t, v in zip(trees, verdicts, strict=True)]

    def _drop_finished(self) -> None:
        """Finished rows leave the batch: they cost nothing any more. The last ones stay, for who wants the cache."""
        alive = [i for i, row in enumerate(self.rows) if not row.done]
        if alive and len(alive) < len(self.rows):
            self.cache.batch_select_indices(torch.tensor(alive))
        self.rows = [self.rows[i] for i in alive]

    def _report(self, steps: list[Step], forward_s: float = 0.0) -> list[Step]:
        self.stats.add(*steps, forward_s=forward_s)
        return steps
