"""Lock-step decoding: rows emit one token each at a time while their trees run ahead.

The caller chooses the tokens for all rows at once, so that its processors and criteria see the rows as plain decoding
shows them: equally long. It passes one token per row, and gets the logits after it.

    text, chosen by the caller       known ahead of it            fed by the next pass
    row 0   Once upon a time ──────┬ there ── was ── a ────────── little ─┬─ girl
                                   └ ,                                    └─ boy
    row 1   It was a dark and ───── (nothing)                     stormy ─┬─ night
                                                                          └─ day

A pass is needed as soon as one row lacks the logits after its text. The others then use it to draft further ahead,
from where the argmax leads. So if the caller takes the likeliest tokens, each row needs as many passes as it would
need alone, and the batch as many as its slowest row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic

import torch

from lade.decoding.beams.logits import BranchRunner, CacheT, PassMeter
from lade.decoding.beams.tree import Branches, BranchRow
from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.drafter import Candidates, Draft, Drafter
from lade.decoding.loop import prompt_hook
from lade.decoding.readout import Readout, read
from lade.decoding.tree import ROOT
from lade.decoding.verify import walk
from lade.stats import Stats

MOST_HELD = 64
"""Maximum number of cached nodes ahead of the text; a row with more of them waits for the others."""


class LockStepRow(BranchRow):
    """State of one row.

    The caller chooses the next token from the logits after the text. Where these were computed ahead of time, no pass
    is needed. A pass feeds a draft of the continuation after the tokens that the argmax leads to.

    Once the row has ended, which is expected after the ids `ends`, `padding` is emitted; None if the row continues
    instead. For `source` see `lade.decoding.row.Row`.

    Attributes:
        tokens: prompt and output, padding included.
        ended: whether only padding follows.
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
        self._node = ROOT  # last node of the text
        self._ahead: list[int] = []  # expected tokens between the text and the draft, the draft's root included
        self._root: int | None = None  # node of the draft's root; None where nothing is fed
        self._depth: int | None = None  # maximum depth below it; None for no limit
        self._expects_padding = False  # below it
        self._draft: Draft | None = None

    @property
    def wants_entries(self) -> bool:
        """True if the next pass is to read the top tokens at each node."""
        return self._draft is not None and self._draft.wants_entries

    @property
    def logits(self) -> torch.Tensor | None:
        """Logits after the text, `[V]`; None if they need a forward pass."""
        return self.branches.logits.get(self._node)

    def emit(self, token: int) -> str:
        """Append a token; return the source that proposed it."""
        child = self.tree.child(self._node, token)
        source = "bonus" if child is None else self.tree.sources[child]
        child = self.tree.add(self._node, token, source)
        assert child is not None  # the tree has no `max_depth`
        self._node = child
        self.tokens.append(token)
        if len(self.tokens) == self._prompt_length + 1:
            self.drafter.begin([*self._source, *self.tokens], len(self._source) + self._prompt_length)
        return source

    def end(self) -> None:
        """End the row if padding follows; else it continues."""
        self.ended = self._padding is not None

    def prune(self) -> list[int]:
        """Drop nodes that the text cannot reach; return the nodes that stay in the cache, in the old numbering."""
        kept, numbers = self.branches.prune([self._node])
        self._node = numbers[self._node]
        return kept

    def look_ahead(self, room: int | None) -> None:
        """Find the root of the next draft: the end of the text's known continuation, at most `room` levels after it."""
        node, self._root, self._draft = self._node, None, None
        self._ahead, self._expects_padding = [], self.ended
        while node in self.branches.logits:
            if len(self._ahead) == room:
                return
            token = self._padding if self._expects_padding else None
            if token is None:
                token = self.branches.follows[node][0][0]  # the argmax
            child = self.tree.child(node, token)
            if child is None and self.seen >= MOST_HELD:
                return
            self._ahead.append(token)
            self._expects_padding = self._expects_padding or token in self._ends
            child = self.tree.add(node, token, "bonus")
            assert child is not None
            node = child
        self._root, self._depth = node, None if room is None else room - len(self._ahead)

    @property
    def drafts(self) -> bool:
        """True if there is anything for the drafter to propose in the next pass."""
        return self._root is not None and not self._expects_padding

    def candidates(self) -> Candidates:
        """Return the drafter's candidates for the next pass."""
        return self.drafter.candidates(self.tokens + self._ahead, self._depth)

    def add_draft(self, draft: Draft) -> None:
        """Add a draft to the tree, which has its root already."""
        first = len(self.tree) - 1
        assert first == self._root
        for parent, token, source in zip(
            draft.tree.parents[1:], draft.tree.ids[1:], draft.tree.sources[1:], strict=True
        ):
            self.tree.add(first + parent, token, source)
        self._draft = draft

    def pad(self, count: int) -> None:
        """Add `count` nodes of padding, if padding is expected."""
        node = self._root
        if not self._expects_padding or node is None or self._padding is None:
            return
        for _ in range(count if self._depth is None else min(count, self._depth)):
            node = self.tree.add(node, self._padding, "bonus")

    def learn(self, logits: torch.Tensor, readout: Readout) -> None:
        """Store the logits of a pass, `[S, V]`, padded after the nodes not seen before; learn from their readout."""
        count = len(self.tree) - self.seen
        self.branches.learn(logits[:count], [[(token, 0.0)] for token in readout.argmax_ids[:count]])
        if self._draft is not None:
            # As if the argmax were emitted; otherwise the drafter learns a continuation that is not taken.
            verdict = walk(self._draft.tree, readout.argmax_ids.__getitem__, lambda token: False)
            context = [*self.tokens, *self._ahead, *verdict.tokens]
            self.drafter.learn(context, self._draft, readout.rows(0, count), verdict)


class LockStepLogits(Generic[CacheT]):
    """Provides the logits after the texts of B rows, none of which has been fed yet; the cache is empty.

    The budget chooses one tree size for all rows; None if none of them needs that. Padding does not count in `stats`.
    """

    def __init__(
        self,
        rows: Sequence[LockStepRow],
        runner: BranchRunner[CacheT],
        cache: CacheT,
        stats: Stats,
        budget: Controller | None = None,
    ) -> None:
        self.rows, self.runner, self.cache, self.budget = rows, runner, cache, budget
        self._meter = PassMeter(stats, len(rows))
        self._fed = 0  # cache slots that the last pass took after the longest row
        # Tokens fed by that pass, its total and model seconds, and whether it did work that is done once, until its
        # yield is known.
        self._last: tuple[int, float, float, bool] | None = None
        self._held = [1] * len(rows)  # cached nodes before that pass; after prefill, the root alone

    def prefill(self) -> torch.Tensor:
        """Run the prompts; return the logits after them, `[B, V]`."""
        start = self.runner.clock.start()
        prompts = [row.tokens for row in self.rows]
        logits = self.runner.prefill(prompts, self.cache, prompt_hook(self.rows))  # [B, V]
        self._learn(logits[:, None])
        self._meter.record_pass([len(prompt) for prompt in prompts], self.runner.clock.since(start).wall_s, 0.0)
        return self._answer()

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits `[B, V]` after the texts, which end with these tokens, already emitted."""
        if any(row.logits is None for row in self.rows):
            self._pass()
        return self._answer()

    def emit(self, tokens: Sequence[int]) -> None:
        """Append its token to each row."""
        for number, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            source = row.emit(token)
            if not row.ended:
                self._meter.record_token(number, token, source)

    def end(self, ended: Sequence[bool]) -> None:
        """End the rows where a stopping criterion was met."""
        for row, has_ended in zip(self.rows, ended, strict=True):
            if has_ended:
                row.end()

    def report(self) -> None:
        """Report the last pass; call it once, at the end."""
        self._observe()
        self._meter.end()

    def _pass(self) -> None:
        """Draft after the known continuation of each row, and feed the drafts."""
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
        self._meter.record_pass(fed, took.wall_s, pass_time.wall_s)
        forward_s = pass_time.undisturbed_s
        self._last = max(fed), forward_s + (took - pass_time).undisturbed_s, forward_s, self.runner.prepared

    def _observe(self) -> None:
        """Report cost and yield of the last pass to the budget; it serves no further token."""
        if self.budget is not None and self._last is not None:
            fed, seconds, forward_s, prepared = self._last
            self.budget.observe(fed, self._meter.yielded, seconds, forward_s, rows=len(self.rows), prepared=prepared)
        self._last = None

    def _draft(self) -> None:
        """Collect all candidates before building any draft, so that a shared budget can compare them."""
        for row in self.rows:
            row.look_ahead(self.runner.room(len(row.tokens) - 1))
        drafting = [row for row in self.rows if row.drafts]
        candidates = [row.candidates() for row in drafting]
        if self.budget is not None:
            self.budget.decide([each.scores for each in candidates])
        for row, each in zip(drafting, candidates, strict=True):
            row.add_draft(each.draft())
        largest = max([len(row.tree) - row.seen for row in drafting], default=1)
        for row in self.rows:
            row.pad(largest - 1)

    def _learn(self, logits: torch.Tensor) -> None:
        """Read the logits `[B, S, V]` of a pass, and hand out the parts."""
        size = logits.shape[1]
        readout = read(logits.flatten(0, 1), wants_entries=any(row.wants_entries for row in self.rows))
        for place, row in enumerate(self.rows):
            row.learn(logits[place], readout.rows(place * size, size))

    def _answer(self) -> torch.Tensor:
        known = [row.logits for row in self.rows]
        return torch.stack([logits for logits in known if logits is not None])
