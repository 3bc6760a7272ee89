"""Hash tables of the context memory: rows by hashed context; a row for a known context is averaged with the old one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lade.compilation import compiled
from lade.decoding.kernels.layout import (
    BITS,
    END,
    INT,
    INTS,
    LENGTHS,
    LOGITS,
    LONGEST,
    LONGS,
    TABLE,
    TEXT,
    TOKEN,
    WIDTH,
    Ints,
    inlined,
)

_MIX = np.uint64(0x9E3779B97F4A7C15)
SEED = np.uint64(0x243F6A8885A308D3)
"""Hash of the empty context."""


@inlined
def lengthened(state: Any, token: Any) -> Any:
    """Return the hash of a context extended by one token towards the start of the text."""
    state = (state ^ np.uint64(token + 2)) * _MIX
    return state ^ (state >> np.uint64(29))


@inlined
def _key(state: Any, number: Any) -> Any:
    """Return both halves of a context's key, given its hash and the index of its order."""
    low = np.int32(((state >> np.uint64(3)) << np.uint64(3) | np.uint64(number + 1)) & np.uint64(0xFFFFFFFF))
    return low, np.int32(state >> np.uint64(32))


@inlined
def _slot(table: Any, low: Any, high: Any) -> Any:
    """Return the slot of a key; if it is missing, the bitwise complement of the free slot for it."""
    capacity = np.uint64(table.shape[0])
    slot: Any = np.int64((np.uint64(np.uint32(high)) * capacity) >> np.uint64(32))
    while table[slot, 0] != 0:
        if table[slot, 0] == low and table[slot, 1] == high:
            return slot
        slot += 1
        if slot == table.shape[0]:
            slot = 0
    return ~slot


@inlined
def average(best: Any, before: Any, slot: Any, rows: Any, row: Any) -> None:
    """Write the mean of a table's row and a new one to `best`. A token missing from one of them counts 0 there."""
    best[:] = TOKEN
    for first in range(2 * WIDTH):
        entry = rows[row, first] if first < WIDTH else before[slot, 2 + first - WIDTH]
        token = entry & TOKEN
        if token == TOKEN:
            continue
        total, known = entry >> BITS, False
        for second in range(WIDTH):
            other = before[slot, 2 + second] if first < WIDTH else rows[row, second]
            if other & TOKEN == token:
                total += other >> BITS
                known = first >= WIDTH  # was counted already
                break
        if not known:
            _insert(best, np.int32(total >> 1 << BITS | token))


@inlined
def _insert(best: Any, entry: Any) -> None:
    """Insert an entry into the best ones, in descending order; the last one drops out."""
    place = WIDTH
    while place > 0 and (entry > best[place - 1] or best[place - 1] == TOKEN):
        if place < WIDTH:
            best[place] = best[place - 1]
        place -= 1
    if place < WIDTH:
        best[place] = entry


@inlined
def _take_in(young: Any, old: Any, tail: Any, rows: Any, row: Any, first: Any, end: Any, best: Any) -> Any:
    """Store one row under several suffixes of a context; return the number of newly occupied slots."""
    state, number, taken = SEED, first, 0
    for place in range(LENGTHS[end - 1]):
        state = lengthened(state, tail[place])
        if place + 1 != LENGTHS[number]:
            continue
        low, high = _key(state, number)
        number += 1
        slot = _slot(young, low, high)
        before = young
        at = slot
        if slot < 0:
            slot = ~slot
            before = old
            at = _slot(old, low, high)
            young[slot, 0], young[slot, 1] = low, high
            taken += 1
        if at >= 0:
            average(best, before, at, rows, row)
            for entry in range(WIDTH):
                young[slot, 2 + entry] = best[entry]
        else:
            for entry in range(WIDTH):
                young[slot, 2 + entry] = rows[row, entry]
    return taken


@compiled(TABLE, TABLE, TABLE, TABLE, INT, INT, INT, INT, INT)
def learn(
    young: Ints, old: Ints, tails: Ints, rows: Ints, first: int, end: int, start: int, taken: int, most: int
) -> tuple[int, int]:
    """Store rows under the suffixes of their contexts, averaged with known ones.

    Args:
        young: `[C, 2 + WIDTH]`, the table to write.
        old: `[C', 2 + WIDTH]`, the table to read rows from that `young` lacks.
        tails: `[M, LONGEST]` contexts.
        rows: `[M, WIDTH]` entries.
        first: first kind of rows to write.
        end: one past the last kind; either all of them are rows of logits, or all are of text.
        start: index of the first context to store.
        taken: number of occupied slots of `young`.
        most: maximum number of occupied slots, at most C - 1.

    Returns:
        Index of the first context that does not fit (M if all do), and the new number of occupied slots.
    """
    best = np.empty(WIDTH, np.int32)
    for row in range(start, tails.shape[0]):
        if taken + end - first > most:
            return row, taken
        taken += _take_in(young, old, tails[row], rows, row, first, end, best)
    return tails.shape[0], taken


@compiled(TABLE, TABLE, TABLE, TABLE, LONGS, LONGS)
def learn_step(
    young: Ints, old: Ints, tails: Ints, rows: Ints, path: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64]
) -> int:
    """Store the rows of a whole step and the tokens that followed in the text; `young` must have room for all of them.

    Args:
        young: `[C, 2 + WIDTH]`, the table to write.
        old: `[C', 2 + WIDTH]`, the table to read rows from that `young` lacks.
        tails: `[M, LONGEST]` contexts.
        rows: `[M, WIDTH]` entries of logits.
        path: `[A]`, indices of the contexts that were accepted.
        chosen: `[A]`, the token that followed each of these.

    Returns:
        The number of newly occupied slots.
    """
    best, taken, certain_rows = np.empty(WIDTH, np.int32), 0, _certain(chosen)
    for row in range(tails.shape[0]):
        taken += _take_in(young, old, tails[row], rows, row, LOGITS, TEXT, best)
    for row in range(path.shape[0]):
        taken += _take_in(young, old, tails[path[row]], certain_rows, row, TEXT, END, best)
    return taken


@compiled(TABLE, TABLE)
def rehash(table: Ints, into: Ints) -> None:
    """Copy all occupied slots of a table into a larger one that has none of their keys."""
    for row in range(table.shape[0]):
        if table[row, 0] != 0:
            slot = ~_slot(into, table[row, 0], table[row, 1])
            for place in range(table.shape[1]):
                into[slot, place] = table[row, place]


@compiled(TABLE, TABLE)
def count_missing(table: Ints, other: Ints) -> int:
    """Return the number of keys of a table that another one lacks."""
    missing = 0
    for row in range(table.shape[0]):
        if table[row, 0] != 0 and _slot(other, table[row, 0], table[row, 1]) < 0:
            missing += 1
    return missing


@inlined
def _copy(young: Any, old: Any, state: Any, kind: Any, rows: Any) -> Any:
    """Copy the row of one kind, if it is known; return whether it is."""
    low, high = _key(state, kind)
    table, slot = young, _slot(young, low, high)
    if slot < 0:
        table, slot = old, _slot(old, low, high)
    if slot < 0:
        return False
    for entry in range(WIDTH):
        rows[kind, entry] = table[slot, 2 + entry]
    return True


@inlined
def find_rows(young: Any, old: Any, tail: Any, rows: Any) -> Any:
    """Copy all known rows of a context; return the numbers of hits with logits and text. Hits are nested by length."""
    logit_hits, text_hits, state = LOGITS, TEXT, SEED
    for place in range(LONGEST):
        state = lengthened(state, tail[place])
        if text_hits < END and place + 1 == LENGTHS[text_hits] and _copy(young, old, state, text_hits, rows):
            text_hits += 1
        if logit_hits < TEXT and place + 1 == LENGTHS[logit_hits] and _copy(young, old, state, logit_hits, rows):
            logit_hits += 1
    return logit_hits - LOGITS, text_hits - TEXT


@compiled(TABLE, TABLE, INTS, TABLE)
def look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> tuple[int, int]:
    """Copy the known rows of a context to `rows`, `[END, WIDTH]`; return the numbers of hits with logits and text."""
    logit_hits, text_hits = find_rows(young, old, tail, rows)
    return logit_hits, text_hits


@compiled(LONGS, INT, INT)
def tails_of(text: npt.NDArray[np.int64], start: int, count: int) -> Ints:
    """Return the contexts `[count, LONGEST]` that end with the tokens of a text from index `start` on."""
    tails = np.full((count, LONGEST), -1, np.int32)
    for row in range(count):
        for place in range(min(LONGEST, start + row + 1)):
            tails[row, place] = text[start + row - place]
    return tails


@inlined
def _certain(tokens: Any) -> Any:
    """Return rows that hold one token each, with the highest log-odds."""
    rows = np.full((tokens.shape[0], WIDTH), TOKEN, np.int32)
    for row in range(tokens.shape[0]):
        if tokens[row] < TOKEN:
            rows[row, 0] = 255 << BITS | tokens[row]
    return rows


@compiled(LONGS)
def certain(tokens: npt.NDArray[np.int64]) -> Ints:
    """Return rows `[M, WIDTH]` that hold one token each, with the highest log-odds; empty where its id does not fit."""
    rows: Ints = _certain(tokens)
    return rows
