"""Drafting for many requests of an engine in one call.

Each function goes through the requests in their order, until one needs more room or another way: the caller sees to
that one, and calls again. These functions run where the library is missing; `lade/native/requests.cpp` has the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels import growth, tables
from lade.decoding.kernels.layout import END, LONGEST, READ, TEXT, Doubles, Ints
from lade.decoding.kernels.work import Held, IndexedText, Tables
from lade.native.kernel import DOUBLE, DOUBLES, INT, INTS, LONGS, STRUCT, TABLE, Struct, kernel

Longs = npt.NDArray[np.int64]

_LONGEST_PATH = 64  # tokens of a request that one call learns
_NO_LIMIT = 2**31 - 1


class Requests(Struct):
    """Trees of requests, each with the tables that it grows from."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[Held, Tables]]) -> None:
        self.pairs = pairs
        super().__init__([each.address for pair in pairs for each in pair], ())


@kernel(STRUCT, LONGS, INT, DOUBLES, LONGS, INT, INT, INTS, INTS, DOUBLES, LONGS, result=INT)
def propose(
    requests: Requests,
    budgets: Longs,
    start: int,
    prices: Doubles,
    excluded: Longs,
    vocabulary: int,
    trees: bool,
    ids: Ints,
    parents: Ints,
    scores: Doubles,
    ends: Longs,
) -> int:
    """Draft what may follow the texts of requests, see `growth`.

    Args:
        requests: B trees, whose texts have been read.
        budgets: `[B]`, the most tokens to draft for each.
        start: index of the first request to draft for.
        prices: `[4]`, tokens that one more node costs, `news` and `first` of `grow_chain`, and `promise` of `grow`.
        excluded: ids that are not added.
        vocabulary: V; ids from here on are not added.
        trees: draft trees; chains if False.
        ids: int32 `[sum of budgets]`, written: the drafts one after the other.
        parents: likewise, the index of each token's parent in its draft; -1 for the text's last token.
        scores: float64, likewise, the probability that each token is accepted.
        ends: `[B]`, written: end of each draft in these.

    Returns:
        Index of the first request whose tree has no room for its draft; B if all have.
    """
    price, news, first, promise = prices.tolist()
    end = int(ends[start - 1]) if start else 0
    for at in range(start, len(budgets)):
        (held, found), most = requests.pairs[at], int(budgets[at])
        work = held.work
        if most + 1 > len(work.ids):
            return at
        length = int(work.used[READ])
        tail = work.text[max(0, length - LONGEST) : length].astype(np.int64)
        growth.plant(held, length - 1, tail, promise)
        if trees:
            stages = [(size, max(price - news / (first + size - 1), 0.0)) for size in range(2, most + 2)]
            table = np.array(stages, dtype=np.float64).reshape(-1, 2)
            count = growth.grow(held, found, table, excluded, vocabulary, _NO_LIMIT, promise)
        else:
            count = growth.grow_chain(held, found, excluded, vocabulary, most + 1, price, news, first)
        span = slice(end, end := end + count - 1)
        ids[span], parents[span], scores[span] = work.ids[1:count], work.parents[1:count] - 1, work.scores[1:count]
        ends[at] = end
    return len(budgets)


@kernel(STRUCT, LONGS, INT, LONGS, LONGS, TABLE, LONGS, DOUBLE, result=INT)
def learn_requests(
    requests: Requests,
    drafted: Longs,
    start: int,
    tokens: Longs,
    token_ends: Longs,
    rows: Ints,
    row_ends: Longs,
    rate: float,
) -> int:
    """Learn from a pass that verified drafts.

    Args:
        requests: B trees, whose tables have been given their limits.
        drafted: `[B]`, number of tokens of each draft; -1 for a tree that was not grown for this pass.
        start: index of the first request to learn from.
        tokens: the tokens that requests got, one request after the other.
        token_ends: `[B]`, end of each request's tokens.
        rows: `[F, WIDTH]` entries of the logits at the tokens that were fed, likewise.
        row_ends: `[B]`, end of each request's rows.
        rate: learning rate of the gradient steps.

    Returns:
        Index of the first request that was not learned from: its rows do not fit its draft and tokens, or a table or
        text has no room. B if all were.
    """
    splits = np.split(tokens, token_ends)[:-1], np.split(rows, row_ends)[:-1]
    for at, (emitted, entries) in enumerate(zip(*splits, strict=True)):
        if at >= start and not _learn(*requests.pairs[at], int(drafted[at]), emitted, entries, rate):
            return at
    return len(drafted)


def _learn(held: Held, found: Tables, drafted: int, tokens: Longs, rows: Ints, rate: float) -> bool:
    """Learn a pass of one request; return False, with nothing changed, where that needs more room or another way."""
    work, known = held.work, int(held.work.used[READ])
    if drafted < 0 or not 0 < len(tokens) <= _LONGEST_PATH or known + len(tokens) > len(work.text):
        return False
    path = [0]
    for token in tokens[:-1].tolist():
        below = slice(path[-1] + 1, drafted + 1)
        children = np.flatnonzero((work.parents[below] == path[-1]) & (work.ids[below] == token))
        if not len(children):
            break
        path.append(path[-1] + 1 + int(children[0]))
    if not path[-1] < len(rows) <= drafted + 1:
        return False
    beyond = len(tokens) - len(path)
    wanted = TEXT * len(rows) + _room_for(len(path)) + (_room_for(beyond) if beyond else 0)
    if found.taken + wanted > found.most:
        return False
    nodes, chosen = np.array(path), tokens[: len(path)]
    growth.learn_tree(held, found, rows, nodes, chosen, rate)
    taken = tables.learn_step(found, work.tails[: len(rows)], rows, nodes, chosen)
    growth.index_text(IndexedText(work.text, work.links, work.latest), tokens, known)
    work.used[READ] += len(tokens)
    start = known + len(path)
    text = work.text[: known + len(tokens)].astype(np.int64)
    followed = tables.tails_of(text, start - 1, beyond), tables.certain(text[start:])
    _, taken = tables.learn(found.young, found.old, *followed, TEXT, END, 0, found.taken + taken, found.most)
    found.limit(taken, found.most)
    return True


def _room_for(tokens: int) -> int:
    """Return the number of slots that are kept free for tokens of a text."""
    return max((END - TEXT) * tokens, END)
