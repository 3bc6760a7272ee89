"""The texts of a beam search: a common trunk and one tree after it, pruned of nodes that no beam can reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lade.decoding.tree import ROOT, TokenTree

Follow = tuple[int, float]  # a token and its log-probability


class BranchRow:
    """Base of rows with a tree, whose first `seen` nodes are in the cache."""

    branches: Branches

    @property
    def tree(self) -> TokenTree:
        """The cached nodes, and those that the next pass feeds."""
        return self.branches.tree

    @property
    def seen(self) -> int:
        """Number of nodes that a pass has seen."""
        return len(self.branches.follows)


@dataclass
class Branches:
    """Trunk and tree of the texts of a search, and what passes have found at the first nodes of the tree."""

    trunk: list[int]  # the text before the tree's root
    tree: TokenTree  # its root is the last token that all branches share, or a later one
    # Top next tokens at each node seen, likeliest first; none at nodes that no beam can reach.
    follows: list[Sequence[Follow]] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # [V], at nodes seen that a beam can reach

    @classmethod
    def of(cls, prompt: Sequence[int]) -> Branches:
        """Return the branches before the first pass, with the last token of the prompt as root."""
        return cls(list(prompt[:-1]), TokenTree(prompt[-1]))

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to this one."""
        path = [node]
        while (node := self.tree.parents[node]) >= 0:
            path.append(node)
        return path[::-1]

    def ending(self, node: int, length: int) -> list[int]:
        """Return at most the last `length` tokens of the text that ends with this node."""
        tokens: list[int] = []
        while node >= 0 and len(tokens) < length:
            tokens.append(self.tree.ids[node])
            node = self.tree.parents[node]
        missing = length - len(tokens)
        return [*(self.trunk[-missing:] if missing else ()), *tokens[::-1]]

    def learn(self, logits: torch.Tensor, follows: Sequence[Sequence[Follow]]) -> None:
        """Store what a pass found at the nodes that follow those already seen: logits `[S, V]`, and top next tokens."""
        self.logits.update(enumerate(logits, start=len(self.follows)))
        self.follows += follows

    def prune(self, beams: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Keep the ancestors and descendants of the beams' last nodes; their common path joins the trunk.

        Returns:
            The nodes that stay in the cache, in the old numbering; and the new numbers of those that stay in the tree,
            which the others have left for the trunk.
        """
        reachable = set(beams)
        for node, parent in enumerate(self.tree.parents):  # parents come before their children
            if parent in reachable:
                reachable.add(node)
        alive = sorted(reachable.union(*(self.path(node) for node in set(beams))))
        kept = [node for node in alive if node < len(self.follows)]

        parents = [self.tree.parents[node] for node in alive]
        common = 0
        while alive[common] not in reachable and parents.count(alive[common]) == 1:
            common += 1
        self.trunk += [self.tree.ids[node] for node in alive[:common]]
        numbers = {node: number for number, node in enumerate(alive[common:])}
        self.follows = [self.follows[node] if node in reachable else () for node in kept[common:]]
        self.tree = self._renumbered(numbers)
        left = [node for node in self.logits if node in reachable]
        # Copied, since a view of a single row would keep the logits of the whole pass alive.
        rows = torch.stack([self.logits[node] for node in left]) if left else ()
        self.logits = {numbers[node]: row for node, row in zip(left, rows, strict=True)}
        return kept, numbers

    def _renumbered(self, numbers: dict[int, int]) -> TokenTree:
        old, nodes = self.tree, list(numbers)
        tree = TokenTree(old.ids[nodes[ROOT]])
        for node in nodes[1:]:
            tree.add(numbers[old.parents[node]], old.ids[node], old.sources[node])
        return tree
