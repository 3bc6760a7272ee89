"""Drafting for many requests of an engine in one call: `requests.cpp`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.growth import Requests
from lade.decoding.kernels.layout import END, READ, TEXT, Doubles, Ints
from lade.decoding.kernels.tables import Tables
from lade.decoding.kernels.work import Held
from reference import growth, tables

_LONGEST_PATH = 64  # tokens of a request that one call learns
_NO_LIMIT = 2**31 - 1


def propose(
    requests: Requests,
    budgets: Sequence[int],
    start: int,
    prices: Sequence[float],
    excluded: Sequence[int],
    vocabulary: int,
    trees: bool,
    ids: Ints,
    parents: Ints,
    scores: Doubles,
    ends: npt.NDArray[np.int64],
) -> int:
    """Draft what may follow the texts of requests, see `growth`."""
    price, news, first, promise = prices
    end = int(ends[start - 1]) if start else 0
    for at in range(start, len(budgets)):
        (held, found), most = requests.pairs[at], budgets[at]
        work = held.work
        if most + 1 > len(work.ids):
            return at
        growth.plant(held, int(work.used[READ]) - 1, promise)
        if trees:
            pairs = [(size, max(price - news / (first + size - 1), 0.0)) for size in range(2, most + 2)]
            stages = [number for pair in pairs for number in pair]
            count = growth.grow(held, found, stages, excluded, vocabulary, _NO_LIMIT, promise)
        else:
            count = growth.grow_chain(held, found, excluded, vocabulary, most + 1, price, news, first)
        span = slice(end, end := end + count - 1)
        ids[span], parents[span], scores[span] = work.ids[1:count], work.parents[1:count] - 1, work.scores[1:count]
        ends[at] = end
    return len(budgets)


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


def _learn_one(held: Held, found: Tables, drafted: int, tokens: list[int], rows: Ints, rate: float) -> bool:
    """Learn a pass of one request; return False, with nothing changed, where that needs more room or another way."""
    work, known = held.work, int(held.work.used[READ])
    if drafted < 0 or not 0 < len(tokens) <= _LONGEST_PATH or known + len(tokens) > len(work.text):
        return False
    path = [0]
    for token in tokens[:-1]:
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
    growth.learn_tree(held, found, rows, path, tokens[: len(path)], rate)
    growth.index_text(held, tokens)
    start = known + len(path)
    text = work.text[: known + len(tokens)].astype(np.int64)
    followed = tables.tails_of(text, start - 1, beyond), tables.certain(text[start:])
    _, taken = tables.learn(found.young, found.old, *followed, TEXT, END, 0, found.taken, found.most)
    found.limit(taken, found.most)
    return True


def _room_for(tokens: int) -> int:
    """Return the number of slots that are kept free for tokens of a text."""
    return max((END - TEXT) * tokens, END)
