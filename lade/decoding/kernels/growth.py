"""Best-first growth of token trees, earlier occurrences of a suffix, and notes by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lade.compilation import compiled
from lade.decoding.kernels.layout import (
    AT_TOKEN,
    COPY,
    DOUBLE,
    HEAP,
    INT,
    LONGEST,
    LONGS,
    MATRIX,
    MOST_MATCHES,
    NODES,
    NOTE_KINDS,
    PREDICTED,
    READ,
    ROOT,
    TABLE,
    WIDTH,
    Doubles,
    Ints,
    inlined,
)
from lade.decoding.kernels.mixing import bring_forward, expand, learn_weights, led_by_mtp, note_slot, probability
from lade.decoding.kernels.tables import average
from lade.decoding.kernels.work import HELD, Held

_LOOKED_AT = 128  # earlier occurrences of the last token that are examined
_LONGEST_END = 32  # longest match that is measured
_COPIED = 16  # length of a match that counts as a copy


@inlined
def _push(keys: Any, nodes: Any, ranks: Any, used: Any, key: Any, node: Any, rank: Any) -> None:
    """Push an entry onto the heap."""
    at = used[HEAP]
    used[HEAP] += 1
    while at > 0 and keys[(at - 1) >> 1] < key:
        above = (at - 1) >> 1
        keys[at], nodes[at], ranks[at] = keys[above], nodes[above], ranks[above]
        at = above
    keys[at], nodes[at], ranks[at] = key, node, rank


@inlined
def _pop(keys: Any, nodes: Any, ranks: Any, used: Any) -> None:
    """Pop the entry with the highest key."""
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
    """Return the index of the prediction after a child, given that of its parent; -1 for none."""
    if parent >= 0:
        for number in range(1, work.used[PREDICTED]):
            if work.mtp_parents[number] == parent and work.mtp_ids[number] == token:
                return number
    return -1


@inlined
def _add(work: Any, parent: Any, token: Any) -> Any:
    """Add a child with its context and matches; return its node."""
    node = work.used[NODES]
    work.used[NODES] += 1
    work.ids[node], work.parents[node], work.depths[node] = token, parent, work.depths[parent] + 1
    work.logit_hits[node], work.by_mtp[node] = -1, 0
    work.predicted[node] = _prediction_of(work, work.predicted[parent], token)
    for place in range(LONGEST - 1):
        work.tails[node, place + 1] = work.tails[parent, place]
    work.tails[node, 0] = token
    count = 0
    for at in range(work.match_counts[parent]):
        match = work.matches[parent, at]
        if work.text[match] == token and match + 1 < work.used[READ]:
            work.matches[node, count], work.match_lengths[node, count] = match + 1, work.match_lengths[parent, at] + 1
            count += 1
    work.match_counts[node] = count
    return node


@inlined
def _find_matches(text: Any, links: Any, last: Any, matches: Any, match_lengths: Any) -> Any:
    """Find the earlier occurrences with the longest matching suffix, later ones first; return their number.

    Args:
        text: the text, see `Work`.
        links: previous occurrence of each token, see `Work`.
        last: index of the last token.
        matches: `[MOST_MATCHES]`, written: index of the token after each match.
        match_lengths: `[MOST_MATCHES]`, written: number of matching tokens.
    """
    count, number, looked_at = 0, links[last], 0
    while number >= 0 and looked_at < _LOOKED_AT:
        length = 1
        while length < _LONGEST_END and length <= number and text[number - length] == text[last - length]:
            length += 1
        place = count
        while place > 0 and length > match_lengths[place - 1]:
            if place < MOST_MATCHES:
                matches[place], match_lengths[place] = matches[place - 1], match_lengths[place - 1]
            place -= 1
        if place < MOST_MATCHES:
            matches[place], match_lengths[place] = number + 1, length
            count = min(count + 1, MOST_MATCHES)
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
    """Note the logits at all nodes of a tree by position; rows for the same slot are averaged."""
    best = np.empty(WIDTH, np.int32)
    for node in range(entries.shape[0] - 1, -1, -1):  # the last one weighs most: the likeliest node
        place = work.used[ROOT] + work.depths[node]
        for kind in range(NOTE_KINDS):
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
    """Update the mixing weights by the nodes that verification reached, and note the logits at all nodes.

    Args:
        held: a tree that was fed.
        young: the memory's current table.
        old: the memory's former table.
        weights: `[WEIGHT_SETS, END + 1]`, see `memory.prior_weights`.
        entries: `[S, WIDTH]` entries of the logits at each node.
        path: `[A]` nodes that verification reached.
        chosen: `[A]` tokens that the model chose there.
        rate: learning rate.
    """
    learn_weights(held.work, young, old, weights, path, chosen, rate)
    _note(held.work, entries)


@compiled(HELD, INT, LONGS, DOUBLE)
def plant(held: Held, root: int, tail: npt.NDArray[np.int64], promise: float) -> None:
    """Start a new tree, whose root is the token at index `root` of the text, the last one of `tail`.

    Matches are found only if the text has been read up to the root. The root's heap key is `promise`.
    """
    work = held.work
    work.ids[0], work.parents[0], work.depths[0] = tail[tail.shape[0] - 1], -1, 0
    work.scores[0], work.logit_hits[0], work.by_mtp[0] = 1.0, -1, 0
    work.predicted[0] = 0 if work.used[PREDICTED] > 0 else -1
    for place in range(LONGEST):
        work.tails[0, place] = tail[tail.shape[0] - 1 - place] if place < tail.shape[0] else -1
    work.used[NODES], work.used[HEAP], work.used[ROOT] = 1, 0, root
    work.match_counts[0] = 0
    if work.used[READ] == root + 1:
        work.match_counts[0] = _find_matches(work.text, work.links, root, work.matches[0], work.match_lengths[0])
    if work.match_counts[0] > 0 and work.match_lengths[0, 0] >= _COPIED:
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
    """Add the likeliest nodes, best first.

    Args:
        held: a tree with room for the size of the last stage.
        young: the memory's current table.
        old: the memory's former table.
        weights: `[WEIGHT_SETS, END + 1]`, weights of the mixer.
        stages: `[K, 2]`, target sizes, each with the score that a node must exceed to be added up to that size; growth
            ends with the first size that is not reached.
        excluded: ids that are not added.
        vocabulary: V; ids from here on are not added.
        max_depth: maximum depth of a node.
        promise: probability assumed for the likeliest child of a node that has not been expanded yet.

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
            if following < work.candidates[parent] and work.depths[parent] < max_depth:
                odds, memory_odds = work.odds[parent], work.memory_odds[parent]
                bring_forward(work.tokens[parent], odds, memory_odds, work.candidates[parent], following)
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
        weights: `[LINES, END + 1]`, those of the mixer.
        excluded: ids that are not added.
        vocabulary: V; ids from here on are not added.
        most: maximum number of nodes, root included.
        price: tokens that one more node costs.
        news: tokens that `first` divides, see above.
        first: number of nodes, see above.

    Returns:
        The number of nodes.
    """
    work, node = held.work, 0
    while work.used[NODES] < most:
        expand(work, node, young, old, weights)
        rank, token = 0, -1
        while rank < work.candidates[node] and token < 0:
            bring_forward(work.tokens[node], work.odds[node], work.memory_odds[node], work.candidates[node], rank)
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
    """Keep the first `kept` nodes, and append nodes that were added elsewhere, given their tokens and parents."""
    work = held.work
    work.used[NODES] = kept
    for at in range(ids.shape[0]):
        _add(work, parents[at], ids[at])


@compiled(HELD, TABLE, TABLE, MATRIX, INT)
def look_up(held: Held, young: Ints, old: Ints, weights: Doubles, node: int) -> int:
    """Expand a node; return the number of its candidates, which are not sorted."""
    expand(held.work, node, young, old, weights)
    return int(held.work.candidates[node])
