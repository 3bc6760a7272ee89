"""Lookahead parallelism: each process has the whole model and feeds a part of the tree.

    process 0   root a b c ─┐
    process 1   root d e ───┴─ logits of all nodes ─ verify, learn

A pass has no exchange in it, so models of any kind can be split this way, over slow links, too. What is exchanged after
it is the logits, whose rows go to the first process. Of the accepted path a process has the keys of those nodes that it
has fed; the others it lacks, and feeds them again before the root of its next part:

    process 0   root d e accepted: it lacks d and e        next: d e [root] ...

This is the parallelism of the paper (arXiv 2402.02057, section 4) for a tree: there the columns of the window are dealt
out, and every process feeds all accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from lade.cluster.leader import LeadingCache, LeadingRunner
from lade.decoding.cut import cut
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import ROOT, TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


class PartedCache(TreeCache):
    """What the text has, for the decoding loop; keys and values of this process are in a cache of its own.

    Attributes:
        own: what this process has fed; a row of it lacks the last tokens of the text, perhaps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = TreeCache()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._lacks: list[list[list[int]]] = []  # [P][B], ids of the last tokens of a row that a process has not fed
        self._trees: Sequence[TokenTree] = ()
        self._parts: list[list[list[int]]] = []  # [B][P], nodes of the trees that were fed last
        self._own_fed = 0

    @property
    def lengths(self) -> list[int]:
        """`[B]`, tokens of each row, those included that this process lacks."""
        own = self.own.lengths
        if not self._lacks:
            return own
        return [length + len(lack) for length, lack in zip(own, self._lacks[self._rank], strict=True)]

    def cut(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The parts of trees that this process feeds, behind the tokens that it lacks."""
        if not self._lacks:
            self._lacks = [[[] for _ in trees] for _ in range(self._size)]
        self._trees = trees
        self._parts = [
            cut(tree.parents, self._size, [len(lacks[row]) for lacks in self._lacks]) for row, tree in enumerate(trees)
        ]
        own = [
            _part(tree, parts[self._rank], lack)
            for tree, parts, lack in zip(trees, self._parts, self._lacks[self._rank], strict=True)
        ]
        self._own_fed = max(map(len, own))
        return own

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all nodes `[B, S, V]` in the first process, from each one's own; those again in the others.

        Args:
            logits: `[B, S, V]` of the nodes that this process has fed, those that it lacked first.
        """
        mine = torch.cat(
            [
                logits[row, len(lack) : len(lack) + len(parts[self._rank])]
                for row, (parts, lack) in enumerate(zip(self._parts, self._lacks[self._rank], strict=True))
            ]
        )
        most = max(sum(len(parts[rank]) for parts in self._parts) for rank in range(self._size))
        sent = logits.new_empty(most, logits.shape[-1])
        sent[: len(mine)] = mine
        raw = sent.view(torch.uint8)  # no backend lacks bytes
        found = [torch.empty_like(raw) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(raw, found, dst=0)
        if found is None:
            return logits
        whole = logits.new_empty(len(self._trees), max(map(len, self._trees)), logits.shape[-1])
        for rank, rows in enumerate(found):
            first, theirs = 0, rows.view(logits.dtype)
            for row, parts in enumerate(self._parts):
                whole[row, parts[rank]] = theirs[first : first + len(parts[rank])]
                first += len(parts[rank])
        return whole

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """See `TreeCache`. Nodes of a path that a process has not fed, it lacks from now on."""
        if not self._trees:  # nothing was cut
            self.own.keep(paths, fed, held)
            return
        own_paths = []
        for row, (path, tree, parts) in enumerate(zip(paths, self._trees, self._parts, strict=True)):
            for rank, nodes in enumerate(parts):
                known = _known(path, nodes)
                if rank == self._rank:
                    before = len(self._lacks[rank][row])
                    own_paths.append([*range(before), *(before + nodes.index(node) for node in path[:known])])
                self._lacks[rank][row] = [tree.ids[node] for node in path[known:]]
        self.own.keep(own_paths, self._own_fed)
        self._trees = ()

    def leave(self, row: int) -> None:
        """See `TreeCache`."""
        self.own.leave(row)
        for lacks in self._lacks:
            lacks[row] = lacks[-1]
            lacks.pop()

    def repeat(self, tokens: int) -> None:
        """See `TreeCache`."""
        self.own.repeat(tokens)

    def reset(self) -> None:
        """See `TreeCache`."""
        self.own.reset()
        self._lacks, self._trees = [], ()

    def give_back(self, tokens: int) -> None:
        """See `TreeCache`; it is of no use to others."""
        self.reset()


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
        return super().prefill(rows, cache.own, hook)

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`; the logits are whole in the first process alone."""
        assert isinstance(cache, PartedCache)
        logits = super().forward(cache.cut(trees), rows, cache.own)
        self._stopwatch.start(self.device)
        forward_s = self.forward_s
        whole = cache.gathered(logits)
        self._stopwatch.stop(whole.device)
        self.forward_s += forward_s
        return whole


class LeadingPartedCache(LeadingCache, PartedCache):
    """Both: tells the other processes, then does the same."""


class LeadingPartRunner(LeadingRunner, PartRunner):
    """Both."""

    shares_head = False

    def tree_cache(self) -> TreeCache:
        """See `EagerRunner`."""
        return LeadingPartedCache(self._leader)

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> LeadingCache:
        """See `EagerRunner`."""
        return LeadingPartedCache(self._leader)


def _part(tree: TokenTree, nodes: Sequence[int], lack: Sequence[int]) -> TokenTree:
    """Some nodes of a tree as a tree of its own, behind tokens that are fed before its root."""
    before, places = len(lack), {node: place for place, node in enumerate(nodes, start=len(lack))}
    ids = [*lack, *(tree.ids[node] for node in nodes)]
    part = TokenTree(ids[0])
    parents = [*range(before), *(places[tree.parents[node]] for node in nodes if node != ROOT)]
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    part.extend(ids[1:], parents, depths[1:], "part")
    return part


def _known(path: Sequence[int], nodes: Sequence[int]) -> int:
    """How many nodes of a path, from the root on, are among these."""
    among = set(nodes)
    return next((place for place, node in enumerate(path) if node not in among), len(path))
