"""Lock-step decoding: rows emit one token each at a time while their trees run ahead.

Which tokens are emitted is decided by the caller, for all rows at once, so that whatever decides sees the rows as plain
decoding shows them: equally long. Here its requests are served: a token a row comes in, the logits after it go out.

    text, decided by the caller      known ahead of it            fed by the next pass
    row 0   Once upon a time ──────┬ there ── was ── a ────────── little ─┬─ girl
                                   └ ,                                    └─ boy
    row 1   It was a dark and ───── (nothing)                     stormy ─┬─ night
                                                                          └─ day

A pass is needed as soon as one row lacks the logits after its text. The others then use it to look further ahead, from
where the argmax leads to; so where the caller takes what the model finds likeliest, each row needs as many passes as it
would need alone, and the batch as many as its slowest row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from lade.clock import Clock, Duration
from lade.decoding.beams.logits import BeamCache
from lade.decoding.beams.tree import Branches
from lade.decoding.drafting.batch_budget import BatchBudget
from lade.decoding.drafting.drafter import Candidates, Draft, Drafter
from lade.decoding.loop import PromptLogitsHook, prompt_hook
from lade.decoding.readout import Readout, read
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import walk
from lade.stats import Stats, Step

MOST_HELD = 64
"""Nodes in the cache that are no text yet; a row that has more of them waits for the others."""


class LockStepRow:
    """State of one row.

    Which token comes next is decided elsewhere, from the logits after the text. Where these were computed ahead of
    time, no pass is needed. A pass feeds a draft of what may follow the tokens that the argmax leads to.

    Args:
        prompt: ids, at least one.
        drafter: guesses the tokens to come.
        padding: what is emitted once the row has ended; None where it writes on.
        ends: ids after which padding is expected.
        source: text that drafters read before the prompt, see `lade.decoding.row.Row`.

    Attributes:
        tokens: prompt and output, padding included.
        drafter: guesses the tokens to come.
        ended: whether only padding follows.
        branches: the tree; its first nodes, `seen` of them, are in the cache.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        drafter: Drafter,
        padding: int | None,
        ends: Collection[int],
        source: Sequence[int] = (),
    ) -> None:
        self.tokens, self.drafter, self.ended = list(prompt), drafter, False
        self.branches = Branches.of(prompt)
        self._padding, self._ends = padding, frozenset(() if padding is None else ends)
        self._prompt_length, self._source = len(prompt), source
        self._node = ROOT  # that the text ends with
        self._ahead: list[int] = []  # tokens that are expected after the text, up to the root of what is fed
        self._root: int | None = None  # its node; None where nothing is fed
        self._depth: int | None = None  # levels that there may be below it
        self._over = False  # whether padding is expected below it
        self._draft: Draft | None = None

    @property
    def tree(self) -> TokenTree:
        """Nodes in the cache, and those that the next pass feeds."""
        return self.branches.tree

    @property
    def seen(self) -> int:
        """How many nodes a pass has seen."""
        return len(self.branches.follows)

    @property
    def wants_entries(self) -> bool:
        """Whether the likeliest tokens at each node are to be read in the next pass."""
        return self._draft is not None and self._draft.wants_entries

    @property
    def logits(self) -> torch.Tensor | None:
        """After the text, `[V]`; None where they are not known without a forward pass."""
        return self.branches.logits.get(self._node)

    def emit(self, token: int) -> str:
        """Append a token; returns the source that proposed it."""
        child = self.tree.child(self._node, token)
        source = "bonus" if child is None else self.tree.sources[child]
        child = self.tree.add(self._node, token, source)
        assert child is not None  # the tree itself has no greatest depth
        self._node = child
        self.tokens.append(token)
        if len(self.tokens) == self._prompt_length + 1:
            self.drafter.begin([*self._source, *self.tokens], len(self._source) + self._prompt_length)
        return source

    def end(self) -> None:
        """End, if padding is what follows; else the row writes on."""
        self.ended = self._padding is not None

    def prune(self) -> list[int]:
        """Drop what the text cannot get to any more; the nodes that stay in the cache, in their numbers before."""
        pruned = self.branches.prune([self._node])
        self._node = pruned.numbers[self._node]
        return pruned.kept

    def look_ahead(self, room: int | None) -> None:
        """Find where the next draft begins: after all that is known of the text.

        Args:
            room: how many levels there may be after the text; None for no limit.
        """
        node, self._root, self._draft = self._node, None, None
        self._ahead, self._over = [], self.ended
        while node in self.branches.logits:
            if len(self._ahead) == room:
                return
            token = self._expected(node)
            child = self.tree.child(node, token)
            if child is None and self.seen >= MOST_HELD:
                return
            self._ahead.append(token)
            self._over = self._over or token in self._ends
            child = self.tree.add(node, token, "bonus")
            assert child is not None
            node = child
        self._root, self._depth = node, None if room is None else room - len(self._ahead)

    def _expected(self, node: int) -> int:
        """What is expected to follow a node that was fed: the argmax, or padding."""
        if self._over and self._padding is not None:
            return self._padding
        return self.branches.follows[node][0][0]

    @property
    def drafts(self) -> bool:
        """Whether the drafter has anything to guess for the next pass."""
        return self._root is not None and not self._over

    def candidates(self) -> Candidates:
        """What the drafter could feed in the next pass."""
        return self.drafter.candidates(self.tokens + self._ahead, self._depth)

    def hang(self, draft: Draft) -> None:
        """Add a draft, whose root is a node already."""
        first = len(self.tree) - 1
        assert first == self._root
        for parent, token, source in zip(
            draft.tree.parents[1:], draft.tree.ids[1:], draft.tree.sources[1:], strict=True
        ):
            self.tree.add(first + parent, token, source)
        self._draft = draft

    def pad(self, count: int) -> None:
        """Add `count` nodes of padding, if that is what is expected."""
        node = self._root
        if not self._over or node is None or self._padding is None:
            return
        for _ in range(count if self._depth is None else min(count, self._depth)):
            node = self.tree.add(node, self._padding, "bonus")

    def learn(self, logits: torch.Tensor, readout: Readout) -> None:
        """Take what a forward pass gave.

        Args:
            logits: `[S, V]`, at the nodes that were not seen yet; further rows mean nothing.
            readout: what was read of them, with entries if the draft wants them.
        """
        count = len(self.tree) - self.seen
        self.branches.learn(logits[:count], [[(token, 0.0)] for token in readout.argmax_ids[:count]])
        if self._draft is not None:
            # As if the argmax were emitted; where it is not, the drafter has learned what will not come again.
            verdict = walk(self._draft.tree, readout.argmax_ids.__getitem__, lambda token: False)
            context = [*self.tokens, *self._ahead, *verdict.tokens]
            self.drafter.learn(context, self._draft, readout.rows(0, count), verdict)


CacheT = TypeVar("CacheT", bound=BeamCache)
CacheT_contra = TypeVar("CacheT_contra", bound=BeamCache, contravariant=True)


class LockStepRunner(Protocol[CacheT_contra]):
    """Runs the model; see `lade.decoding.loop.Runner`."""

    @property
    def clock(self) -> Clock:
        """Times passes."""
        ...

    @property
    def pass_time(self) -> Duration:
        """What the last pass spent in the model."""
        ...

    @property
    def refeeds(self) -> bool:
        """Whether `extend` feeds nodes again that the row ends with."""
        ...

    def room(self, cached: int) -> int | None:
        """How deep a tree may be whose root lies at position `cached`; None for no limit."""
        ...

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: CacheT_contra, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Feed rows of any length; logits of each row's last token, `[B, V]`."""
        ...

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: CacheT_contra) -> torch.Tensor:
        """Feed one tree a row, without its first nodes, `held[b]` of them: the row ends with these. `[B, S, V]`."""
        ...


class LockStepMeter:
    """Reports each forward pass to `stats` once it is known which tokens it served: when the next one begins.

    Args:
        stats: is added to.
        rows: B, the rows of the batch.
    """

    def __init__(self, stats: Stats, rows: int) -> None:
        self._stats, self._passes = stats, 0
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._sources: list[list[str]] = [[] for _ in range(rows)]
        self._fed: Sequence[int] = [0] * rows
        self._seconds = self._forward_s = 0.0

    @property
    def yielded(self) -> float:
        """Tokens that the mean row got since the last pass, of rows that got any."""
        counts = [len(tokens) for tokens in self._tokens if tokens]
        return sum(counts) / len(counts) if counts else 0.0

    def ran(self, fed: Sequence[int], seconds: float, forward_s: float) -> None:
        """A pass fed `fed[b]` tokens in row b and took `seconds`, of which the model took `forward_s`."""
        self._fed, self._seconds, self._forward_s = fed, seconds, forward_s

    def emitted(self, row: int, token: int, source: str) -> None:
        """A row got a token that is no padding."""
        self._tokens[row].append(token)
        self._sources[row].append(source)

    def end(self) -> None:
        """No further token is served by the last pass."""
        steps = [
            Step(self._passes, list(tokens), list(sources), max(1, fed), self._seconds)
            for tokens, sources, fed in zip(self._tokens, self._sources, self._fed, strict=True)
            if tokens
        ]
        if steps:
            self._stats.add(*steps, forward_s=self._forward_s)
        for tokens, sources in zip(self._tokens, self._sources, strict=True):
            tokens.clear()
            sources.clear()
        self._passes += 1


class LockStepLogits(Generic[CacheT]):
    """Gives the logits after the texts of B rows.

    Args:
        rows: none has been fed yet.
        runner: runs the model.
        cache: empty; it will hold text and tree of each row.
        stats: is added to; padding does not count.
        budget: one size for the trees of all rows; None if each row decides for itself.
    """

    def __init__(
        self,
        rows: Sequence[LockStepRow],
        runner: LockStepRunner[CacheT],
        cache: CacheT,
        stats: Stats,
        budget: BatchBudget | None = None,
    ) -> None:
        self.rows, self.runner, self.cache, self.budget = rows, runner, cache, budget
        self._meter = LockStepMeter(stats, len(rows))
        self._fed = 0  # slots that the last pass took after the longest row
        # What that pass fed, its step's seconds and the model's, until it is known what it yielded.
        self._last: tuple[int, float, float] | None = None
        self._held = [1] * len(rows)  # nodes that were in the cache before it; at first the root is the last token

    def prefill(self) -> torch.Tensor:
        """Run the prompts; the logits after them, `[B, V]`."""
        start = self.runner.clock.start()
        prompts = [row.tokens for row in self.rows]
        logits = self.runner.prefill(prompts, self.cache, prompt_hook(self.rows))  # [B, V]
        self._learn(logits[:, None])
        self._meter.ran([len(prompt) for prompt in prompts], self.runner.clock.since(start).wall_s, 0.0)
        return self._answer()

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits after the texts, `[B, V]`; they end with these tokens, which were emitted."""
        if any(row.logits is None for row in self.rows):
            self._pass()
        return self._answer()

    def emit(self, tokens: Sequence[int]) -> None:
        """Append its token to each row."""
        for number, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            source = row.emit(token)
            if not row.ended:
                self._meter.emitted(number, token, source)

    def end(self, ended: Sequence[bool]) -> None:
        """Which rows a criterion ends with the tokens that they have."""
        for row, has_ended in zip(self.rows, ended, strict=True):
            if has_ended:
                row.end()

    def report(self) -> None:
        """Report the last pass; no other may follow."""
        self._observe()
        self._meter.end()

    def _pass(self) -> None:
        """Draft after what is known of each row, and feed the drafts."""
        start = self.runner.clock.start()
        self._observe()
        self._meter.end()
        self.cache.keep([row.prune() for row in self.rows], self._fed, self._held)
        self._draft()
        trees, self._held = [row.tree for row in self.rows], [row.seen for row in self.rows]
        logits = self.runner.extend(trees, self._held, self.cache)  # [B, S, V]
        self._fed = logits.shape[1]
        known = [0] * len(trees) if self.runner.refeeds else self._held
        fed = [len(tree) - held for tree, held in zip(trees, known, strict=True)]
        self._learn(logits)
        took, pass_time = self.runner.clock.since(start), self.runner.pass_time
        self._meter.ran(fed, took.wall_s, pass_time.wall_s)
        forward_s = pass_time.undisturbed_s
        self._last = max(fed), forward_s + (took - pass_time).undisturbed_s, forward_s

    def _observe(self) -> None:
        """Have what decides about sizes learn what the last pass took and yielded: no further token is served by it."""
        if self.budget is not None and self._last is not None:
            fed, seconds, forward_s = self._last
            self.budget.observe_pass(fed, self._meter.yielded, seconds, forward_s, rows=len(self.rows))
        self._last = None

    def _draft(self) -> None:
        """Find the candidates of all rows first, so that they can be weighed together; padding fills what is left."""
        for row in self.rows:
            row.look_ahead(self.runner.room(len(row.tokens) - 1))
        drafting = [row for row in self.rows if row.drafts]
        candidates = [row.candidates() for row in drafting]
        if self.budget is not None:
            self.budget.decide([each.scores for each in candidates])
        for row, each in zip(drafting, candidates, strict=True):
            row.hang(each.draft())
        largest = max([len(row.tree) - row.seen for row in drafting], default=1)
        for row in self.rows:
            row.pad(largest - 1)

    def _learn(self, logits: torch.Tensor) -> None:
        """Hand out the logits `[B, S, V]` of a pass, read at once."""
        size = logits.shape[1]
        readout = read(logits.flatten(0, 1), wants_entries=any(row.wants_entries for row in self.rows))
        for place, row in enumerate(self.rows):
            row.learn(logits[place], readout.rows(place * size, size))

    def _answer(self) -> torch.Tensor:
        known = [row.logits for row in self.rows]
        return torch.stack([logits for logits in known if logits is not None])
