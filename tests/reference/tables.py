"""Hash tables of the context memory: `tables.cpp`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import BITS, END, LENGTHS, LOGITS, LONGEST, TEXT, TOKEN, WIDTH, Ints
from lade.decoding.kernels.tables import Tables

_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
SEED = 0x243F6A8885A308D3
"""Hash of the empty context."""

LIKELIEST = 32
"""Nodes of a tree whose rows are learned last."""

Key = tuple[int, int]
Row = Sequence[int]


def lengthened(state: int, token: int) -> int:
    """Return the hash of a context extended by one token towards the start of the text."""
    state = ((state ^ (token + 2 & _WORD)) * _MIX) & _WORD
    return state ^ (state >> 29)


def _signed(half: int) -> int:
    """Return the int32 with these 32 bits."""
    return half - (1 << 32) if half >> 31 else half


def _keys(tail: Row, first: int, end: int) -> Iterator[Key]:
    """Yield both halves of the keys of a context's suffixes, one for each kind of rows."""
    state, number = SEED, first
    for place in range(LENGTHS[end - 1]):
        state = lengthened(state, tail[place])
        if place + 1 == LENGTHS[number]:
            yield _signed((state >> 3 << 3 | number + 1) & 0xFFFFFFFF), _signed(state >> 32)
            number += 1


def _slot(table: Ints, key: Key) -> int:
    """Return the slot of a key; if it is missing, the bitwise complement of the free slot for it."""
    low, high = key
    slot = (high & 0xFFFFFFFF) * len(table) >> 32
    while table[slot, 0] != 0:
        if table[slot, 0] == low and table[slot, 1] == high:
            return slot
        slot += 1
        if slot == len(table):
            slot = 0
    return ~slot


def average(before: Row, row: Row) -> list[int]:
    """Return the mean of a known row and a new one. A token missing from one of them counts 0 there."""
    best = [TOKEN] * WIDTH
    for entries, others, is_new in ((row, before, True), (before, row, False)):
        for entry in entries:
            token = entry & TOKEN
            if token == TOKEN:
                continue
            same = [other >> BITS for other in others if other & TOKEN == token]
            if is_new or not same:  # else it was counted already
                _insert(best, (entry >> BITS) + sum(same[:1]) >> 1 << BITS | token)
    return best


def _insert(best: list[int], entry: int) -> None:
    """Insert an entry into the best ones, in descending order; the last one drops out."""
    place = WIDTH
    while place > 0 and (entry > best[place - 1] or best[place - 1] == TOKEN):
        place -= 1
    best.insert(place, entry)
    best.pop()


def _take_in(young: Ints, old: Ints, tail: Row, row: Row, first: int, end: int) -> int:
    """Store one row under several suffixes of a context; return the number of newly occupied slots."""
    taken = 0
    for key in _keys(tail, first, end):
        slot = at = _slot(young, key)
        before = young
        if slot < 0:
            slot, before, at = ~slot, old, _slot(old, key)
            young[slot, :2] = key
            taken += 1
        young[slot, 2:] = average(before[at, 2:].tolist(), row) if at >= 0 else row
    return taken


def learn(
    young: Ints, old: Ints, tails: Ints, rows: Ints, first: int, end: int, start: int, taken: int, most: int
) -> tuple[int, int]:
    """Store rows under the suffixes of their contexts, averaged with known ones."""
    return divmod(_learn(young, old, tails, rows, first, end, start, taken, most), 1 << 32)


def _learn(
    young: Ints, old: Ints, tails: Ints, rows: Ints, first: int, end: int, start: int, taken: int, most: int
) -> int:
    row = start
    while row < len(tails) and taken + end - first <= most:
        taken += _take_in(young, old, tails[row].tolist(), rows[row].tolist(), first, end)
        row += 1
    return row << 32 | taken


def learn_step(tables: Tables, tails: Ints, rows: Ints, path: Sequence[int], chosen: Sequence[int]) -> bool:
    """Store the rows of a tree and the tokens that followed in the text; False, with nothing stored, without room."""
    young, old, taken = tables.young, tables.old, int(tables.counts[0])
    if taken + TEXT * len(rows) + max((END - TEXT) * len(path), END) > tables.counts[1]:
        return False
    nodes = [*zip(tails.tolist(), rows.tolist(), strict=False)]
    for tail, row in nodes[LIKELIEST:] + nodes[:LIKELIEST]:
        taken += _take_in(young, old, tail, row, LOGITS, TEXT)
    for node, token in zip(path, chosen, strict=True):
        taken += _take_in(young, old, tails[node].tolist(), _certain_row(token), TEXT, END)
    tables.counts[0] = taken
    return True


def rehash(table: Ints, into: Ints) -> None:
    """Copy all occupied slots of a table into a larger one that has none of their keys."""
    for slot in table[table[:, 0] != 0].tolist():
        into[~_slot(into, (slot[0], slot[1]))] = slot


def count_missing(table: Ints, other: Ints) -> int:
    """Return the number of keys of a table that another one lacks."""
    return sum(_slot(other, (low, high)) < 0 for low, high in table[table[:, 0] != 0, :2].tolist())


def _found(young: Ints, old: Ints, tail: Row, first: int, end: int) -> Iterator[list[int]]:
    """Yield the known rows of a context, shortest suffix first, up to the first one that is missing."""
    for key in _keys(tail, first, end):
        table, slot = young, _slot(young, key)
        if slot < 0:
            table, slot = old, _slot(old, key)
        if slot < 0:
            return
        yield table[slot, 2:].tolist()


def find_rows(young: Ints, old: Ints, tail: Row, rows: Ints) -> tuple[int, int]:
    """Copy all known rows of a context; return the numbers of hits with logits and text. Hits are nested by length."""
    hits = []
    for first, end in ((LOGITS, TEXT), (TEXT, END)):
        found = list(_found(young, old, tail, first, end))
        if found:
            rows[first : first + len(found)] = found
        hits.append(len(found))
    return hits[0], hits[1]


def look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> tuple[int, int]:
    """Copy the known rows of a context to `rows`, `[END, WIDTH]`; return the numbers of hits with logits and text."""
    return divmod(_look_up(young, old, tail, rows), 1 << 32)


def _look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> int:
    logit_hits, text_hits = find_rows(young, old, tail.tolist(), rows)
    return logit_hits << 32 | text_hits


def tails_of(text: npt.NDArray[np.int64], start: int, count: int) -> Ints:
    """Return the contexts `[count, LONGEST]` that end with the tokens of a text from index `start` on."""
    tails = np.empty((count, LONGEST), np.int32)
    _tails_of(text, start, tails)
    return tails


def _tails_of(text: npt.NDArray[np.int64], start: int, tails: Ints) -> None:
    before = np.concatenate([np.full(LONGEST, -1, np.int64), text])
    for row in range(len(tails)):
        tails[row] = before[start + row + 1 : start + row + 1 + LONGEST][::-1]


def certain(tokens: npt.NDArray[np.int64]) -> Ints:
    """Return rows `[M, WIDTH]` that hold one token each, with the highest log-odds; empty where its id does not fit."""
    rows = np.empty((len(tokens), WIDTH), np.int32)
    _certain(tokens, rows)
    return rows


def _certain(tokens: npt.NDArray[np.int64], rows: Ints) -> None:
    for row, token in zip(rows, tokens.tolist(), strict=True):
        row[:] = _certain_row(token)


def _certain_row(token: int) -> list[int]:
    return [255 << BITS | token if token < TOKEN else TOKEN, *[TOKEN] * (WIDTH - 1)]
