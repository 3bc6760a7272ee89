"""The memory's tables: rows by the hash of their contexts, averaged where one comes again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lade.compilation import compiled
from lade.decoding.kernels.array_types import INT, INTS, LONGS, TABLE
from lade.decoding.kernels.inlined import inlined
from lade.decoding.kernels.layout import BITS, END, LENGTHS, LOGITS, LONGEST, TEXT, TOKEN, WIDTH, Ints

_MIX = np.uint64(0x9E3779B97F4A7C15)
SEED = np.uint64(0x243F6A8885A308D3)
"""The hash of a context of no tokens."""


@inlined
def lengthened(state: Any, token: Any) -> Any:
    """The hash of a context one token longer, towards the start of the text."""
    state = (state ^ np.uint64(token + 2)) * _MIX
    return state ^ (state >> np.uint64(29))


@inlined
def _key(state: Any, number: Any) -> Any:
    """Both halves of the key of the context of the order of that number."""
    low = np.int32(((state >> np.uint64(3)) << np.uint64(3) | np.uint64(number + 1)) & np.uint64(0xFFFFFFFF))
    return low, np.int32(state >> np.uint64(32))


@inlined
def _slot(table: Any, low: Any, high: Any) -> Any:
    """The slot of a key, or the complement of the free one where it would go."""
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
    """The mean of a row of a table and a new one, into `best`. A token that one of them lacks counts 0 there."""
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
                known = first >= WIDTH  # has been counted already
                break
        if not known:
            _insert(best, np.int32(total >> 1 << BITS | token))


@inlined
def _insert(best: Any, entry: Any) -> None:
    """Put an entry where it belongs among the best ones, in falling order; the last one goes."""
    place = WIDTH
    while place > 0 and (entry > best[place - 1] or best[place - 1] == TOKEN):
        if place < WIDTH:
            best[place] = best[place - 1]
        place -= 1
    if place < WIDTH:
        best[place] = entry


@inlined
def _take_in(young: Any, old: Any, tail: Any, rows: Any, row: Any, first: Any, end: Any, best: Any) -> Any:
    """Take one row in under the ends of a context; returns how many more slots are taken now."""
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
    """Take rows in under the ends of their contexts, averaged with what is there.

    Args:
        young: `[C, 2 + WIDTH]`, the table to write.
        old: `[C', 2 + WIDTH]`, where a row is looked for that `young` lacks.
        tails: `[M, LONGEST]`, contexts.
        rows: `[M, WIDTH]`, entries of each.
        first: the first kind of rows to write.
        end: the kind after the last one; all of them are of logits, or all of texts.
        start: the first context to take in.
        taken: slots of `young` taken.
        most: how many may be, at most C - 1.

    Returns:
        The first context not taken in, since there is no room for all of its ends; and how many slots are taken now.
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
    """The same for all of a step, and what followed in the text; there has to be room for all of it.

    Args:
        young: see `learn`.
        old: likewise.
        tails: likewise.
        rows: likewise, of logits.
        path: `[A]`, which contexts came up in the text.
        chosen: `[A]`, the token that followed each of them.

    Returns:
        How many more slots are taken now.
    """
    best, taken, certain_rows = np.empty(WIDTH, np.int32), 0, _certain(chosen)
    for row in range(tails.shape[0]):
        taken += _take_in(young, old, tails[row], rows, row, LOGITS, TEXT, best)
    for row in range(path.shape[0]):
        taken += _take_in(young, old, tails[path[row]], certain_rows, row, TEXT, END, best)
    return taken


@compiled(TABLE, TABLE)
def rehash(table: Ints, into: Ints) -> None:
    """Enter all slots of a table into a larger one, which lacks them."""
    for row in range(table.shape[0]):
        if table[row, 0] != 0:
            slot = ~_slot(into, table[row, 0], table[row, 1])
            for place in range(table.shape[1]):
                into[slot, place] = table[row, place]


@compiled(TABLE, TABLE)
def count_missing(table: Ints, other: Ints) -> int:
    """How many slots of a table another one lacks."""
    missing = 0
    for row in range(table.shape[0]):
        if table[row, 0] != 0 and _slot(other, table[row, 0], table[row, 1]) < 0:
            missing += 1
    return missing


@inlined
def _copy(young: Any, old: Any, state: Any, kind: Any, rows: Any) -> Any:
    """Copy the row of that kind, if there is one."""
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
    """Copy what is known; of either kind a longer end is known only if the shorter ones are."""
    found, heard, state = LOGITS, TEXT, SEED
    for place in range(LONGEST):
        state = lengthened(state, tail[place])
        if heard < END and place + 1 == LENGTHS[heard] and _copy(young, old, state, heard, rows):
            heard += 1
        if found < TEXT and place + 1 == LENGTHS[found] and _copy(young, old, state, found, rows):
            found += 1
    return found - LOGITS, heard - TEXT


@compiled(TABLE, TABLE, INTS, TABLE)
def look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> tuple[int, int]:
    """Copy what is known about a context into `rows`, `[END, WIDTH]`; returns how many rows of either kind."""
    found, heard = find_rows(young, old, tail, rows)
    return found, heard


@compiled(LONGS, INT, INT)
def tails_of(text: npt.NDArray[np.int64], start: int, count: int) -> Ints:
    """Contexts `[count, LONGEST]` that end with the tokens of a text from number `start` on."""
    tails = np.full((count, LONGEST), -1, np.int32)
    for row in range(count):
        for place in range(min(LONGEST, start + row + 1)):
            tails[row, place] = text[start + row - place]
    return tails


@inlined
def _certain(tokens: Any) -> Any:
    """Rows that are sure of one token each."""
    rows = np.full((tokens.shape[0], WIDTH), TOKEN, np.int32)
    for row in range(tokens.shape[0]):
        if tokens[row] < TOKEN:
            rows[row, 0] = 255 << BITS | tokens[row]
    return rows


@compiled(LONGS)
def certain(tokens: npt.NDArray[np.int64]) -> Ints:
    """Rows `[M, WIDTH]` that are sure of one token each; of one that is too large for an entry they say nothing."""
    rows: Ints = _certain(tokens)
    return rows
