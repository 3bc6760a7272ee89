"""Mix rows of logits, notes and earlier occurrences into probabilities, and learn the weights: `mixing.cpp`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lade.decoding.kernels.layout import (
    BITS,
    COPY_KINDS,
    END,
    FLOOR,
    MTP_DEPTHS,
    MTP_INPUTS,
    NOTE_KINDS,
    ORDERS,
    SCALE,
    TEXT,
    TEXT_ORDERS,
    TOKEN,
    WIDTH,
    Doubles,
)
from lade.decoding.kernels.tables import Tables
from reference.tables import SEED, find_rows, lengthened
from reference.tree import AFTER_COPY, AT_TOKEN, EACH, LATEST, LENGTH_BUCKETS, Tree

_NEGLIGIBLE = -4.6  # log-odds of about 1 %; below it only the chosen token takes part in learning
_MTP_RATE = 1.0  # factor of the learning rate for the final mixing, whose inputs are calibrated already
_TRUST_RATE = 20.0  # factor for the layer's share, a single number that every node updates
_MOST_TRUST = 5.0  # log-odds
_MOST_ODDS = -2.0 * FLOOR  # log-odds of the memory in the final mixing, either way: twice those of a row
_NOT_SEEN = 0.4  # pseudo-count of an unseen token after the matches

Row = Sequence[int]
Weighted = tuple[Row, float]


def probability(log_odds: float) -> float:
    """Return the probability of log-odds."""
    try:
        return 1.0 / (1.0 + math.exp(-log_odds))
    except OverflowError:
        return 0.0


def note_slot(tree: Tree, place: int, token: int) -> int:
    """Return the slot of the note for a position, and for a token there or -1."""
    return (lengthened(lengthened(SEED, place), token) >> 40) % len(tree.notes)


def _recall(tree: Tree, node: int) -> int:
    """Copy the notes for a node's position and for its token there; return the bit set of kinds present."""
    note_kinds, place = 0, int(tree.root + tree.depth[node])
    for kind in range(NOTE_KINDS):
        of = int(tree.id[node]) if kind == AT_TOKEN else -1
        slot = note_slot(tree, place, of)
        if tree.notes["place"][slot] == place and tree.notes["token"][slot] == of:
            note_kinds |= 1 << kind
            tree.note_rows[node, kind] = tree.notes["row"][slot]
    return note_kinds


def _line(tree: Tree, node: int) -> int:
    """Return the index of the weight set in use, given the numbers of hits."""
    return int(tree.logit_hits[node]) * (len(TEXT_ORDERS) + 1) + int(tree.text_hits[node])


def _rows(tree: Tree, node: int) -> Iterator[tuple[int, Row]]:
    """Yield a node's rows of logits and text, each with its kind."""
    for kind in (*range(tree.logit_hits[node]), *range(TEXT, TEXT + tree.text_hits[node])):
        yield kind, tree.rows[node, kind].tolist()


def _notes(tree: Tree, node: int) -> Iterator[tuple[int, Row]]:
    """Yield a node's notes, each with its kind."""
    for kind in range(NOTE_KINDS):
        if tree.note_kinds[node] >> kind & 1:
            yield kind, tree.note_rows[node, kind].tolist()


def _mix(tree: Tree, node: int, weights: Doubles) -> tuple[dict[int, float], float]:
    """Mix a node's rows, notes and copies into log-odds; a token that a row misses counts `FLOOR` there.

    Returns:
        The log-odds of all tokens that any row suggests, and those of a token that nothing suggests.
    """
    line, note_line = weights[_line(tree, node)].tolist(), tree.note_weights[tree.note_kinds[node]].tolist()
    copies: list[Weighted] = []
    base = line[END] + note_line[NOTE_KINDS]
    rows = [(row, line[kind]) for kind, row in _rows(tree, node)]
    notes = [(row, note_line[kind]) for kind, row in _notes(tree, node)]
    for _, weight in (*rows, *notes):
        base += FLOOR * weight
    if tree.copy_line[node] >= 0:
        copy_line = tree.copy_weights[tree.copy_line[node]].tolist()
        copies = [(tree.copy_rows[node, kind].tolist(), copy_line[kind]) for kind in range(COPY_KINDS)]
        base += copy_line[COPY_KINDS]
        for _, weight in copies:
            base += FLOOR * weight
    odds: dict[int, float] = {}
    for row, weight in (*rows, *notes, *copies):
        step = weight * SCALE
        for entry in row:
            if (token := entry & TOKEN) != TOKEN:
                odds[token] = odds.get(token, base) + step * (entry >> BITS)
    return odds, base


def _length_bucket(length: int) -> int:
    """Return the bucket of a match length, see `LENGTH_BUCKETS`."""
    if length <= 3:
        return length - 1
    if length <= 7:
        return 3 if length <= 5 else 4
    return 5 if length <= 15 else 6


def _write_copy_rows(tree: Tree, node: int) -> int:
    """Write the tokens after a node's matches as rows; return the index within a set of copy weights."""
    count, rows = int(tree.match_count[node]), tree.copy_rows[node]
    tokens = [tree.text[match] for match in tree.matches[node, :count, 0]]
    rows[:] = TOKEN
    different = [token for token in dict.fromkeys(tokens) if 0 <= token < TOKEN]
    if different:
        rows[LATEST, 0] = 255 << BITS | different[0]
    for place, token in enumerate(different[:WIDTH]):
        same = tokens.count(token)
        value = (math.log(same / (count - same + _NOT_SEEN)) - FLOOR) / SCALE
        rows[EACH, place] = int(min(max(value + 0.5, 0.0), 255.0)) << BITS | token
    return 2 * _length_bucket(int(tree.matches[node, 0, 1])) + (len(different) == 1)


def _copy_set(tree: Tree, place: int) -> int:
    """Return the first index of a set of copy weights: by match in the prompt or answer, and before or after a copy."""
    of_prompt, copying = place < tree.prompt, tree.root - tree.copy < AFTER_COPY
    return 2 * LENGTH_BUCKETS * ((0 if of_prompt else 1) + (2 if copying else 0))


def expand(tree: Tree, node: int, tables: Tables) -> None:
    """Look up memory, notes and matches for a node and mix them; does nothing the second time."""
    if tree.logit_hits[node] >= 0:
        return
    hits = find_rows(tables.young, tables.old, tree.tail[node].tolist(), tree.rows[node])
    tree.note_kinds[node], tree.copy_line[node] = _recall(tree, node), -1
    if tree.match_count[node] > 0:
        tree.copy_line[node] = _write_copy_rows(tree, node) + _copy_set(tree, tree.matches[node, 0, 0])
    tree.logit_hits[node], tree.text_hits[node] = hits
    odds, base = _mix(tree, node, tables.weights)
    tree.candidates[node] = len(odds)
    tree.tokens[node, : len(odds)], tree.odds[node, : len(odds)] = list(odds), list(odds.values())
    if tree.prediction[node] >= 0:
        _mix_prediction(tree, node, base)


def _mtp_line(tree: Tree, node: int) -> int:
    """Return the index of the final mixing's weights in use."""
    depth = min(int(tree.predictions["depth"][tree.prediction[node]]), MTP_DEPTHS) - 1
    return depth * (len(ORDERS) + 1) + int(tree.logit_hits[node])


def _prediction(tree: Tree, node: int) -> dict[int, float]:
    """Return the log-odds of the tokens that the layer predicts after a node's parent; the first of equal tokens."""
    number = tree.prediction[node]
    pairs = zip(tree.predictions["tokens"][number].tolist(), tree.predictions["odds"][number].tolist(), strict=True)
    return {token: max(odds, FLOOR) for token, odds in reversed(list(pairs))}


def _mix_prediction(tree: Tree, node: int, base: float) -> None:
    """Final mixing: combine log-odds with the MTP layer's, and add tokens that only the layer suggests."""
    known, layer = int(tree.candidates[node]), _prediction(tree, node)
    memory = dict(zip(tree.tokens[node, :known].tolist(), tree.odds[node, :known].tolist(), strict=True))
    for token in tree.predictions["tokens"][tree.prediction[node]].tolist():
        if token < 0:
            break
        memory.setdefault(token, math.nan)
    tree.listed[node], tree.base[node] = len(memory), base
    line, share = tree.mtp_weights[_mtp_line(tree, node)].tolist(), probability(float(tree.mtp_trust[0]))
    for at, (token, log_odds) in enumerate(memory.items()):
        mixed = _weighed(line, _before(log_odds, base), layer.get(token, FLOOR))
        without = _before(log_odds, FLOOR)  # with a share of zero there is no such token
        odds = without + share * (mixed - without)
        tree.tokens[node, at], tree.odds[node, at], tree.memory_odds[node, at] = token, odds, log_odds
        if at >= known and odds >= _NEGLIGIBLE:  # less likely ones would displace cells of the lookahead window
            _swap(tree, node, known, at)
            known += 1
    tree.candidates[node] = known


def _before(log_odds: float, base: float) -> float:
    """Return the log-odds before the final mixing; `base` for NaN, which marks tokens that only the layer suggests.

    Clipped: sums over many rows reach -100, and one step along such a gradient would throw the weights far off.
    """
    return max(-_MOST_ODDS, min(base if math.isnan(log_odds) else log_odds, _MOST_ODDS))


def _weighed(line: Sequence[float], memory: float, layer: float) -> float:
    """Return the final mixing of the memory's and the layer's log-odds, with one line of weights."""
    return line[0] * memory + line[1] * layer + line[2] * max(memory, 0.0) + line[3]


def led_by_mtp(tree: Tree, parent: int, rank: int) -> bool:
    """Return True if the layer gives the child of this rank higher odds than the memory does."""
    layer = _prediction(tree, parent).get(int(tree.tokens[parent, rank]), FLOOR)
    return layer > max(_before(float(tree.memory_odds[parent, rank]), float(tree.base[parent])), FLOOR)


def _swap(tree: Tree, node: int, one: int, other: int) -> None:
    """Swap two candidates."""
    for column in (tree.tokens[node], tree.odds[node], tree.memory_odds[node]):
        column[one], column[other] = column[other], column[one]


def bring_forward(tree: Tree, node: int, rank: int) -> None:
    """One step of a selection sort: move the likeliest candidate from index `rank` on to that index."""
    odds = tree.odds[node, rank : tree.candidates[node]].tolist()
    _swap(tree, node, rank, rank + odds.index(max(odds)))


def _value(row: Row, token: int) -> int:
    """Return the quantised log-odds of a token in a row; 0 if it is not listed."""
    return next((entry >> BITS for entry in row if entry & TOKEN == token), 0)


def _errors(tree: Tree, node: int, chosen: int) -> list[tuple[int, float]]:
    """Return the candidates that take part in learning, each with its error before any final mixing."""
    column = tree.memory_odds if tree.prediction[node] >= 0 else tree.odds
    count = tree.candidates[node]
    return [
        (token, (1.0 if token == chosen else 0.0) - probability(log_odds))
        for token, log_odds in zip(tree.tokens[node, :count].tolist(), column[node, :count].tolist(), strict=True)
        if not math.isnan(log_odds) and (token == chosen or not log_odds < _NEGLIGIBLE)
    ]


def _learn_copies(tree: Tree, node: int, errors: Sequence[tuple[int, float]], rate: float) -> None:
    """Update the copy weights of a node by one gradient step."""
    rows, line = tree.copy_rows[node].tolist(), tree.copy_line[node]
    weights = tree.copy_weights[line].tolist()
    rate *= weights[COPY_KINDS + 1]
    for token, error in errors:
        for kind in range(COPY_KINDS):
            weights[kind] += rate * error * (FLOOR + SCALE * _value(rows[kind], token))
        weights[COPY_KINDS] += rate * error
    tree.copy_weights[line] = weights


def _learn_mtp(tree: Tree, node: int, chosen: int, rate: float) -> None:
    """Update weights and share of the final mixing by one gradient step on the coding cost."""
    place, layer, count = _mtp_line(tree, node), _prediction(tree, node), tree.listed[node]
    line, trust, base = tree.mtp_weights[place].tolist(), float(tree.mtp_trust[0]), float(tree.base[node])
    share, of_share, gradient = probability(trust), 0.0, [0.0] * MTP_INPUTS
    columns = (column[node, :count].tolist() for column in (tree.tokens, tree.odds, tree.memory_odds))
    for token, log_odds, memory in zip(*columns, strict=True):
        if token != chosen and log_odds < _NEGLIGIBLE:
            continue
        error = (1.0 if token == chosen else 0.0) - probability(log_odds)
        before, predicted = _before(memory, base), layer.get(token, FLOOR)
        for kind, given in enumerate((before, predicted, max(before, 0.0), 1.0)):
            gradient[kind] += error * given
        of_share += error * (_weighed(line, before, predicted) - _before(memory, FLOOR))
    for kind in range(MTP_INPUTS):
        tree.mtp_weights[place, kind] = line[kind] + _MTP_RATE * rate * share * gradient[kind]
    moved = trust + _TRUST_RATE * rate * share * (1.0 - share) * of_share
    tree.mtp_trust[0] = min(max(moved, -_MOST_TRUST), _MOST_TRUST)


def _gradients(rows: Iterator[tuple[int, Row]], errors: Sequence[tuple[int, float]], kinds: int) -> list[float]:
    """Return the gradient of the coding cost by each kind's weight, and by the bias last."""
    gradient = [0.0] * (kinds + 1)
    for kind, row in rows:
        for token, error in errors:
            gradient[kind] += error * (FLOOR + SCALE * _value(row, token))
    for _, error in errors:
        gradient[kinds] += error
    return gradient


def learn_weights(tree: Tree, tables: Tables, path: Sequence[int], chosen: Sequence[int], rate: float) -> None:
    """Update all weights by gradient steps on the coding cost, one per node that verification reached."""
    for node, token in zip(path, chosen, strict=True):
        expand(tree, node, tables)
        errors, line = _errors(tree, node, token), _line(tree, node)
        for kind, each in enumerate(_gradients(_rows(tree, node), errors, END)):
            tables.weights[line, kind] += rate * each
        if note_kinds := tree.note_kinds[node]:
            for kind, each in enumerate(_gradients(_notes(tree, node), errors, NOTE_KINDS)):
                tree.note_weights[note_kinds, kind] += rate * each
        if tree.copy_line[node] >= 0:
            _learn_copies(tree, node, errors, rate)
        if tree.prediction[node] >= 0:
            _learn_mtp(tree, node, token, rate)
