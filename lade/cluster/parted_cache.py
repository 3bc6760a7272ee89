"""The cache of one process of lookahead parallelism; see `lade.cluster.parts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from lade.decoding.cut import cut
from lade.decoding.tree import ROOT, TokenTree
from lade.model.kv_cache import TreeCache


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
