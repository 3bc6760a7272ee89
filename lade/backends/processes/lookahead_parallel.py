"""Lookahead parallelism: each process has the whole model, and feeds a part of each tree.

Each part is a run of leaves in depth-first order with all their ancestors, so that it can be fed by itself:

    root ─┬─ a ─┬─ b            leaves b, c, e      partition in two:  root a b c  |  root d e
          │     └─ c
          └─ d ─── e

Neighbouring runs share the path to the node where they branch, which is fed twice: at most P - 1 paths for P parts.

    process 0   root a b c ─┐
    process 1   root d e ───┴─ gather readouts of all nodes ─ verify, learn

There is no communication within a pass, so models of any kind can be parallelised this way, also over slow links. After
the pass the leader gathers a readout of each node: the argmax and the top tokens, 28 bytes, or a row of logits if
tokens are sampled or logits processors run. Of the accepted path, a process has the keys of those nodes that it has
fed; it feeds the missing ones again before the root of its next part:

    process 0   root d e accepted: d and e are missing  next: d e [root] ...

This is the parallelism of the paper (arXiv 2402.02057, section 4) applied to a tree: there the columns of the window
are distributed, and every process feeds all accepted tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import distributed as dist

from lade.backends.processes.leader import LeadingCache, LeadingRunner
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.readout import Readout, packed, unpacked
from lade.decoding.tree import ROOT, TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


class _Leaf(NamedTuple):
    """A leaf of a tree."""

    node: int  # its index
    path: int  # number of nodes from the root to the leaf, both included
    fresh: int  # number of these that are not on the path to the previous leaf


def partition(parents: Sequence[int], parts: int, taken: Sequence[int] | None = None) -> list[list[int]]:
    """Cut a tree into runs of leaves, so that the largest part is as small as possible.

    The least possible size is found by bisection: one pass over the leaves decides if a size suffices. Each part has
    to feed so many `taken` tokens, `[P]`, besides.

    Returns:
        P ascending lists of nodes. The root, node 0, is in each of them, in some of them alone.
    """
    taken = taken or [0] * parts
    leaves = _leaves(parents)
    low, high = 1 + min(taken), len(parents) + max(taken)
    while low < high:
        middle = (low + high) // 2
        if _runs(leaves, taken, middle) is None:
            low = middle + 1
        else:
            high = middle
    runs = _runs(leaves, taken, low)
    assert runs is not None, "the whole tree fits into one part"
    return [_with_ancestors(run, parents) for run in runs]


def _leaves(parents: Sequence[int]) -> list[_Leaf]:
    """Return the leaves in depth-first order."""
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
        depths[node] = depths[parents[node]] + 1
    found: list[_Leaf] = []
    stack, fresh = [0], 0
    while stack:
        node = stack.pop()
        fresh += 1
        if children[node]:
            stack.extend(reversed(children[node]))
        else:
            found.append(_Leaf(node, depths[node] + 1, fresh))
            fresh = 0
    return found


def _runs(leaves: Sequence[_Leaf], taken: Sequence[int], most: int) -> list[list[int]] | None:
    """Return the leaves of each part if no part may feed more than `most` tokens; None if that is impossible."""
    runs: list[list[int]] = [[] for _ in taken]
    part, room = -1, -1
    for leaf in leaves:
        if part >= 0 and leaf.fresh <= room:
            room -= leaf.fresh
        else:
            part += 1
            while part < len(taken) and leaf.path > most - taken[part]:
                part += 1
            if part == len(taken):
                return None
            room = most - taken[part] - leaf.path
        runs[part].append(leaf.node)
    return runs


def _with_ancestors(leaves: Sequence[int], parents: Sequence[int]) -> list[int]:
    nodes = {0}
    for leaf in leaves:
        node = leaf
        while node not in nodes:
            nodes.add(node)
            node = parents[node]
    return sorted(nodes)


class PartialCache(TreeCache):
    """Cache of the whole text for the decoding loop; this process's keys and values are in a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = TreeCache()  # of the tokens that this process has fed; the last ones of a row may be missing in it
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._missing: list[list[list[int]]] = []  # [B][P], ids of a row's last tokens that a process has not fed
        self._trees: Sequence[TokenTree] = ()
        self._parts: list[list[list[int]]] = []  # [B][P], nodes of the last trees, by process
        self._own_fed = 0

    @property
    def lengths(self) -> list[int]:
        """`[B]`, tokens of each row, including those missing in this process."""
        own = self.own.lengths
        if not self._missing:
            return own
        return [length + len(gaps[self._rank]) for length, gaps in zip(own, self._missing, strict=True)]

    @property
    def room(self) -> tuple[int, int]:
        """See `TreeCache`."""
        return self.own.room

    @property
    def device_bytes(self) -> dict[torch.device, int]:
        """See `TreeCache`."""
        return self.own.device_bytes

    @property
    def state_bytes(self) -> int:
        """See `TreeCache`."""
        return self.own.state_bytes

    def partition(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the parts of trees that this process feeds, after the tokens that it is missing."""
        self._missing, self._trees = self._missing or [self._nothing_missing() for _ in trees], trees
        self._parts = [
            partition(tree.parents, self._size, list(map(len, gaps)))
            for tree, gaps in zip(trees, self._missing, strict=True)
        ]
        own = [
            _part(tree, parts[self._rank], gaps[self._rank])
            for tree, parts, gaps in zip(trees, self._parts, self._missing, strict=True)
        ]
        self._own_fed = max(map(len, own))
        return own

    def gathered(self, found: torch.Tensor) -> torch.Tensor:
        """Gather data of all nodes `[B, S, X]`, such as logits, in the leader; followers get their own data back.

        What is given is of the nodes that this process has fed, missing tokens first.
        """
        mine = torch.cat(
            [
                found[row, len(gaps[self._rank]) : len(gaps[self._rank]) + len(parts[self._rank])]
                for row, (parts, gaps) in enumerate(zip(self._parts, self._missing, strict=True))
            ]
        )
        most = max(sum(len(parts[rank]) for parts in self._parts) for rank in range(self._size))
        sent = found.new_empty(most, found.shape[-1])
        sent[: len(mine)] = mine
        raw = sent.view(torch.uint8)  # all backends support bytes
        brought = [torch.empty_like(raw) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(raw, brought, dst=0)
        if brought is None:
            return found
        whole = found.new_empty(len(self._trees), max(map(len, self._trees)), found.shape[-1])
        for rank, rows in enumerate(brought):
            first, theirs = 0, rows.view(found.dtype)
            for row, parts in enumerate(self._parts):
                whole[row, parts[rank]] = theirs[first : first + len(parts[rank])]
                first += len(parts[rank])
        return whole

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """See `TreeCache`. Nodes of a path that a process has not fed are missing in it from now on."""
        if not self._trees:  # no tree was partitioned
            self.own.keep(paths, fed, held)
            return
        own_paths, lacking = [], []
        for path, tree, parts, gaps in zip(paths, self._trees, self._parts, self._missing, strict=True):
            known = [_fed_prefix(path, nodes) for nodes in parts]
            nodes, before = parts[self._rank], len(gaps[self._rank])
            own_paths.append([*range(before), *(before + nodes.index(node) for node in path[: known[self._rank]])])
            lacking.append([[tree.ids[node] for node in path[count:]] for count in known])
        self._missing, self._trees = lacking, ()
        self.own.keep(own_paths, self._own_fed)

    def clear_missing(self) -> None:
        """Record that every process has fed the whole text, as after a prefill."""
        self._missing = []

    def leave(self, row: int) -> None:
        """See `TreeCache`."""
        self.own.leave(row)
        if self._missing:
            self._missing[row] = self._missing[-1]
            self._missing.pop()

    def take(self, part: TreeCache) -> None:
        """See `TreeCache`."""
        assert isinstance(part, PartialCache)
        rows = len(self.own.lengths) if self.own.layers else 0
        mine = self._missing or [self._nothing_missing() for _ in range(rows)]
        self._missing = [*mine, *(part._missing or [self._nothing_missing()])]
        self.own.take(part.own)
        part.reset()

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """See `TreeCache`; tokens missing in this process are missing in the copy."""
        length, gaps = self.lengths[row], self._missing[row] if self._missing else self._nothing_missing()
        copy = PartialCache()
        copy._missing = [[gap[: max(0, tokens - (length - len(gap)))] for gap in gaps]]
        copy.own = self.own.copy_row(row, min(tokens, self.own.lengths[row]))
        return copy

    def adopt(self, other: TreeCache) -> None:
        """Take over the contents of another cache, which must not be used afterwards."""
        assert isinstance(other, PartialCache)
        self.own, self._missing = other.own, other._missing

    def reserve(self, rows: int, slots: int) -> None:
        """See `TreeCache`."""
        self.own.reserve(rows, slots)

    def repeat(self, tokens: int) -> None:
        """See `TreeCache`."""
        self.own.repeat(tokens)

    def reset(self) -> None:
        """See `TreeCache`."""
        self.own.reset()
        self._missing, self._trees = [], ()

    def give_back(self, tokens: int) -> None:
        """See `TreeCache`; resets it, since it is of no use to others."""
        self.reset()

    def _nothing_missing(self) -> list[list[int]]:
        return [[] for _ in range(self._size)]


def _part(tree: TokenTree, nodes: Sequence[int], gap: Sequence[int]) -> TokenTree:
    """Return some nodes of a tree as a tree of its own, after a chain of missing tokens."""
    before, places = len(gap), {node: place for place, node in enumerate(nodes, start=len(gap))}
    ids = [*gap, *(tree.ids[node] for node in nodes)]
    part = TokenTree(ids[0])
    parents = [*range(before), *(places[tree.parents[node]] for node in nodes if node != ROOT)]
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    part.extend(ids[1:], parents, depths[1:], "part")
    return part


def _fed_prefix(path: Sequence[int], nodes: Sequence[int]) -> int:
    """Return how many leading nodes of a path are in `nodes`."""
    among = set(nodes)
    return next((place for place, node in enumerate(path) if node not in among), len(path))


class PartRunner(EagerRunner):
    """Feeds this process's part of each tree."""

    exposes_states = False

    def tree_cache(self) -> TreeCache:
        """See `EagerRunner`."""
        return PartialCache()

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner`; every process feeds the whole prompts."""
        assert isinstance(cache, PartialCache)
        logits = super().prefill(rows, cache.own, hook)
        cache.clear_missing()
        return logits

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`; only the leader gets the logits of all nodes."""
        assert isinstance(cache, PartialCache)
        logits = super().forward(cache.partition(trees), rows, cache.own)
        with self._also_timed():
            return cache.gathered(logits)

    def read(
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache, *, wants_entries: bool
    ) -> torch.Tensor:
        """Run a pass, and reduce its logits where they were computed; see `readout.packed`.

        Returns:
            `[B, S, X]` int32 of all nodes in the leader; this process's own nodes in followers.
        """
        assert isinstance(cache, PartialCache)
        logits = super().forward(cache.partition(trees), rows, cache.own)
        with self._also_timed():
            found = packed(logits.flatten(0, 1), wants_entries=wants_entries)
            return cache.gathered(found.unflatten(0, logits.shape[:2]))

    @contextmanager
    def _also_timed(self) -> Iterator[None]:
        """Count the time of the block as part of the pass."""
        self._stopwatch.resume(self.device)
        yield
        self._stopwatch.stop(self.device)


class LeadingPartialCache(LeadingCache, PartialCache):
    """A partial cache in the leader, which announces its changes."""


class LeadingPartRunner(LeadingRunner, PartRunner):
    """Feeds the leader's part of each tree, and announces the pass."""

    caches = LeadingPartialCache
    shares_head = False

    @property
    def reader(self) -> LeadingPartRunner:
        """See `DecodeLoop.reader`."""
        return self

    @property
    def parts(self) -> int:
        """See `EagerRunner`."""
        return self.processes

    def readouts(
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache, *, wants_entries: bool
    ) -> list[Readout]:
        """See `lade.decoding.loop.Reader`."""
        with self._announced("read", trees, cache, wants_entries):
            found = self.read(trees, rows, cache, wants_entries=wants_entries)
        whole, size = unpacked(found.flatten(0, 1)), found.shape[1]
        return [whole.rows(row * size, len(tree)) for row, tree in enumerate(trees)]
