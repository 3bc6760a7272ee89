"""A token tree cut into parts for several processes.

Each part is a run of leaves in depth-first order, with all their ancestors, so that it can be fed by itself:

    root ─┬─ a ─┬─ b            leaves b, c, e      cut in two:  root a b c  |  root d e
          │     └─ c
          └─ d ─── e

Neighbouring runs share the path to the node where they part, which is fed twice; so of P parts at most P - 1 paths are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
