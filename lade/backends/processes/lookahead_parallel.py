"""Lookahead parallelism: a tree is cut into parts, one for each process with the whole model.

Each part is a run of leaves in depth-first order, with all their ancestors, so that it can be fed by itself:

    root ─┬─ a ─┬─ b            leaves b, c, e      cut in two:  root a b c  |  root d e
          │     └─ c
          └─ d ─── e

Neighbouring runs share the path to the node where they part, which is fed twice; so of P parts at most P - 1 paths are.

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
from typing import NamedTuple

import torch
from torch import distributed as dist

from lade.backends.processes.channel import digest, flat
from lade.backends.processes.leader import LeadingCache, LeadingRunner
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.readout import Readout, packed, unpacked
from lade.decoding.tree import ROOT, TokenTree
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner


class _Leaf(NamedTuple):
    node: int
    path: int
    """Nodes from the root to it, both included."""
    fresh: int
    """Those of them that the leaf before it does not have."""


def cut(parents: Sequence[int], parts: int, taken: Sequence[int] | None = None) -> list[list[int]]:
    """Cut a tree so that the largest part is as small as runs of leaves in this order can make it.

    The least possible size is found by bisection: whether a size suffices is seen in one go through the leaves.

    Args:
        parents: of the nodes, each of which comes after its parent; -1 for the root, which is node 0.
        parts: P, how many.
        taken: `[P]`, tokens that each part has to feed besides; none unless given.

    Returns:
        P lists of nodes, ascending. The root is in each of them, and in some perhaps nothing else.
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
    """In depth-first order."""
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
    """The leaves of each part where none feeds more than `most` tokens; None where that cannot be."""
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


class PartedCache(TreeCache):
    """What the text has, for the decoding loop; keys and values of this process are in a cache of its own.

    Attributes:
        own: what this process has fed; a row of it lacks the last tokens of the text, perhaps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = TreeCache()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._lacks: list[list[list[int]]] = []  # [B][P], ids of the last tokens of a row that a process has not fed
        self._trees: Sequence[TokenTree] = ()
        self._parts: list[list[list[int]]] = []  # [B][P], nodes of the trees that were fed last
        self._own_fed = 0

    @property
    def lengths(self) -> list[int]:
        """`[B]`, tokens of each row, those included that this process lacks."""
        own = self.own.lengths
        if not self._lacks:
            return own
        return [length + len(lacks[self._rank]) for length, lacks in zip(own, self._lacks, strict=True)]

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

    def cut(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The parts of trees that this process feeds, behind the tokens that it lacks."""
        self._lacks, self._trees = self._lacks or [self._none_lacked() for _ in trees], trees
        self._parts = [
            cut(tree.parents, self._size, list(map(len, lacks))) for tree, lacks in zip(trees, self._lacks, strict=True)
        ]
        own = [
            _part(tree, parts[self._rank], lacks[self._rank])
            for tree, parts, lacks in zip(trees, self._parts, self._lacks, strict=True)
        ]
        self._own_fed = max(map(len, own))
        return own

    def gathered(self, found: torch.Tensor) -> torch.Tensor:
        """Something of all nodes `[B, S, X]` in the first process, from each one's own; its own again in the others.

        Args:
            found: `[B, S, X]`, such as logits, of the nodes that this process has fed, those that it lacked first.
        """
        mine = torch.cat(
            [
                found[row, len(lacks[self._rank]) : len(lacks[self._rank]) + len(parts[self._rank])]
                for row, (parts, lacks) in enumerate(zip(self._parts, self._lacks, strict=True))
            ]
        )
        most = max(sum(len(parts[rank]) for parts in self._parts) for rank in range(self._size))
        sent = found.new_empty(most, found.shape[-1])
        sent[: len(mine)] = mine
        raw = sent.view(torch.uint8)  # no backend lacks bytes
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
        """See `TreeCache`. Nodes of a path that a process has not fed, it lacks from now on."""
        if not self._trees:  # nothing was cut
            self.own.keep(paths, fed, held)
            return
        own_paths, lacking = [], []
        for path, tree, parts, lacks in zip(paths, self._trees, self._parts, self._lacks, strict=True):
            known = [_known(path, nodes) for nodes in parts]
            nodes, before = parts[self._rank], len(lacks[self._rank])
            own_paths.append([*range(before), *(before + nodes.index(node) for node in path[: known[self._rank]])])
            lacking.append([[tree.ids[node] for node in path[count:]] for count in known])
        self._lacks, self._trees = lacking, ()
        self.own.keep(own_paths, self._own_fed)

    def fed_whole(self) -> None:
        """After a prefill: every process has fed all of the text."""
        self._lacks = []

    def leave(self, row: int) -> None:
        """See `TreeCache`."""
        self.own.leave(row)
        if self._lacks:
            self._lacks[row] = self._lacks[-1]
            self._lacks.pop()

    def take(self, part: TreeCache) -> None:
        """See `TreeCache`."""
        assert isinstance(part, PartedCache)
        rows = len(self.own.lengths) if self.own.layers else 0
        mine = self._lacks or [self._none_lacked() for _ in range(rows)]
        self._lacks = [*mine, *(part._lacks or [self._none_lacked()])]
        self.own.take(part.own)
        part.reset()

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """See `TreeCache`; what this process lacks of these tokens, the copy lacks, too."""
        length, lacks = self.lengths[row], self._lacks[row] if self._lacks else self._none_lacked()
        copy = PartedCache()
        copy._lacks = [[lack[: max(0, tokens - (length - len(lack)))] for lack in lacks]]
        copy.own = self.own.copy_row(row, min(tokens, self.own.lengths[row]))
        return copy

    def adopt(self, other: TreeCache) -> None:
        """Become another cache, which is not used any more."""
        assert isinstance(other, PartedCache)
        self.own, self._lacks = other.own, other._lacks

    def reserve(self, rows: int, slots: int) -> None:
        """See `TreeCache`."""
        self.own.reserve(rows, slots)

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

    def crop(self, tokens_to_remove: int) -> None:
        """No user has such a cache, and nothing else crops."""
        raise NotImplementedError("a cache of several processes is not cropped")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Beams, which alone select, are not cut."""
        raise NotImplementedError("the rows of a cache of several processes are not selected")

    def _none_lacked(self) -> list[list[int]]:
        return [[] for _ in range(self._size)]


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
    def reader(self) -> LeadingPartRunner:
        """See `DecodeLoop.reader`."""
        return self

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
