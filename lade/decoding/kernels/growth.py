"""Trees, which grow by their likeliest nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lade.compilation import compiled
from lade.decoding.kernels.array_types import DOUBLE, INT, LONGS, MATRIX, TABLE
from lade.decoding.kernels.inlined import inlined
from lade.decoding.kernels.layout import (
    AT_TOKEN,
    COPY,
    HEAP,
    LONGEST,
    NEAR,
    NODES,
    PREDICTED,
    READ,
    ROOT,
    SPOTS,
    WIDTH,
    Doubles,
    Ints,
)
from lade.decoding.kernels.mixing import bring_forward, expand, learn_weights, led_by_mtp, note_slot, probability
from lade.decoding.kernels.tables import average
from lade.decoding.kernels.work import HELD, Held

_LOOKED_AT = 128  # places where the last token stood before
_LONGEST_END = 32  # agreement beyond so many tokens is not told apart
_COPIED = 16  # tokens that agree where a text is copied


@inlined
def _push(keys: Any, nodes: Any, ranks: Any, used: Any, key: Any, node: Any, rank: Any) -> None:
    """Enter one into the heap."""
    at = used[HEAP]
    used[HEAP] += 1
    while at > 0 and keys[(at - 1) >> 1] < key:
        above = (at - 1) >> 1
        keys[at], nodes[at], ranks[at] = keys[above], nodes[above], ranks[above]
        at = above
    keys[at], nodes[at], ranks[at] = key, node, rank


@inlined
def _pop(keys: Any, nodes: Any, ranks: Any, used: Any) -> None:
    """Drop the entry with the highest key."""
    used[HEAP] -= 1
    count = used[HEAP]
    key, node, rank = keys[count], nodes[count], ranks[count]
    at, below = 0, 1
    while below < count:
        if below + 1 < count and keys[below + 1] > keys[below]:
            below += 1
        if keys[below] <= key:
            break
        keys[at], nodes[at], ranks[at] = keys[below], nodes[below], ranks[below]
        at, below = below, 2 * below + 1
    keys[at], nodes[at], ranks[at] = key, node, rank


@inlined
def _prediction_of(work: Any, parent: Any, token: Any) -> Any:
    """The number of the prediction behind a child of a node with prediction `parent`; -1 for none."""
    if parent >= 0:
        for number in range(1, work.used[PREDICTED]):
            if work.mtp_parents[number] == parent and work.mtp_ids[number] == token:
                return number
    return -1


@inlined
def _add(work: Any, parent: Any, token: Any) -> Any:
    """A child, and its context."""
    node = work.used[NODES]
    work.used[NODES] += 1
    work.ids[node], work.parents[node], work.depths[node] = token, parent, work.depths[parent] + 1
    work.found[node], work.by_mtp[node] = -1, 0
    work.predicted[node] = _prediction_of(work, work.predicted[parent], token)
    for place in range(LONGEST - 1):
        work.tails[node, place + 1] = work.tails[parent, place]
    work.tails[node, 0] = token
    count = 0
    for at in range(work.spot_counts[parent]):
        spot = work.spots[parent, at]
        if work.text[spot] == token and spot + 1 < work.used[READ]:
            work.spots[node, count], work.agreed[node, count] = spot + 1, work.agreed[parent, at] + 1
            count += 1
    work.spot_counts[node] = count
    return node


@inlined
def _find_spots(text: Any, links: Any, last: Any, spots: Any, agreed: Any) -> Any:
    """The places behind the longest ends of a text that stood there before, later ones first; returns how many.

    Args:
        text: see `Work`.
        links: likewise.
        last: the number of its last token.
        spots: `[SPOTS]`, to be written.
        agreed: `[SPOTS]`, likewise.
    """
    count, number, looked_at = 0, links[last], 0
    while number >= 0 and looked_at < _LOOKED_AT:
        length = 1
        while length < _LONGEST_END and length <= number and text[number - length] == text[last - length]:
            length += 1
        place = count
        while place > 0 and length > agreed[place - 1]:
            if place < SPOTS:
                spots[place], agreed[place] = spots[place - 1], agreed[place - 1]
            place -= 1
        if place < SPOTS:
            spots[place], agreed[place] = number + 1, length
            count = min(count + 1, SPOTS)
        number = links[number]
        looked_at += 1
    return count


@inlined
def _is_among(tokens: Any, token: Any) -> bool:
    for at in range(tokens.shape[0]):  # noqa: SIM110 - numba compiles no generators
        if tokens[at] == token:
            return True
    return False


@inlined
def _note(work: Any, entries: Any) -> None:
    """Note what was said at the nodes of a tree, by their places; rows that come to one place are averaged."""
    best = np.empty(WIDTH, np.int32)
    for node in range(entries.shape[0] - 1, -1, -1):  # what comes last counts most: the likelier node
        place = work.used[ROOT] + work.depths[node]
        for kind in range(NEAR):
            token = work.ids[node] if kind == AT_TOKEN else -1
            slot = note_slot(work.notes, place, token)
            if work.notes[slot, 0] == place and work.notes[slot, 1] == token:
                average(best, work.notes, slot, entries, node)
                for entry in range(WIDTH):
                    work.notes[slot, 2 + entry] = best[entry]
            else:
                work.notes[slot, 0], work.notes[slot, 1] = place, token
                for entry in range(WIDTH):
                    work.notes[slot, 2 + entry] = entries[node, entry]


@compiled(HELD, TABLE, TABLE, MATRIX, TABLE, LONGS, LONGS, DOUBLE)
def learn_tree(
    held: Held,
    young: Ints,
    old: Ints,
    weights: Doubles,
    entries: Ints,
    path: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.int64],
    rate: float,
) -> None:
    """Learn how far rows and notes are to be trusted, and note what was said.

    Args:
        held: a tree that was fed.
        young: one table of the memory.
        old: the other.
        weights: `[LINES, END + 1]`, see `mixer`.
        entries: `[S, WIDTH]`, of the logits at each node.
        path: `[A]` nodes that verification has reached.
        chosen: `[A]` tokens that the model chose there.
        rate: of learning.
    """
    learn_weights(held.work, young, old, weights, path, chosen, rate)
    _note(held.work, entries)


@compiled(HELD, INT, LONGS, DOUBLE)
def plant(held: Held, root: int, tail: npt.NDArray[np.int64], promise: float) -> None:
    """Begin a new tree, whose root is token number `root` of the text, the last one of `tail`.

    Earlier places are known where the text has been read up to there.
    """
    work = held.work
    work.ids[0], work.parents[0], work.depths[0] = tail[tail.shape[0] - 1], -1, 0
    work.scores[0], work.found[0], work.by_mtp[0] = 1.0, -1, 0
    work.predicted[0] = 0 if work.used[PREDICTED] > 0 else -1
    for place in range(LONGEST):
        work.tails[0, place] = tail[tail.shape[0] - 1 - place] if place < tail.shape[0] else -1
    work.used[NODES], work.used[HEAP], work.used[ROOT] = 1, 0, root
    work.spot_counts[0] = 0
    if work.used[READ] == root + 1:
        work.spot_counts[0] = _find_spots(work.text, work.links, root, work.spots[0], work.agreed[0])
    if work.spot_counts[0] > 0 and work.agreed[0, 0] >= _COPIED:
        work.used[COPY] = root
    _push(work.keys, work.nodes, work.ranks, work.used, promise, 0, -1)


@compiled(HELD, TABLE, TABLE, MATRIX, MATRIX, LONGS, INT, INT, DOUBLE)
def grow(
    held: Held,
    young: Ints,
    old: Ints,
    weights: Doubles,
    stages: Doubles,
    excluded: npt.NDArray[np.int64],
    vocabulary: int,
    max_depth: int,
    promise: float,
) -> int:
    """Add the likeliest nodes, in falling order of what is known of their scores.

    Args:
        held: a tree, with room for as many nodes as the stages say.
        young: one table of the memory.
        old: the other.
        weights: of the mixer.
        stages: `[K, 2]`, sizes up to which to grow, one after the other until one is not reached, each with the score
            that a node must exceed on the way there.
        excluded: tokens not to add.
        vocabulary: tokens must be below.
        max_depth: of a node.
        promise: what the likeliest child of a node is supposed to have, where it is not known yet.

    Returns:
        The number of nodes.
    """
    work = held.work
    keys, nodes, ranks, used = work.keys, work.nodes, work.ranks, work.used
    for stage in range(stages.shape[0]):
        size, least = stages[stage, 0], stages[stage, 1]
        while used[HEAP] > 0 and used[NODES] < size and keys[0] > least:
            score, parent, rank = keys[0], nodes[0], ranks[0]
            _pop(keys, nodes, ranks, used)
            if rank < 0:
                expand(work, parent, young, old, weights)
            following = rank + 1
            if following < work.offers[parent] and work.depths[parent] < max_depth:
                odds, memory_odds = work.odds[parent], work.memory_odds[parent]
                bring_forward(work.tokens[parent], odds, memory_odds, work.offers[parent], following)
                key = work.scores[parent] * probability(work.odds[parent, following])
                _push(keys, nodes, ranks, used, key, parent, following)
            token = work.tokens[parent, rank] if rank >= 0 else vocabulary
            if token < vocabulary and not _is_among(excluded, token):
                node = _add(work, parent, token)
                work.scores[node] = score
                if work.predicted[parent] >= 0:
                    work.by_mtp[node] = led_by_mtp(work, parent, rank)
                _push(keys, nodes, ranks, used, promise * score, node, -1)
        if used[NODES] < size:
            break
    return int(work.used[NODES])


@compiled(HELD, TABLE, TABLE, MATRIX, LONGS, INT, INT, DOUBLE, DOUBLE, DOUBLE)
def grow_chain(
    held: Held,
    young: Ints,
    old: Ints,
    weights: Doubles,
    excluded: npt.NDArray[np.int64],
    vocabulary: int,
    most: int,
    price: float,
    news: float,
    first: float,
) -> int:
    """Add the likeliest child of the last node, again and again, while it is worth its price.

    A node's worth is the probability that it is accepted, and `news / (first + size - 1)` for what its logits teach,
    `size` being the number of nodes with it.

    Args:
        held: a tree that is its root, with room for `most` nodes.
        young: the memory's table that is written.
        old: the memory's other table.
        weights: of the mixer.
        excluded: tokens not to add.
        vocabulary: tokens must be below.
        most: nodes, the root included.
        price: tokens that one more node costs.
        news: see above, in tokens.
        first: see above, in nodes.

    Returns:
        The number of nodes.
    """
    work, node = held.work, 0
    while work.used[NODES] < most:
        expand(work, node, young, old, weights)
        rank, token = 0, -1
        while rank < work.offers[node] and token < 0:
            bring_forward(work.tokens[node], work.odds[node], work.memory_odds[node], work.offers[node], rank)
            offered = work.tokens[node, rank]
            if offered < vocabulary and not _is_among(excluded, offered):
                token = offered
            else:
                rank += 1
        if token < 0:
            break
        score = work.scores[node] * probability(work.odds[node, rank])
        if score + news / (first + work.used[NODES]) <= price:
            break
        node = _add(work, node, token)
        work.scores[node] = score
    return int(work.used[NODES])


@compiled(HELD, INT, LONGS, LONGS)
def follow(held: Held, kept: int, ids: npt.NDArray[np.int64], parents: npt.NDArray[np.int64]) -> None:
    """Keep the first nodes, and add what others have added to the tree, each with its token and parent."""
    work = held.work
    work.used[NODES] = kept
    for at in range(ids.shape[0]):
        _add(work, parents[at], ids[at])


@compiled(HELD, TABLE, TABLE, MATRIX, INT)
def look_up(held: Held, young: Ints, old: Ints, weights: Doubles, node: int) -> int:
    """Ask the memory about a node of a tree; returns the number of its offers, in no order."""
    expand(held.work, node, young, old, weights)
    return int(held.work.offers[node])
