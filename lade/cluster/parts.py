"""Lookahead parallelism: each process has the whole model and feeds a part of the tree.

    process 0   root a b c ─┐
    process 1   root d e ───┴─ what was read of all nodes ─ verify, learn

A pass has no exchange in it, so models of any kind can be split this way, over slow links, too. After it the first
process gets what it needs of each node: the argmax and the likeliest tokens where nothing else decides, 28 bytes; the
row of logits where tokens are drawn, or processors are asked. Of the accepted path a process has the keys of those
nodes that it has fed; the others it lacks, and feeds them again before the root of its next part:

    process 0   root d e accepted: it lacks d and e        next: d e [root] ...

This is the parallelism of the paper (arXiv 2402.02057, section 4) for a tree: there the columns of the window are dealt
out, and every process feeds all accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lade.cluster.leader import LeadingCache, LeadingRunner
from lade.cluster.parted_cache import PartedCache
from lade.cluster.trees import digest, flat
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.readout import Readout, packed, unpacked
from lade.decoding.tree import TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


class PartRunner(EagerRunner):
    """Feeds this process's part of each tree."""

    def tree_cache(self) -> TreeCache:
        """See `EagerRunner`."""
        return PartedCache()

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner`; every process feeds the whole prompts."""
        assert isinstance(cache, PartedCache)
        logits = super().prefill(rows, cache.own, hook)
        cache.fed_whole()
        return logits

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`; the logits are whole in the first process alone."""
        assert isinstance(cache, PartedCache)
        logits = super().forward(cache.cut(trees), rows, cache.own)
        with self._also_timed():
            return cache.gathered(logits)

    def read(
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache, *, wants_entries: bool
    ) -> torch.Tensor:
        """Make a pass, and read its logits where they are; see `readout.packed`.

        Returns:
            `[B, S, X]` int32 of all nodes in the first process; something else in the others.
        """
        assert isinstance(cache, PartedCache)
        logits = super().forward(cache.cut(trees), rows, cache.own)
        with self._also_timed():
            found = packed(logits.flatten(0, 1), wants_entries=wants_entries)
            return cache.gathered(found.unflatten(0, logits.shape[:2]))

    @contextmanager
    def _also_timed(self) -> Iterator[None]:
        """What the block takes counts as time of the pass."""
        self._stopwatch.resume(self.device)
        yield
        self._stopwatch.stop(self.device)


class LeadingPartedCache(LeadingCache, PartedCache):
    """Both: tells the other processes, then does the same."""

    def _empty(self) -> LeadingPartedCache:
        return LeadingPartedCache(self._leader)


class LeadingPartRunner(LeadingRunner, PartRunner):
    """Both."""

    shares_head = False

    @property
    def parts(self) -> int:
        """See `EagerRunner`."""
        return self.processes

    def tree_cache(self) -> TreeCache:
        """See `EagerRunner`."""
        return LeadingPartedCache(self._leader)

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> LeadingCache:
        """See `EagerRunner`."""
        return LeadingPartedCache(self._leader)

    def readouts(
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache, *, wants_entries: bool
    ) -> list[Readout]:
        """See `lade.decoding.loop.Reader`."""
        assert isinstance(cache, LeadingPartedCache)
        sent = list(map(flat, trees))
        with self._leader.passing("read", cache.number, sent, wants_entries, digest(trees, cache.lengths)):
            found = self.read(trees, rows, cache, wants_entries=wants_entries)
        whole, size = unpacked(found.flatten(0, 1)), found.shape[1]
        return [whole.rows(row * size, len(tree)) for row, tree in enumerate(trees)]
