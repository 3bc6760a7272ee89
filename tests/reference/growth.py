"""Growing trees: best-first growth, earlier occurrences of a suffix, notes by position: `tree.cpp`, `growth.cpp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lade.decoding.kernels.layout import MTP_WIDTH, NOTE_KINDS, Doubles, Ints
from lade.decoding.kernels.native_tree import Columns, PredictionRows
from lade.decoding.kernels.tables import Tables
from reference.mixing import bring_forward, expand, learn_weights, led_by_mtp, note_slot, probability
from reference.tables import average, learn_step
from reference.tree import AT_TOKEN, MOST_MATCHES, NEW_NODE, Tree

_LOOKED_AT = 128  # earlier occurrences of the last token that are examined
_LONGEST_END = 32  # longest match that is measured
_COPIED = 16  # length of a match that counts as a copy


def _push(tree: Tree, key: float, node: int, rank: int) -> None:
    """Push an entry onto the heap."""
    heap, at = tree.heap, len(tree.heap)
    heap.append((key, node, rank))
    while at > 0 and heap[(at - 1) >> 1][0] < key:
        above = (at - 1) >> 1
        heap[at] = heap[above]
        at = above
    heap[at] = key, node, rank


def _pop(tree: Tree) -> tuple[float, int, int]:
    """Remove the entry with the highest key, and return it."""
    heap = tree.heap
    first, last = heap[0], heap.pop()
    at, below = 0, 1
    while below < len(heap):
        if below + 1 < len(heap) and heap[below + 1][0] > heap[below][0]:
            below += 1
        if heap[below][0] <= last[0]:
            break
        heap[at] = heap[below]
        at, below = below, 2 * below + 1
    if heap:
        heap[at] = last
    return first


def _prediction_of(tree: Tree, parent: int, token: int) -> int:
    """Return the index of the prediction after a child, given that of its parent; -1 for none."""
    if parent >= 0:
        for number in range(1, tree.predicted):
            if tree.predictions["parent"][number] == parent and tree.predictions["token"][number] == token:
                return number
    return -1


def _add(tree: Tree, parent: int, token: int) -> int:
    """Add a child with its context and matches; return its node."""
    node = tree.count
    tree.count += 1
    tree.nodes[node] = NEW_NODE
    tree.id[node], tree.parent[node], tree.depth[node] = token, parent, tree.depth[parent] + 1
    tree.prediction[node] = _prediction_of(tree, int(tree.prediction[parent]), token)
    tree.tail[node, 1:], tree.tail[node, 0] = tree.tail[parent, :-1], token
    count = 0
    for match, length in tree.matches[parent, : tree.match_count[parent]].tolist():
        if tree.text[match] == token and match + 1 < len(tree.text):
            tree.matches[node, count] = match + 1, length + 1
            count += 1
    tree.match_count[node] = count
    return node


def _occurrences(tree: Tree, last: int) -> Iterator[tuple[int, int]]:
    """Yield the earlier occurrences of the token at index `last`, later ones first, with the length of each match."""
    text, number = np.array(tree.text), tree.links[last]
    for _ in range(_LOOKED_AT):
        if number < 0:
            return
        end, before = text[last - min(_LONGEST_END, last + 1) + 1 : last + 1][::-1], text[: number + 1][::-1]
        size = min(len(end), len(before), _LONGEST_END)
        different = np.flatnonzero(end[:size] != before[:size])
        yield number, int(different[0]) if len(different) else size
        number = tree.links[number]


def _find_matches(tree: Tree, last: int) -> int:
    """Find the earlier occurrences with the longest matching suffix, later ones first; return their number."""
    found = sorted(_occurrences(tree, last), key=lambda match: -match[1])[:MOST_MATCHES]
    for place, (number, length) in enumerate(found):
        tree.matches[0, place] = number + 1, length
    return len(found)


def _note(tree: Tree, entries: Ints) -> None:
    """Note the logits at all nodes of a tree by position; rows for the same slot are averaged."""
    for node in range(len(entries) - 1, -1, -1):  # the last one weighs most: the likeliest node
        place, row = tree.root + int(tree.depth[node]), entries[node].tolist()
        for kind in range(NOTE_KINDS):
            token = int(tree.id[node]) if kind == AT_TOKEN else -1
            note = tree.notes[note_slot(tree, place, token) :][:1]
            known = note["place"] == place and note["token"] == token
            note["row"] = average(note["row"][0].tolist(), row) if known else row
            note["place"], note["token"] = place, token


def index_text(tree: Tree, tokens: Sequence[int]) -> None:
    """Append tokens to the text, each with its previous occurrence."""
    for token in tokens:
        tree.links.append(max((at for at, before in enumerate(tree.text) if before == token), default=-1))
        tree.text.append(token)


def _read(tree: Tree, start: int, tokens: Sequence[int]) -> None:
    """Index a text, given its tokens from `start` on."""
    same = 0
    while same < len(tokens) and tree.text[start + same : start + same + 1] == [tokens[same]]:
        same += 1
    del tree.text[start + same :], tree.links[start + same :]
    index_text(tree, tokens[same:])


def _use_mtp(tree: Tree, weights: Doubles, trust: Doubles) -> None:
    """Mix predictions of an MTP layer with these weights."""
    tree.mtp_weights, tree.mtp_trust = weights, trust


def _set_prompt(tree: Tree, length: int) -> None:
    """Set the length of the prompt."""
    tree.prompt = length


def _learn_tree(
    tree: Tree, tables: Tables, entries: Ints, path: Sequence[int], chosen: Sequence[int], rate: float
) -> int:
    """Update the mixing weights by the nodes that verification reached; note and store the logits at all nodes."""
    if len(entries) > tree.count or not all(0 <= node < tree.count for node in path):
        return -1
    learn_weights(tree, tables, path, chosen, rate)
    _note(tree, entries)
    return learn_step(tables, tree.tail[: tree.count], entries, path, chosen)


def plant(tree: Tree, root: int, last: Sequence[int], promise: float) -> None:
    """Start a new tree, whose root is the token at index `root` of the text, after the last ones, `last`.

    Unless the text has been read up to the root, there are no matches.
    """
    tree.nodes[0], tree.count, tree.heap, tree.root = NEW_NODE, 1, [], root
    tree.tail[0], tree.tail[0, : len(last)] = -1, list(last)[::-1]
    tree.id[0] = last[-1]
    tree.prediction[0] = 0 if tree.predicted else -1
    if len(tree.text) == root + 1:
        tree.match_count[0] = _find_matches(tree, root)
    if tree.match_count[0] > 0 and tree.matches[0, 0, 1] >= _COPIED:
        tree.copy = root
    _push(tree, promise, 0, -1)


def _start(tree: Tree, root: int, last: Sequence[int]) -> None:
    """Start a new tree."""
    plant(tree, root, last, 0.0)


def grow(tree: Tree, tables: Tables, stages: Sequence[float], max_depth: int, promise: float) -> None:
    """Add the likeliest nodes, best first."""
    for size, least in zip(stages[::2], stages[1::2], strict=True):
        while tree.heap and tree.count < size and tree.heap[0][0] > least:
            score, parent, rank = _pop(tree)
            if rank < 0:
                expand(tree, parent, tables)
            if rank + 1 < tree.candidates[parent] and tree.depth[parent] < max_depth:
                bring_forward(tree, parent, rank + 1)
                key = float(tree.score[parent]) * probability(float(tree.odds[parent, rank + 1]))
                _push(tree, key, parent, rank + 1)
            token = int(tree.tokens[parent, rank])
            if rank >= 0 and token < tree.vocabulary and token not in tree.excluded:
                node = _add(tree, parent, token)
                tree.score[node] = score
                if tree.prediction[parent] >= 0:
                    tree.by_mtp[node] = led_by_mtp(tree, parent, rank)
                _push(tree, promise * score, node, -1)
        if tree.count < size:
            break


def _write(tree: Tree, columns: Columns) -> int:
    """Write what is read of a tree, and return the number of nodes."""
    for row, name in enumerate(("id", "parent", "depth", "prediction", "by_mtp")):
        columns.numbers[row, : tree.count] = tree.nodes[name][: tree.count]
    columns.scores[: tree.count] = tree.score[: tree.count]
    return tree.count


def _grow(
    tree: Tree,
    tables: Tables,
    root: int,
    last: Sequence[int],
    lead: int,
    predictions: PredictionRows,
    predicted: int,
    stages: Sequence[float],
    max_depth: int,
    promise: float,
    columns: Columns,
) -> int:
    """Start a tree with a chain of forced tokens, add the likeliest nodes, and write what is read of it."""
    tree.predicted = predicted
    for number, (parent, token, depth) in enumerate(predictions.places[:, :predicted].T.tolist()):
        assert predictions.tokens.shape[1] == MTP_WIDTH
        tree.predictions[number] = (parent, token, depth + 1, predictions.tokens[number], predictions.odds[number])
    split = len(last) - lead
    plant(tree, root, last[:split], promise)
    for node, token in enumerate(last[split:]):
        tree.heap[0] = promise, _add(tree, node, token), -1
    grow(tree, tables, stages, max_depth, promise)
    return _write(tree, columns)


def grow_chain(tree: Tree, tables: Tables, most: int, price: float, news: float, first: float) -> None:
    """Add the likeliest child of the last node, again and again, while it is worth its price."""
    node = 0
    while tree.count < most:
        expand(tree, node, tables)
        rank = _first_offer(tree, node)
        if rank == tree.candidates[node]:
            break
        score = float(tree.score[node]) * probability(float(tree.odds[node, rank]))
        if score + news / (first + tree.count) <= price:
            break
        node = _add(tree, node, int(tree.tokens[node, rank]))
        tree.score[node] = score


def _first_offer(tree: Tree, node: int) -> int:
    """Move the likeliest child that may be added to the front; return its rank, or the number of candidates."""
    for rank in range(tree.candidates[node]):
        bring_forward(tree, node, rank)
        token = tree.tokens[node, rank]
        if token < tree.vocabulary and token not in tree.excluded:
            return rank
    return int(tree.candidates[node])


def _keep(tree: Tree, nodes: Sequence[int], columns: Columns) -> int:
    """Drop all nodes but these."""
    tree.count = len(nodes)
    tree.nodes[: tree.count] = tree.nodes[nodes]
    tree.parent[1 : tree.count] = [nodes.index(parent) for parent in tree.parent[1 : tree.count]]
    return _write(tree, columns)


def _extend(tree: Tree, kept: int, ids: Sequence[int], parents: Sequence[int]) -> None:
    """Keep the first `kept` nodes, and append nodes that were added elsewhere, given their tokens and parents."""
    tree.count = kept
    for token, parent in zip(ids, parents, strict=True):
        _add(tree, parent, token)


def _contexts(tree: Tree, nodes: Sequence[int], tails: Ints) -> None:
    """Write the contexts of nodes."""
    tails[:] = tree.tail[[*nodes]]


def _candidates(tree: Tree, tables: Tables, nodes: Sequence[int], tokens: Ints) -> int:
    """Expand nodes; write their candidates, which are not sorted, and return the number of all."""
    end = 0
    for node in nodes:
        expand(tree, node, tables)
        count = int(tree.candidates[node])
        tokens[end : end + count] = tree.tokens[node, :count]
        end += count
    return end
