"""Drafting for many requests of an engine in one call: `requests.cpp`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import END, LONGEST, TEXT, Doubles, Ints
from lade.decoding.kernels.native_tree import Requests
from lade.decoding.kernels.tables import Tables
from reference import growth, tables
from reference.tree import Tree

_LONGEST_PATH = 64  # tokens of a request that one call learns
_NO_LIMIT = 2**31 - 1


def _propose(
    requests: Requests,
    budgets: Sequence[int],
    prices: Sequence[float],
    trees: bool,
    ids: Ints,
    parents: Ints,
    scores: Doubles,
    ends: npt.NDArray[np.int64],
) -> None:
    """Draft what may follow the texts of requests."""
    price, news, first, promise = prices
    end = 0
    for at, ((tree, found), most) in enumerate(zip(requests.pairs, budgets, strict=True)):
        growth.plant(tree, len(tree.text) - 1, tree.text[-LONGEST:], promise)
        if trees:
            pairs = [(size, max(price - news / (first + size - 1), 0.0)) for size in range(2, most + 2)]
            growth.grow(tree, found, [number for pair in pairs for number in pair], _NO_LIMIT, promise)
        else:
            growth.grow_chain(tree, found, most + 1, price, news, first)
        span, nodes = slice(end, end := end + tree.count - 1), slice(1, tree.count)
        ids[span], parents[span], scores[span] = tree.id[nodes], tree.parent[nodes] - 1, tree.score[nodes]
        ends[at] = end


def learn_requests(
    requests: Requests,
    drafted: Sequence[int],
    start: int,
    tokens: Sequence[int],
    token_ends: Sequence[int],
    rows: Ints,
    row_ends: Sequence[int],
    rate: float,
) -> int:
    """Learn from a pass that verified drafts."""
    splits = np.split(np.array(tokens), token_ends)[:-1], np.split(rows, row_ends)[:-1]
    for at, (emitted, entries) in enumerate(zip(*splits, strict=True)):
        if at >= start and not _learn_one(*requests.pairs[at], drafted[at], emitted.tolist(), entries, rate):
            return at
    return len(drafted)


def _learn_one(tree: Tree, found: Tables, drafted: int, tokens: list[int], rows: Ints, rate: float) -> bool:
    """Learn a pass of one request; return False, with nothing changed, where that needs more room or another way."""
    known = len(tree.text)
    if not 0 <= drafted < tree.count or not 0 < len(tokens) <= _LONGEST_PATH:
        return False
    path = [0]
    for token in tokens[:-1]:
        below = slice(path[-1] + 1, drafted + 1)
        children = np.flatnonzero((tree.parent[below] == path[-1]) & (tree.id[below] == token))
        if not len(children):
            break
        path.append(path[-1] + 1 + int(children[0]))
    if not path[-1] < len(rows) <= drafted + 1:
        return False
    beyond = len(tokens) - len(path)
    wanted = TEXT * len(rows) + _room_for(len(path)) + (_room_for(beyond) if beyond else 0)
    if found.counts[0] + wanted > found.counts[1]:
        return False
    growth._learn_tree(tree, found, rows, path, tokens[: len(path)], rate)
    growth.index_text(tree, tokens)
    start, text = known + len(path), np.array(tree.text)
    followed = tables.tails_of(text, start - 1, beyond), tables.certain(text[start:])
    _, taken = tables.learn(found.young, found.old, *followed, TEXT, END, 0, *found.counts.tolist())
    found.counts[0] = taken
    return True


def _room_for(tokens: int) -> int:
    """Return the number of slots that are kept free for tokens of a text."""
    return max((END - TEXT) * tokens, END)
