"""The loop. It reads like the paper: grow a tree, one forward pass, walk, learn, keep the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import torch
from torch.nn.functional import pad

from lade.decoding.drafting.batch_budget import JointBudget
from lade.decoding.readout import Readout, read
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict, walk
from lade.stats import Stats, Step


class KVCache(Protocol):
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


CacheT = TypeVar("CacheT", bound=KVCache)
CacheT_contra = TypeVar("CacheT_contra", bound=KVCache, contravariant=True)


PromptLogitsHook = Callable[[Sequence[int], int, torch.Tensor], None]
"""Called with `(rows, start, logits)`: numbers of the rows that share a prompt, and the logits `[T, V]` of its tokens
from number `start` on."""


class Runner(Protocol[CacheT_contra]):
    """Runs the model, with the kind of cache that suits it.

    Attributes:
        forward_s: seconds that the last call of `forward` spent in the model.
    """

    forward_s: float

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        ...

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: CacheT_contra, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed what is not cached yet of rows of any length; logits of each row's last token, `[B, V]`.

        A `hook` may be called with the logits of tokens before, in pieces of bounded size. A cache that
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
        isolate: whether an error that a row's processors or stop rules raise ends that row alone; the row then has it
            as its `problem`. Else it ends the step, and `run` raises it.
        settled: `[B]`, how many tokens of each row in the cache are certainly text. After an interrupted pass some
            layers or all hold more, which has to be dropped before the cache is used again.
    """

    rows: list[Row]
    runner: Runner[CacheT]
    cache: CacheT
    stats: Stats | None = None
    budget: JointBudget | None = None
    isolate: bool = False
    settled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.settled = list(self.cache.lengths)

    def run(self) -> Iterator[list[Step]]:
        """Prefill, then step after step; each yields one `Step` for every row that took part.

        A consumer may stop at any step: tokens and cache agree whenever this generator is suspended. When it raises,
        the first `settled` tokens of the cache are text: as in plain decoding all from which tokens were chosen, unless
        the pass itself was interrupted.
        """
        yield self.prefill()
        while self.rows:
            rows = list(self.rows)
            if steps := [step for step in self.step() if step.tokens]:
                yield steps  # before an error, too: these tokens were emitted
            _raise_problem(rows)

    def prefill(self) -> list[Step]:
        """Feed the prompts of all rows, and choose the first token of each."""
        start = perf_counter()
        fed = [len(row.tokens) - self.cache.lengths[0] for row in self.rows]
        watch = self._show_prompt if any(row.drafter.reads for row in self.rows) else None
        logits = self.runner.prefill([row.tokens for row in self.rows], self.cache, watch)  # [B, V]
        self.settled = list(self.cache.lengths)
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
        """Grow a tree for each row, feed them in one forward pass, walk, and let those leave that have ended.

        Returns:
            One for each row, without tokens where the walk failed at its first node.
        """
        start = perf_counter()
        trees, verdicts, fed = self._grow(), [Verdict() for _ in self.rows], 0
        self.settled = list(self.cache.lengths)
        try:
            logits = self.runner.forward(trees, [row.tokens for row in self.rows], self.cache)  # [B, S, V]
            fed = logits.shape[1]
            self._verify(trees, logits, verdicts)
        finally:  # after any error, too: drop what was not accepted, report what was emitted
            if fed:
                self._keep(verdicts, fed)
            seconds = perf_counter() - start
            steps = self._steps(trees, verdicts, seconds)
        self._observe(fed, verdicts, seconds)
        self.drop_finished()
        return steps

    def _keep(self, verdicts: Sequence[Verdict], fed: int) -> None:
        self.cache.keep([verdict.path for verdict in verdicts], fed)
        self.settled = list(self.cache.lengths)

    def _steps(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], seconds: float) -> list[Step]:
        """One for each row; those that emitted tokens are reported."""
        steps = [
            Step(row.steps, verdict.tokens, verdict.sources, len(tree), seconds)
            for row, tree, verdict in zip(self.rows, trees, verdicts, strict=True)
        ]
        if emitted := [step for step in steps if step.tokens]:
            self._report(emitted, self.runner.forward_s)
        return steps

    def _grow(self) -> list[TokenTree]:
        rooms = [self.runner.room(cached) for cached in self.cache.lengths]
        if self.budget is not None:
            self.budget.decide([row.look(room) for row, room in zip(self.rows, rooms, strict=True)])
        return [row.grow(room) for row, room in zip(self.rows, rooms, strict=True)]

    def _verify(self, trees: Sequence[TokenTree], logits: torch.Tensor, verdicts: Sequence[Verdict]) -> None:
        """Walk through the rows' trees, one after the other, up to the first error unless rows are isolated."""
        views = [logits[place, : len(tree)] for place, tree in enumerate(trees)]
        ahead = [self._look_ahead(*each) for each in zip(self.rows, trees, views, strict=True)]
        said = self._read(logits, ahead)
        for row, tree, view, readout, verdict in zip(self.rows, trees, views, said, verdicts, strict=True):
            if row.problem is None:
                self._walk(row, tree, view, readout, verdict)
            if row.problem is not None and not self.isolate:
                return

    def _look_ahead(self, row: Row, tree: TokenTree, logits: torch.Tensor) -> torch.Tensor | None:
        """What a row's chooser can find on the device for all nodes at once; see `Chooser.look_ahead`."""
        try:
            return row.chooser.look_ahead(logits, tree.depths)
        except Exception as problem:  # noqa: BLE001 - the row has it
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

    def _walk(self, row: Row, tree: TokenTree, logits: torch.Tensor, said: Readout, verdict: Verdict) -> None:
        """Verify one row's tree, given the logits `[S, V]` of its nodes, and what was read of them."""
        answers = said.picks if said.choices is None else said.choices
        try:
            walk(tree, row.chooser.open(logits, answers, row.tokens), row.emit, verdict)
        except Exception as problem:  # noqa: BLE001 - likewise
            row.fail(problem)
        else:
            row.learn(said.picks, said.entries if row.drafter.reads else None, verdict)

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


def _raise_problem(rows: Sequence[Row]) -> None:
    """Raise the error that ended one of these rows, if one did."""
    for row in rows:
        if row.problem is not None:
            try:
                raise row.problem
            finally:
                row.problem = None  # its traceback knows the row: together they would keep the cache until collected
