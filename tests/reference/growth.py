"""Best-first growth of token trees, earlier occurrences of a suffix, and notes by position: `growth.cpp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lade.decoding.kernels.layout import (
    AT_TOKEN,
    COPY,
    HEAP,
    LONGEST,
    MOST_MATCHES,
    NODES,
    NOTE_KINDS,
    PREDICTED,
    READ,
    ROOT,
    Ints,
)
from lade.decoding.kernels.tables import Tables
from lade.decoding.kernels.work import Held, Work
from reference.mixing import bring_forward, expand, learn_weights, led_by_mtp, note_slot, probability
from reference.tables import average, learn_step

_LOOKED_AT = 128  # earlier occurrences of the last token that are examined
_LONGEST_END = 32  # longest match that is measured
_COPIED = 16  # length of a match that counts as a copy


def _push(work: Work, key: float, node: int, rank: int) -> None:
    """Push an entry onto the heap."""
    keys, nodes, ranks, at = work.keys, work.nodes, work.ranks, int(work.used[HEAP])
    work.used[HEAP] += 1
    while at > 0 and keys[(at - 1) >> 1] < key:
        above = (at - 1) >> 1
        keys[at], nodes[at], ranks[at] = keys[above], nodes[above], ranks[above]
        at = above
    keys[at], nodes[at], ranks[at] = key, node, rank


def _pop(work: Work) -> tuple[float, int, int]:
    """Remove the entry with the highest key, and return it."""
    keys, nodes, ranks = work.keys, work.nodes, work.ranks
    first = float(keys[0]), int(nodes[0]), int(ranks[0])
    work.used[HEAP] -= 1
    count = int(work.used[HEAP])
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
    return first


def _prediction_of(work: Work, parent: int, token: int) -> int:
    """Return the index of the prediction after a child, given that of its parent; -1 for none."""
    if parent >= 0:
        for number in range(1, int(work.used[PREDICTED])):
            if work.mtp_parents[number] == parent and work.mtp_ids[number] == token:
                return number
    return -1


def _add(work: Work, parent: int, token: int) -> int:
    """Add a child with its context and matches; return its node."""
    node = int(work.used[NODES])
    work.used[NODES] += 1
    work.ids[node], work.parents[node], work.depths[node] = token, parent, work.depths[parent] + 1
    work.logit_hits[node], work.by_mtp[node] = -1, 0
    work.predicted[node] = _prediction_of(work, int(work.predicted[parent]), token)
    work.tails[node, 1:], work.tails[node, 0] = work.tails[parent, :-1], token
    count = 0
    for at in range(work.match_counts[parent]):
        match = int(work.matches[parent, at])
        if work.text[match] == token and match + 1 < work.used[READ]:
            work.matches[node, count], work.match_lengths[node, count] = match + 1, work.match_lengths[parent, at] + 1
            count += 1
    work.match_counts[node] = count
    return node


def _occurrences(work: Work, last: int) -> Iterator[tuple[int, int]]:
    """Yield the earlier occurrences of the token at index `last`, later ones first, with the length of each match."""
    number = int(work.links[last])
    for _ in range(_LOOKED_AT):
        if number < 0:
            return
        end, before = work.text[last - min(_LONGEST_END, last + 1) + 1 : last + 1][::-1], work.text[: number + 1][::-1]
        size = min(len(end), len(before), _LONGEST_END)
        different = np.flatnonzero(end[:size] != before[:size])
        yield number, int(different[0]) if len(different) else size
        number = int(work.links[number])


def _find_matches(work: Work, last: int) -> int:
    """Find the earlier occurrences with the longest matching suffix, later ones first; return their number."""
    found = sorted(_occurrences(work, last), key=lambda match: -match[1])[:MOST_MATCHES]
    for place, (number, length) in enumerate(found):
        work.matches[0, place], work.match_lengths[0, place] = number + 1, length
    return len(found)


def _note(work: Work, entries: Ints) -> None:
    """Note the logits at all nodes of a tree by position; rows for the same slot are averaged."""
    for node in range(len(entries) - 1, -1, -1):  # the last one weighs most: the likeliest node
        place, row = int(work.used[ROOT] + work.depths[node]), entries[node].tolist()
        for kind in range(NOTE_KINDS):
            token = int(work.ids[node]) if kind == AT_TOKEN else -1
            note = work.notes[note_slot(work, place, token)]
            known = note[0] == place and note[1] == token
            note[2:] = average(note[2:].tolist(), row) if known else row
            note[:2] = place, token


def index_text(held: Held, tokens: Sequence[int]) -> None:
    """Append tokens to the text, which has room for them, each with its previous occurrence."""
    work = held.work
    for at, token in enumerate(tokens, start=int(work.used[READ])):
        latest = _latest_of(work, token)
        work.text[at], work.links[at] = token, max(int(latest[1]), -1)
        latest[:] = token, at
    work.used[READ] += len(tokens)


def take_back(held: Held, kept: int) -> None:
    """Forget all tokens of the text but the first `kept` ones."""
    work = held.work
    for at in range(int(work.used[READ]) - 1, kept - 1, -1):
        _latest_of(work, int(work.text[at]))[1] = work.links[at]
    work.used[READ] = kept


def _latest_of(work: Work, token: int) -> Ints:
    """Return where the last occurrence of a token is kept, a pair; a slot that is free has the index -2."""
    latest = work.latest
    slot = ((token & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF) * len(latest) >> 32
    while latest[slot, 1] != -2 and latest[slot, 0] != token:
        slot = (slot + 1) % len(latest)
    pair: Ints = latest[slot]
    return pair


def learn_tree(
    held: Held, tables: Tables, entries: Ints, path: Sequence[int], chosen: Sequence[int], rate: float
) -> bool:
    """Update the mixing weights by the nodes that verification reached; note and store the logits at all nodes."""
    learn_weights(held.work, tables, path, chosen, rate)
    _note(held.work, entries)
    return learn_step(tables, held.work.tails[: max(len(entries), 1 + max(path))], entries, path, chosen)


def plant(held: Held, root: int, promise: float) -> None:
    """Start a new tree, whose root is the token at index `root` of the text.

    Unless the text has been read up to the root, there are no matches, and the root's context must be in place.
    """
    work = held.work
    if work.used[READ] == root + 1:
        last = work.text[: root + 1][::-1][:LONGEST]
        work.tails[0], work.tails[0, : len(last)] = -1, last
    work.ids[0], work.parents[0], work.depths[0] = work.tails[0, 0], -1, 0
    work.scores[0], work.logit_hits[0], work.by_mtp[0] = 1.0, -1, 0
    work.predicted[0] = 0 if work.used[PREDICTED] > 0 else -1
    work.used[NODES], work.used[HEAP], work.used[ROOT] = 1, 0, root
    work.match_counts[0] = _find_matches(work, root) if work.used[READ] == root + 1 else 0
    if work.match_counts[0] > 0 and work.match_lengths[0, 0] >= _COPIED:
        work.used[COPY] = root
    _push(work, promise, 0, -1)


def grow(
    held: Held,
    tables: Tables,
    stages: Sequence[float],
    excluded: Sequence[int],
    vocabulary: int,
    max_depth: int,
    promise: float,
) -> int:
    """Add the likeliest nodes, best first."""
    work = held.work
    for size, least in zip(stages[::2], stages[1::2], strict=True):
        while work.used[HEAP] > 0 and work.used[NODES] < size and work.keys[0] > least:
            score, parent, rank = _pop(work)
            if rank < 0:
                expand(work, parent, tables)
            if rank + 1 < work.candidates[parent] and work.depths[parent] < max_depth:
                bring_forward(work, parent, rank + 1)
                key = float(work.scores[parent]) * probability(float(work.odds[parent, rank + 1]))
                _push(work, key, parent, rank + 1)
            token = int(work.tokens[parent, rank]) if rank >= 0 else vocabulary
            if token < vocabulary and token not in excluded:
                node = _add(work, parent, token)
                work.scores[node] = score
                if work.predicted[parent] >= 0:
                    work.by_mtp[node] = led_by_mtp(work, parent, rank)
                _push(work, promise * score, node, -1)
        if work.used[NODES] < size:
            break
    return int(work.used[NODES])


def grow_chain(
    held: Held,
    tables: Tables,
    excluded: Sequence[int],
    vocabulary: int,
    most: int,
    price: float,
    news: float,
    first: float,
) -> int:
    """Add the likeliest child of the last node, again and again, while it is worth its price."""
    work, node = held.work, 0
    while work.used[NODES] < most:
        expand(work, node, tables)
        rank = _first_offer(work, node, excluded, vocabulary)
        if rank == work.candidates[node]:
            break
        score = float(work.scores[node]) * probability(float(work.odds[node, rank]))
        if score + news / (first + int(work.used[NODES])) <= price:
            break
        node = _add(work, node, int(work.tokens[node, rank]))
        work.scores[node] = score
    return int(work.used[NODES])


def _first_offer(work: Work, node: int, excluded: Sequence[int], vocabulary: int) -> int:
    """Move the likeliest child that may be added to the front; return its rank, or the number of candidates."""
    for rank in range(work.candidates[node]):
        bring_forward(work, node, rank)
        token = work.tokens[node, rank]
        if token < vocabulary and token not in excluded:
            return rank
    return int(work.candidates[node])


def follow(held: Held, kept: int, ids: Sequence[int], parents: Sequence[int]) -> None:
    """Keep the first `kept` nodes, and append nodes that were added elsewhere, given their tokens and parents."""
    work = held.work
    work.used[NODES] = kept
    for token, parent in zip(ids, parents, strict=True):
        _add(work, parent, token)


def candidates(held: Held, tables: Tables, node: int) -> int:
    """Expand a node; return the number of its candidates, which are not sorted."""
    expand(held.work, node, tables)
    return int(held.work.candidates[node])
