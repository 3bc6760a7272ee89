"""One row of a batch that emits in lock-step: its text, and a token tree that runs ahead of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from lade.decoding.beams.tree import Branches
from lade.decoding.drafting.drafter import Candidates, Draft, Drafter
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import walk

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
