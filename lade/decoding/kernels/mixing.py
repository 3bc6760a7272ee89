"""Mix rows of logits, position notes and earlier occurrences into probabilities, and learn the weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lade.decoding.kernels.layout import (
    AFTER_COPY,
    AT_TOKEN,
    BITS,
    COPY,
    COPY_KINDS,
    EACH,
    END,
    FLOOR,
    LATEST,
    LENGTH_BUCKETS,
    MTP_DEPTHS,
    MTP_INPUTS,
    MTP_WIDTH,
    NOTE_KINDS,
    ORDERS,
    PROMPT,
    ROOT,
    SCALE,
    TEXT,
    TEXT_ORDERS,
    TOKEN,
    WIDTH,
    inlined,
)
from lade.decoding.kernels.tables import SEED, find_rows, lengthened

_NEGLIGIBLE = -4.6  # log-odds of about 1 %; below it only the chosen token takes part in learning
_MTP_RATE = 1.0  # factor of the learning rate for the final mixing, whose inputs are calibrated already
_TRUST_RATE = 20.0  # factor for the layer's share, a single number that every node updates
_MOST_TRUST = 5.0  # log-odds
_NOT_SEEN = 0.4  # pseudo-count of an unseen token after the matches


@inlined
def probability(log_odds: Any) -> Any:
    """Return the probability of log-odds."""
    return 1.0 / (1.0 + math.exp(-log_odds))


@inlined
def _has_row(logit_hits: Any, text_hits: Any, kind: Any) -> Any:
    """Return whether a row of this kind was found, given the numbers of hits."""
    return kind < logit_hits or TEXT <= kind < TEXT + text_hits


@inlined
def _line(logit_hits: Any, text_hits: Any) -> Any:
    """Return the index of the weight set in use, given the numbers of hits."""
    return logit_hits * (len(TEXT_ORDERS) + 1) + text_hits


@inlined
def note_slot(notes: Any, place: Any, token: Any) -> Any:
    """Return the slot of the note for a position, and for a token there or -1."""
    state = lengthened(lengthened(SEED, place), token)
    return np.int64((state >> np.uint64(40)) % np.uint64(notes.shape[0]))


@inlined
def _recall(notes: Any, place: Any, token: Any, rows: Any) -> Any:
    """Copy the notes for a position and for a token there; return the bit set of kinds present."""
    note_kinds = 0
    for kind in range(NOTE_KINDS):
        of = token if kind == AT_TOKEN else -1
        slot = note_slot(notes, place, of)
        if notes[slot, 0] == place and notes[slot, 1] == of:
            note_kinds |= 1 << kind
            for entry in range(WIDTH):
                rows[kind, entry] = notes[slot, 2 + entry]
    return note_kinds


@inlined
def _add_row(rows: Any, kind: Any, weight: Any, base: Any, tokens: Any, odds: Any, candidates: Any) -> Any:
    """Add a row's weighted log-odds to its tokens; new tokens start at `base`. Return the number of tokens."""
    step = weight * SCALE
    for place in range(WIDTH):
        token = rows[kind, place] & TOKEN
        if token == TOKEN:
            continue
        at = 0
        while at < candidates and tokens[at] != token:
            at += 1
        if at == candidates:
            tokens[at], odds[at] = token, base
            candidates += 1
        odds[at] += step * (rows[kind, place] >> BITS)
    return candidates


@inlined
def _mix(
    rows: Any,
    logit_hits: Any,
    text_hits: Any,
    weights: Any,
    note_rows: Any,
    note_kinds: Any,
    note_weights: Any,
    copy_rows: Any,
    copy_line: Any,
    copy_weights: Any,
    tokens: Any,
    odds: Any,
) -> Any:
    """Mix rows, notes and copies into log-odds of all tokens that any of them suggests; a missing token counts `FLOOR`.

    Few arrays are passed, here and below: a call with the whole of `Work` takes longer than the work itself.

    Returns:
        The number of tokens, and the log-odds of a token that nothing suggests.
    """
    line, candidates = _line(logit_hits, text_hits), 0
    base = weights[line, END] + note_weights[note_kinds, NOTE_KINDS]
    for kind in range(END):
        if _has_row(logit_hits, text_hits, kind):
            base += FLOOR * weights[line, kind]
    for kind in range(NOTE_KINDS):
        if note_kinds >> kind & 1:
            base += FLOOR * note_weights[note_kinds, kind]
    if copy_line >= 0:
        base += copy_weights[copy_line, COPY_KINDS]
        for kind in range(COPY_KINDS):
            base += FLOOR * copy_weights[copy_line, kind]
    for kind in range(END):
        if _has_row(logit_hits, text_hits, kind):
            candidates = _add_row(rows, kind, weights[line, kind], base, tokens, odds, candidates)
    for kind in range(NOTE_KINDS):
        if note_kinds >> kind & 1:
            candidates = _add_row(note_rows, kind, note_weights[note_kinds, kind], base, tokens, odds, candidates)
    if copy_line >= 0:
        for kind in range(COPY_KINDS):
            candidates = _add_row(copy_rows, kind, copy_weights[copy_line, kind], base, tokens, odds, candidates)
    return candidates, base


@inlined
def _length_bucket(match_lengths: Any) -> Any:
    """Return the bucket of a match length, see `LENGTH_BUCKETS`."""
    if match_lengths <= 3:
        return match_lengths - 1
    if match_lengths <= 7:
        return 3 if match_lengths <= 5 else 4
    return 5 if match_lengths <= 15 else 6


@inlined
def _write_copy_rows(text: Any, matches: Any, count: Any, longest: Any, rows: Any) -> Any:
    """Write the tokens after one or more matches as rows; return the index within a set of copy weights."""
    for place in range(WIDTH):
        rows[LATEST, place] = rows[EACH, place] = TOKEN
    different = 0
    for at in range(count):
        token, same, known = text[matches[at]], 0, False
        for other in range(count):
            if text[matches[other]] == token:
                same += 1
                known = known or other < at
        if known or token < 0 or token >= TOKEN:
            continue
        if different == 0:
            rows[LATEST, 0] = 255 << BITS | token
        value = (math.log(same / (count - same + _NOT_SEEN)) - FLOOR) / SCALE
        if different < WIDTH:
            rows[EACH, different] = np.int32(min(max(value + 0.5, 0.0), 255.0)) << BITS | token
        different += 1
    return 2 * _length_bucket(longest) + (1 if different == 1 else 0)


@inlined
def _copy_set(place: Any, used: Any) -> Any:
    """Return the first index of a set of copy weights: by match in the prompt or answer, and before or after a copy."""
    of_prompt, copying = place < used[PROMPT], used[ROOT] - used[COPY] < AFTER_COPY
    return 2 * LENGTH_BUCKETS * ((0 if of_prompt else 1) + (2 if copying else 0))


@inlined
def expand(work: Any, node: Any, young: Any, old: Any, weights: Any) -> None:
    """Look up memory, notes and matches for a node and mix them; does nothing the second time."""
    if work.logit_hits[node] < 0:
        rows, note_rows, note_weights = work.rows[node], work.note_rows[node], work.note_weights
        logit_hits, text_hits = find_rows(young, old, work.tails[node], rows)
        note_kinds = _recall(work.notes, work.used[ROOT] + work.depths[node], work.ids[node], note_rows)
        copy_line, copy_rows, copy_weights = -1, work.copy_rows[node], work.copy_weights
        if work.match_counts[node] > 0:
            copy_line = _write_copy_rows(
                work.text, work.matches[node], work.match_counts[node], work.match_lengths[node, 0], copy_rows
            )
            copy_line += _copy_set(work.matches[node, 0], work.used)
        work.logit_hits[node], work.text_hits[node], work.note_kinds[node], work.copy_line[node] = (
            logit_hits,
            text_hits,
            note_kinds,
            copy_line,
        )
        tokens, odds = work.tokens[node], work.odds[node]
        work.candidates[node], base = _mix(
            rows,
            logit_hits,
            text_hits,
            weights,
            note_rows,
            note_kinds,
            note_weights,
            copy_rows,
            copy_line,
            copy_weights,
            tokens,
            odds,
        )
        if work.predicted[node] >= 0:
            _mix_prediction(work, node, base)


@inlined
def _mtp_line(work: Any, node: Any) -> Any:
    """Return the index of the final mixing's weights in use."""
    depth = min(work.mtp_depths[work.predicted[node]], MTP_DEPTHS) - 1
    return depth * (len(ORDERS) + 1) + work.logit_hits[node]


@inlined
def _predicted_odds(work: Any, number: Any, token: Any) -> Any:
    """Return the log-odds of a token in prediction `number`; `FLOOR` if it is not listed."""
    for place in range(MTP_WIDTH):
        if work.mtp_tokens[number, place] == token:
            return max(work.mtp_odds[number, place], FLOOR)
    return FLOOR


@inlined
def _mix_prediction(work: Any, node: Any, base: Any) -> None:
    """Final mixing: combine the candidates' log-odds with the MTP layer's, and add tokens that only the layer suggests.

    Args:
        work: the tree.
        node: a node with a prediction, whose candidates have been mixed.
        base: log-odds before this mixing of tokens that only the layer suggests.
    """
    number, known = work.predicted[node], work.candidates[node]
    tokens, odds, memory_odds = work.tokens[node], work.odds[node], work.memory_odds[node]
    for at in range(known):
        memory_odds[at] = odds[at]
    candidates = known
    for place in range(MTP_WIDTH):
        token = work.mtp_tokens[number, place]
        if token < 0:
            break
        at = 0
        while at < candidates and tokens[at] != token:
            at += 1
        if at == candidates:
            tokens[at], memory_odds[at] = token, math.nan
            candidates += 1
    work.listed[node], work.bases[node] = candidates, base
    line, share = work.mtp_weights[_mtp_line(work, node)], probability(work.mtp_trust[0])
    for at in range(candidates):
        mixed = _weighed(line, _before(memory_odds[at], base), _predicted_odds(work, number, tokens[at]))
        without = _before(memory_odds[at], FLOOR)  # with a share of zero there is no such token
        odds[at] = without + share * (mixed - without)
        if at >= known and odds[at] >= _NEGLIGIBLE:  # less likely ones would displace cells of the lookahead window
            _swap(tokens, odds, memory_odds, known, at)
            known += 1
    work.candidates[node] = known


@inlined
def _before(log_odds: Any, base: Any) -> Any:
    """Return the log-odds before the final mixing; `base` for NaN, which marks tokens that only the layer suggests."""
    return base if math.isnan(log_odds) else log_odds


@inlined
def _weighed(line: Any, memory: Any, layer: Any) -> Any:
    """Return the final mixing of the memory's and the layer's log-odds, with one line of weights."""
    return line[0] * memory + line[1] * layer + line[2] * max(memory, 0.0) + line[3]


@inlined
def led_by_mtp(work: Any, parent: Any, rank: Any) -> Any:
    """Return 1 if the layer gives the child of this rank higher odds than the memory does, else 0."""
    layer = _predicted_odds(work, work.predicted[parent], work.tokens[parent, rank])
    return 1 if layer > max(_before(work.memory_odds[parent, rank], work.bases[parent]), FLOOR) else 0


@inlined
def _swap(tokens: Any, odds: Any, memory_odds: Any, one: Any, other: Any) -> None:
    """Swap two candidates."""
    tokens[one], tokens[other] = tokens[other], tokens[one]
    odds[one], odds[other] = odds[other], odds[one]
    memory_odds[one], memory_odds[other] = memory_odds[other], memory_odds[one]


@inlined
def bring_forward(tokens: Any, odds: Any, memory_odds: Any, candidates: Any, rank: Any) -> None:
    """One step of a selection sort: move the likeliest candidate from index `rank` on to that index."""
    best = rank
    for at in range(rank + 1, candidates):
        if odds[at] > odds[best]:
            best = at
    _swap(tokens, odds, memory_odds, rank, best)


@inlined
def _odds_before(work: Any, node: Any) -> Any:
    """Return the candidates' log-odds before any final mixing; NaN for tokens that only the layer suggests."""
    return work.memory_odds[node] if work.predicted[node] >= 0 else work.odds[node]


@inlined
def _value(rows: Any, kind: Any, token: Any) -> Any:
    """Return the quantised log-odds of a token in a row; 0 if it is not listed."""
    for place in range(WIDTH):
        if rows[kind, place] & TOKEN == token:
            return rows[kind, place] >> BITS
    return np.int32(0)


@inlined
def _learn_copies(work: Any, node: Any, chosen: Any, rate: Any) -> None:
    """Update the copy weights of a node by one gradient step."""
    rows, weights = work.copy_rows[node], work.copy_weights[work.copy_line[node]]
    odds = _odds_before(work, node)
    rate *= weights[COPY_KINDS + 1]
    for at in range(work.candidates[node]):
        token, log_odds = work.tokens[node, at], odds[at]
        if math.isnan(log_odds) or (token != chosen and log_odds < _NEGLIGIBLE):
            continue
        error = (1.0 if token == chosen else 0.0) - probability(log_odds)
        for kind in range(COPY_KINDS):
            weights[kind] += rate * error * (FLOOR + SCALE * _value(rows, kind, token))
        weights[COPY_KINDS] += rate * error


@inlined
def _learn_mtp(work: Any, node: Any, chosen: Any, rate: Any) -> None:
    """Update weights and share of the final mixing by one gradient step on the coding cost."""
    number, line = work.predicted[node], work.mtp_weights[_mtp_line(work, node)]
    share, of_share, gradient = probability(work.mtp_trust[0]), 0.0, np.zeros(MTP_INPUTS)
    for at in range(work.listed[node]):
        token, log_odds = work.tokens[node, at], work.odds[node, at]
        if token != chosen and log_odds < _NEGLIGIBLE:
            continue
        error = (1.0 if token == chosen else 0.0) - probability(log_odds)
        before, layer = _before(work.memory_odds[node, at], work.bases[node]), _predicted_odds(work, number, token)
        gradient[0] += error * before
        gradient[1] += error * layer
        gradient[2] += error * max(before, 0.0)
        gradient[3] += error
        of_share += error * (_weighed(line, before, layer) - _before(work.memory_odds[node, at], FLOOR))
    for kind in range(MTP_INPUTS):
        line[kind] += _MTP_RATE * rate * share * gradient[kind]
    moved = work.mtp_trust[0] + _TRUST_RATE * rate * share * (1.0 - share) * of_share
    work.mtp_trust[0] = min(max(moved, -_MOST_TRUST), _MOST_TRUST)


@inlined
def learn_weights(work: Any, young: Any, old: Any, weights: Any, path: Any, chosen: Any, rate: Any) -> None:
    """Update all weights by gradient steps on the coding cost, one per node that verification reached."""
    for step in range(path.shape[0]):
        node = path[step]
        expand(work, node, young, old, weights)
        logit_hits, text_hits = work.logit_hits[node], work.text_hits[node]
        line, gradient, rows = _line(logit_hits, text_hits), np.zeros(END + 1), work.rows[node]
        note_kinds, note_gradient, note_rows = work.note_kinds[node], np.zeros(NOTE_KINDS), work.note_rows[node]
        odds = _odds_before(work, node)
        for at in range(work.candidates[node]):
            token, log_odds = work.tokens[node, at], odds[at]
            if math.isnan(log_odds) or (token != chosen[step] and log_odds < _NEGLIGIBLE):
                continue
            error = (1.0 if token == chosen[step] else 0.0) - probability(log_odds)
            for kind in range(END):
                if _has_row(logit_hits, text_hits, kind):
                    gradient[kind] += error * (FLOOR + SCALE * _value(rows, kind, token))
            for kind in range(NOTE_KINDS):
                if note_kinds >> kind & 1:
                    note_gradient[kind] += error * (FLOOR + SCALE * _value(note_rows, kind, token))
            gradient[END] += error
        for kind in range(END + 1):
            weights[line, kind] += rate * gradient[kind]
        if note_kinds:
            for kind in range(NOTE_KINDS):
                work.note_weights[note_kinds, kind] += rate * note_gradient[kind]
            work.note_weights[note_kinds, NOTE_KINDS] += rate * gradient[END]
        if work.copy_line[node] >= 0:
            _learn_copies(work, node, chosen[step], rate)
        if work.predicted[node] >= 0:
            _learn_mtp(work, node, chosen[step], rate)
