"""Mix rows of logits, position notes and earlier occurrences into probabilities, and learn the weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lade.decoding.kernels.inlined import inlined
from lade.decoding.kernels.layout import (
    AFTER_COPY,
    AT_TOKEN,
    BITS,
    COPY,
    EACH,
    END,
    END_KINDS,
    FLOOR,
    LATEST,
    MTP_DEPTHS,
    MTP_INPUTS,
    MTP_WIDTH,
    NEAR,
    ORDERS,
    PROMPT,
    ROOT,
    SCALE,
    TEXT,
    TEXT_ORDERS,
    TOKEN,
    TOLD,
    WIDTH,
)
from lade.decoding.kernels.tables import SEED, find_rows, lengthened

_NEGLIGIBLE = -4.6  # log-odds of about 1 %; of tokens below it only the chosen one is learned from
_MTP_RATE = 1.0  # of the rate of learning, for the weights of the last mixing: what it mixes is calibrated already
_TRUST_RATE = 20.0  # likewise for the share that the layer has, one number that every node teaches
_MOST_TRUST = 5.0  # log-odds
_NOT_SEEN = 0.4  # of what followed at some places, something else is as likely as if it had been there so often


@inlined
def probability(log_odds: Any) -> Any:
    """Return the probability of log-odds."""
    return 1.0 / (1.0 + math.exp(-log_odds))


@inlined
def _has(found: Any, heard: Any, kind: Any) -> Any:
    """Return True if a row of that kind was found, given the numbers of rows found."""
    return kind < found or TEXT <= kind < TEXT + heard


@inlined
def _line(found: Any, heard: Any) -> Any:
    """Which weights are in use, by the numbers of rows."""
    return found * (len(TEXT_ORDERS) + 1) + heard


@inlined
def note_slot(notes: Any, place: Any, token: Any) -> Any:
    """The slot of what is noted of a place, and of a token there or -1."""
    state = lengthened(lengthened(SEED, place), token)
    return np.int64((state >> np.uint64(40)) % np.uint64(notes.shape[0]))


@inlined
def _recall(notes: Any, place: Any, token: Any, rows: Any) -> Any:
    """Copy what is noted of a place, and of a token there; returns which kinds there are."""
    near = 0
    for kind in range(NEAR):
        of = token if kind == AT_TOKEN else -1
        slot = note_slot(notes, place, of)
        if notes[slot, 0] == place and notes[slot, 1] == of:
            near |= 1 << kind
            for entry in range(WIDTH):
                rows[kind, entry] = notes[slot, 2 + entry]
    return near


@inlined
def _add_row(rows: Any, kind: Any, weight: Any, base: Any, tokens: Any, odds: Any, offers: Any) -> Any:
    """Add what a row says to the log-odds of its tokens, which have `base` before; returns how many there are now."""
    step = weight * SCALE
    for place in range(WIDTH):
        token = rows[kind, place] & TOKEN
        if token == TOKEN:
            continue
        at = 0
        while at < offers and tokens[at] != token:
            at += 1
        if at == offers:
            tokens[at], odds[at] = token, base
            offers += 1
        odds[at] += step * (rows[kind, place] >> BITS)
    return offers


@inlined
def _mix(
    rows: Any,
    found: Any,
    heard: Any,
    weights: Any,
    near_rows: Any,
    near: Any,
    near_weights: Any,
    told_rows: Any,
    told: Any,
    told_weights: Any,
    tokens: Any,
    odds: Any,
) -> Any:
    """All tokens that a row, note or earlier place suggests, with their log-odds; one that lacks a token says `FLOOR`.

    Returns how many there are, and the log-odds of a token that nothing suggests.

    Few arrays are handed over, here and below: a call with the whole of `Work` takes longer than what it does.
    """
    line, offers = _line(found, heard), 0
    base = weights[line, END] + near_weights[near, NEAR]
    for kind in range(END):
        if _has(found, heard, kind):
            base += FLOOR * weights[line, kind]
    for kind in range(NEAR):
        if near >> kind & 1:
            base += FLOOR * near_weights[near, kind]
    if told >= 0:
        base += told_weights[told, TOLD]
        for kind in range(TOLD):
            base += FLOOR * told_weights[told, kind]
    for kind in range(END):
        if _has(found, heard, kind):
            offers = _add_row(rows, kind, weights[line, kind], base, tokens, odds, offers)
    for kind in range(NEAR):
        if near >> kind & 1:
            offers = _add_row(near_rows, kind, near_weights[near, kind], base, tokens, odds, offers)
    if told >= 0:
        for kind in range(TOLD):
            offers = _add_row(told_rows, kind, told_weights[told, kind], base, tokens, odds, offers)
    return offers, base


@inlined
def _end_kind(agreed: Any) -> Any:
    """Which lengths of an end are counted together; see `END_KINDS`."""
    if agreed <= 3:
        return agreed - 1
    if agreed <= 7:
        return 3 if agreed <= 5 else 4
    return 5 if agreed <= 15 else 6


@inlined
def _tell(text: Any, spots: Any, count: Any, longest: Any, rows: Any) -> Any:
    """Write down what followed at earlier places, at least one; returns which weights of a set are in use."""
    for place in range(WIDTH):
        rows[LATEST, place] = rows[EACH, place] = TOKEN
    different = 0
    for at in range(count):
        token, same, known = text[spots[at]], 0, False
        for other in range(count):
            if text[spots[other]] == token:
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
    return 2 * _end_kind(longest) + (1 if different == 1 else 0)


@inlined
def _told_set(place: Any, used: Any) -> Any:
    """Where the set of weights begins for what an earlier place told: of the prompt or not, behind a copy or not."""
    of_prompt, copying = place < used[PROMPT], used[ROOT] - used[COPY] < AFTER_COPY
    return 2 * END_KINDS * ((0 if of_prompt else 1) + (2 if copying else 0))


@inlined
def expand(work: Any, node: Any, young: Any, old: Any, weights: Any) -> None:
    """Ask the memory, and the notes, about a node, once."""
    if work.found[node] < 0:
        rows, near_rows, near_weights = work.rows[node], work.near_rows[node], work.near_weights
        found, heard = find_rows(young, old, work.tails[node], rows)
        near = _recall(work.notes, work.used[ROOT] + work.depths[node], work.ids[node], near_rows)
        told, told_rows, told_weights = -1, work.told_rows[node], work.told_weights
        if work.spot_counts[node] > 0:
            told = _tell(work.text, work.spots[node], work.spot_counts[node], work.agreed[node, 0], told_rows)
            told += _told_set(work.spots[node, 0], work.used)
        work.found[node], work.heard[node], work.near[node], work.told[node] = found, heard, near, told
        tokens, odds = work.tokens[node], work.odds[node]
        work.offers[node], base = _mix(
            rows, found, heard, weights, near_rows, near, near_weights, told_rows, told, told_weights, tokens, odds
        )
        if work.predicted[node] >= 0:
            _mix_prediction(work, node, base)


@inlined
def _mtp_line(work: Any, node: Any) -> Any:
    """Which weights of the last mixing are in use."""
    depth = min(work.mtp_depths[work.predicted[node]], MTP_DEPTHS) - 1
    return depth * (len(ORDERS) + 1) + work.found[node]


@inlined
def _predicted_odds(work: Any, number: Any, token: Any) -> Any:
    """Log-odds of a token by prediction `number`; `FLOOR` for one that it does not list."""
    for place in range(MTP_WIDTH):
        if work.mtp_tokens[number, place] == token:
            return max(work.mtp_odds[number, place], FLOOR)
    return FLOOR


@inlined
def _mix_prediction(work: Any, node: Any, base: Any) -> None:
    """The last mixing: weigh what is known of each offer with the MTP layer's prediction, and add its own tokens.

    Args:
        work: its node has offers.
        node: one with a prediction.
        base: log-odds of tokens that only the layer suggests, before it is asked.
    """
    number, known = work.predicted[node], work.offers[node]
    tokens, odds, memory_odds = work.tokens[node], work.odds[node], work.memory_odds[node]
    for at in range(known):
        memory_odds[at] = odds[at]
    offers = known
    for place in range(MTP_WIDTH):
        token = work.mtp_tokens[number, place]
        if token < 0:
            break
        at = 0
        while at < offers and tokens[at] != token:
            at += 1
        if at == offers:
            tokens[at], memory_odds[at] = token, math.nan
            offers += 1
    work.listed[node], work.bases[node] = offers, base
    line, share = work.mtp_weights[_mtp_line(work, node)], probability(work.mtp_trust[0])
    for at in range(offers):
        mixed = _weighed(line, _before(memory_odds[at], base), _predicted_odds(work, number, tokens[at]))
        without = _before(memory_odds[at], FLOOR)  # where the layer has no share, there is no such token
        odds[at] = without + share * (mixed - without)
        if at >= known and odds[at] >= _NEGLIGIBLE:  # fainter ones would take the place of the lookahead window's cells
            _swap(tokens, odds, memory_odds, known, at)
            known += 1
    work.offers[node] = known


@inlined
def _before(log_odds: Any, base: Any) -> Any:
    """Log-odds before the last mixing; `base` for NaN, of a token that only the layer suggests."""
    return base if math.isnan(log_odds) else log_odds


@inlined
def _weighed(line: Any, memory: Any, layer: Any) -> Any:
    """Log-odds by a line of weights of the last mixing, from those of the memory and of the layer."""
    return line[0] * memory + line[1] * layer + line[2] * max(memory, 0.0) + line[3]


@inlined
def led_by_mtp(work: Any, parent: Any, rank: Any) -> Any:
    """1 where the layer gives the child number `rank` of a node higher odds than all else does, else 0."""
    layer = _predicted_odds(work, work.predicted[parent], work.tokens[parent, rank])
    return 1 if layer > max(_before(work.memory_odds[parent, rank], work.bases[parent]), FLOOR) else 0


@inlined
def _swap(tokens: Any, odds: Any, memory_odds: Any, one: Any, other: Any) -> None:
    """Swap two offers."""
    tokens[one], tokens[other] = tokens[other], tokens[one]
    odds[one], odds[other] = odds[other], odds[one]
    memory_odds[one], memory_odds[other] = memory_odds[other], memory_odds[one]


@inlined
def bring_forward(tokens: Any, odds: Any, memory_odds: Any, offers: Any, rank: Any) -> None:
    """Move the likeliest offer from number `rank` on to that place; those before are likelier."""
    best = rank
    for at in range(rank + 1, offers):
        if odds[at] > odds[best]:
            best = at
    _swap(tokens, odds, memory_odds, rank, best)


@inlined
def _odds_before(work: Any, node: Any) -> Any:
    """Log-odds of a node's offers before the last mixing, if there was one; NaN of those that are not the memory's."""
    return work.memory_odds[node] if work.predicted[node] >= 0 else work.odds[node]


@inlined
def _value(rows: Any, kind: Any, token: Any) -> Any:
    """Return the log-odds that a row gives a token."""
    for place in range(WIDTH):
        if rows[kind, place] & TOKEN == token:
            return rows[kind, place] >> BITS
    return np.int32(0)


@inlined
def _learn_told(work: Any, node: Any, chosen: Any, rate: Any) -> None:
    """Move the weights of what earlier places told of a node."""
    rows, weights = work.told_rows[node], work.told_weights[work.told[node]]
    odds = _odds_before(work, node)
    rate *= weights[TOLD + 1]
    for at in range(work.offers[node]):
        token, log_odds = work.tokens[node, at], odds[at]
        if math.isnan(log_odds) or (token != chosen and log_odds < _NEGLIGIBLE):
            continue
        error = (1.0 if token == chosen else 0.0) - probability(log_odds)
        for kind in range(TOLD):
            weights[kind] += rate * error * (FLOOR + SCALE * _value(rows, kind, token))
        weights[TOLD] += rate * error


@inlined
def _learn_mtp(work: Any, node: Any, chosen: Any, rate: Any) -> None:
    """Move the weights of the last mixing, and the share that it has, down the gradient of the coding cost."""
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
    """Move the weights down the gradient of the coding cost, for nodes that verification has reached."""
    for step in range(path.shape[0]):
        node = path[step]
        expand(work, node, young, old, weights)
        found, heard = work.found[node], work.heard[node]
        line, gradient, rows = _line(found, heard), np.zeros(END + 1), work.rows[node]
        near, near_gradient, near_rows = work.near[node], np.zeros(NEAR), work.near_rows[node]
        odds = _odds_before(work, node)
        for at in range(work.offers[node]):
            token, log_odds = work.tokens[node, at], odds[at]
            if math.isnan(log_odds) or (token != chosen[step] and log_odds < _NEGLIGIBLE):
                continue
            error = (1.0 if token == chosen[step] else 0.0) - probability(log_odds)
            for kind in range(END):
                if _has(found, heard, kind):
                    gradient[kind] += error * (FLOOR + SCALE * _value(rows, kind, token))
            for kind in range(NEAR):
                if near >> kind & 1:
                    near_gradient[kind] += error * (FLOOR + SCALE * _value(near_rows, kind, token))
            gradient[END] += error
        for kind in range(END + 1):
            weights[line, kind] += rate * gradient[kind]
        if near:
            for kind in range(NEAR):
                work.near_weights[near, kind] += rate * near_gradient[kind]
            work.near_weights[near, NEAR] += rate * gradient[END]
        if work.told[node] >= 0:
            _learn_told(work, node, chosen[step], rate)
        if work.predicted[node] >= 0:
            _learn_mtp(work, node, chosen[step], rate)
