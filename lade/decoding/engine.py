"""The loop. It reads like the paper: grow a tree, one forward pass, walk, learn, keep the accepted path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch

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


class Runner(Protocol[CacheT_contra]):
    """Runs the model, with the kind of cache that suits it.

    Attributes:
        forward_s: seconds that the last call of `forward` spent in the model.
    """

    forward_s: float

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        ...

    def prefill(self, rows: Sequence[Sequence[int]], cache: CacheT_contra) -> torch.Tensor:
        """Feed what is not cached yet of rows of equal length; logits of the last token, `[B, V]`."""
        ...

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: CacheT_contra) -> torch.Tensor:
        """Feed one tree a row; logits of all nodes, `[B, S, V]`, S being the largest tree's size."""
        ...


@dataclass
class Engine(Generic[CacheT]):
    """Decodes the rows of one batch until their stop rules end them."""

    rows: list[Row]
    runner: Runner[CacheT]
    cache: CacheT
    stats: Stats

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
        fed = len(self.rows[0].tokens) - self.cache.lengths[0]
        logits = self.runner.prefill([row.tokens for row in self.rows], self.cache)  # [B, V]
        picks = best_tokens(logits[:, None])  # [B, 1]
        tokens = []
        for row, row_logits, row_picks in zip(self.rows, logits[:, None], picks, strict=True):
            tokens.append(row.chooser.open(row_logits, row_picks, row.tokens)(0))
            row.emit(tokens[-1])
            row.begin()
        seconds = perf_counter() - start
        self._drop_finished()
        return self._report([Step(0, [token], ["prefill"], fed, seconds) for token in tokens], 0.0)

    def _step(self, index: int) -> list[Step]:
        start = perf_counter()
        trees = [row.grow(self.runner.room(p)) for row, p in zip(self.rows, self.cache.lengths, strict=True)]
        logits = self.runner.forward(trees, [row.tokens for row in self.rows], self.cache)  # [B, S, V]
        picks = best_tokens(logits)  # [B, S]: the one host synchronisation of a step
        verdicts = []
        for row, tree, row_logits, row_picks in zip(self.rows, trees, logits, picks, strict=True):
            choose = row.chooser.open(row_logits, row_picks, row.tokens)
            verdict = walk(tree, choose, row.emit)
            row.learn(row_picks, verdict)
            verdicts.append(verdict)
        self.cache.keep([verdict.path for verdict in verdicts], fed=logits.shape[1])
        self._drop_finished()
        return self._report(self._steps(index, trees, verdicts, perf_counter() - start), self.runner.forward_s)

    @staticmethod
    def _steps(index: int, trees: list[TokenTree], verdicts: list[Verdict], seconds: float) -> list[Step]:
        return [Step(index, v.tokens, v.sources, len(t), seconds) for t, v in zip(trees, verdicts, strict=True)]

    def _drop_finished(self) -> None:
        """Finished rows leave the batch: they cost nothing any more. The last ones stay, for who wants the cache."""
        alive = [i for i, row in enumerate(self.rows) if not row.done]
        if alive and len(alive) < len(self.rows):
            self.cache.batch_select_indices(torch.tensor(alive))
        self.rows = [self.rows[i] for i in alive]

    def _report(self, steps: list[Step], forward_s: float) -> list[Step]:
        for step in steps:
            self.stats.add(step, forward_s=forward_s)
        return steps


def best_tokens(logits: torch.Tensor) -> list[list[int]]:
    """Argmax over the last dimension, as plain decoding finds it: on float32, where float64 may have ties.

    Args:
        logits: `[B, S, V]` in any floating dtype.

    Returns:
        `[B, S]` ids.
    """
    if logits.dtype == torch.float64:
        logits = logits.float()
    picks: list[list[int]] = logits.argmax(dim=-1).tolist()
    return picks
