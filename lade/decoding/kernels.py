"""The adaptive method's inner loops, compiled: the memory's tables, the mixing of rows, the growth of trees.

Each is compiled when it is first called on a machine (`compilation`), some seconds all together; plain decoding and the
paper's method call none. numba keeps the machine code beside this file, or in the user's cache folder where that cannot
be written.

**Why this is one long file.** Machine code contains what a kernel calls, and the values of its constants, but numba
takes it for up to date as long as the kernel's own file has not changed. Were a helper or a constant in another file,
whoever changed it would go on running the old one. So everything that is compiled into a kernel stands here.

Tokens of a context, its *tail*, are int32 `[LONGEST]`, the last one first, -1 before the text. Entries of a row are
int32: a token in the lower `BITS` bits, its value above; so entries sort by value. Tables are int32 `[C, 2 + WIDTH]`,
open addressing with linear probing: the two halves of a context's hash, then its row. The lower half is never 0 where a
slot is taken: its lowest bits tell the number of the order, from 1 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.experimental import structref

from lade.decoding.compilation import compiled
from lade.decoding.told_weights import told_weights

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ORDERS = (1, 2, 3, 5, 8)
"""Lengths of the contexts under which rows of logits are kept."""
TEXT_ORDERS = (2, 4)
"""Lengths of the contexts under which it is kept what followed in the text."""
LENGTHS = ORDERS + TEXT_ORDERS
LOGITS, TEXT, END = 0, len(ORDERS), len(LENGTHS)
"""Where either begins among the kinds of rows, and how many kinds there are."""
LINES = (len(ORDERS) + 1) * (len(TEXT_ORDERS) + 1)
"""Number of sets of weights: one for each number of rows of either kind that may be found."""
AT_PLACE, AT_TOKEN, NEAR = 0, 1, 2
"""Kinds of notes: what was said at a place, and at a token there; and how many kinds there are."""
SPOTS = 16
"""Earlier places that are kept of a node: those behind the longest ends of its text that stood there before."""
LATEST, EACH, TOLD = 0, 1, 2
"""Rows of what followed there: at the latest place of the longest end, and at each; and how many kinds there are."""
NODES, HEAP, ROOT, READ, PROMPT, COPY = range(6)
"""What `Work.used` counts: nodes, entries of the heap, the place of the root, tokens of the text that have been read,
those of them that are the prompt's, and the place of the last root behind a copy."""
LONGEST = max(LENGTHS)
WIDTH = 6
"""Tokens kept of a row."""
BITS = 21
TOKEN = (1 << BITS) - 1
"""The token of an entry; all ones where there is none."""
FLOOR, CEILING = -7.0, 5.0
"""Log-odds beyond which probabilities are not distinguished: 0.1 % and 99 %."""
SCALE = (CEILING - FLOOR) / 255
"""Log-odds per unit of a stored value: 0 stands for `FLOOR` and below, 255 for `CEILING` and above."""
TINY = 1e-9
"""The least weight: odds have a logarithm."""
BLOCK = 64
"""Logits that are looked at one by one only if their greatest is among the best."""

_NEGLIGIBLE = -4.6  # log-odds of about 1 %; of tokens below it only the chosen one is learned from
_FAR = -12.0  # what is so far below the best score adds nothing to a sum
_MIX, _SEED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x243F6A8885A308D3)
_MOST = (END + NEAR + TOLD) * WIDTH
_NOTES = 2048  # slots; a later note takes the place of an earlier one

# By the kinds that there are notes of, one bit each: the weight of each, and a bias. About what they become.
_NEAR_WEIGHTS = ((0.0, 0.0, 0.0), (0.05, 0.0, 0.15), (0.0, 0.1, 0.3), (0.05, 0.1, 0.45))

_LOOKED_AT = 128  # places where the last token stood before
_LONGEST_END = 32  # agreement beyond so many tokens is not told apart
_END_KINDS = 7  # 1, 2, 3, 4 and 5, 6 and 7, 8 to 15, and more tokens
_NOT_SEEN = 0.4  # of what followed at some places, something else is as likely as if it had been there so often
_COPIED = 16  # tokens that agree where a text is copied
_AFTER_COPY = 64  # tokens after one during which more copies are likely

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _inlined(function: FunctionT) -> FunctionT:
    """Compile as part of those that call it."""
    return cast(FunctionT, numba.njit(function))


class Work(NamedTuple):
    """A tree while it grows, and what is known at each of its nodes; N is how many there is room for.

    Attributes:
        ids, parents, depths: int32 `[N]`, as of a `TokenTree`.
        scores: float64 `[N]`, the probability that a node is accepted.
        tails: int32 `[N, LONGEST]`, the context of each node.
        found: int32 `[N]`, how many rows of logits the memory has for it; -1 where it has not been looked up.
        heard: int32 `[N]`, how many rows of what followed in the text.
        rows: int32 `[N, END, WIDTH]`, these rows, each where its kind belongs.
        near: int32 `[N]`, which kinds of notes there are, one bit each.
        near_rows: int32 `[N, NEAR, WIDTH]`, these notes.
        notes: int32 `[M, 2 + WIDTH]`, what was said at places of the text, whatever stood before: the place, the token
            there or -1, the row.
        near_weights: float64 `[2 ** NEAR, NEAR + 1]`, for each choice of kinds the weight of each, and a bias.
        offers: int32 `[N]`, how many different tokens rows and notes suggest.
        tokens, odds: int32 and float64 `[N, (END + NEAR) * WIDTH]`, the tokens and their log-odds; as many of the
            likeliest come first, in order, as have been asked for.
        keys: float64 `[2 N]`, of a heap: the score that the next child of a node has, or may have.
        nodes, ranks: int32 `[2 N]`, of the same heap: which node, and which of its children; -1 where the node has not
            been looked up.
        used: int64 `[6]`, numbers of what there is, by `NODES`, `HEAP`, `ROOT`, `READ`, `PROMPT`, `COPY`.
        text, links: int32 `[T]`, the text, and where each of its tokens stood before that, -1 for nowhere.
        spots: int32 `[N, SPOTS]`, the numbers of the tokens that follow at earlier places, the longest ends first.
        agreed: int32 `[N, SPOTS]`, how many tokens before each are those at the end of the node's text.
        spot_counts: int32 `[N]`, how many such places there are.
        told: int32 `[N]`, which of `told_weights` are in use; -1 where there are no such places.
        told_rows: int32 `[N, TOLD, WIDTH]`, what followed there.
        told_weights: float64 `[8 * _END_KINDS, TOLD + 2]`, the weight of either row, a bias, and how fast they are
            learned, see `told_weights`.
    """

    ids: Ints
    parents: Ints
    depths: Ints
    scores: Doubles
    tails: Ints
    found: Ints
    heard: Ints
    rows: Ints
    near: Ints
    near_rows: Ints
    notes: Ints
    near_weights: Doubles
    offers: Ints
    tokens: Ints
    odds: Doubles
    keys: Doubles
    nodes: Ints
    ranks: Ints
    used: npt.NDArray[np.int64]
    text: Ints
    links: Ints
    spots: Ints
    agreed: Ints
    spot_counts: Ints
    told: Ints
    told_rows: Ints
    told_weights: Doubles

    @classmethod
    def of(cls, room: int) -> Work:
        """Empty, with room for N nodes."""
        ints = [np.empty(room, np.int32) for _ in range(9)]
        ids, parents, depths, found, heard, near, offers, spot_counts, told = ints
        return cls(
            ids=ids,
            parents=parents,
            depths=depths,
            scores=np.empty(room),
            tails=np.empty((room, LONGEST), np.int32),
            found=found,
            heard=heard,
            rows=np.empty((room, END, WIDTH), np.int32),
            near=near,
            near_rows=np.empty((room, NEAR, WIDTH), np.int32),
            notes=np.full((_NOTES, 2 + WIDTH), -2, np.int32),
            near_weights=np.array(_NEAR_WEIGHTS),
            offers=offers,
            tokens=np.empty((room, _MOST), np.int32),
            odds=np.empty((room, _MOST)),
            keys=np.empty(2 * room + 2),
            nodes=np.empty(2 * room + 2, np.int32),
            ranks=np.empty(2 * room + 2, np.int32),
            used=np.array([0, 0, 0, 0, 0, -_AFTER_COPY], np.int64),
            text=np.zeros(1, np.int32),
            links=np.zeros(1, np.int32),
            spots=np.empty((room, SPOTS), np.int32),
            agreed=np.empty((room, SPOTS), np.int32),
            spot_counts=spot_counts,
            told=told,
            told_rows=np.empty((room, TOLD, WIDTH), np.int32),
            told_weights=np.array(told_weights()),
        )

    def widened(self, room: int) -> Work:
        """The same with more room."""
        wider = Work.of(room)._replace(text=self.text, links=self.links)
        for before, after in zip(cast(Iterable[Any], self), cast(Iterable[Any], wider), strict=True):
            after[: len(before)] = before
        return wider


_INTS, _TABLE, _LONGS = numba.int32[::1], numba.int32[:, ::1], numba.int64[::1]
_DOUBLES, _MATRIX, _SCORES = numba.float64[::1], numba.float64[:, ::1], numba.float32[:, ::1]
_INT, _DOUBLE = numba.int64, numba.float64
_WORK = cast(Any, numba).typeof(Work.of(1))


@structref.register
class HeldType(numba.types.StructRef):
    """The type of `Held`."""


cast(Any, structref).define_boxing(HeldType, structref.StructRefProxy)
_HELD = cast(Any, HeldType)([("work", _WORK)])
_new: Any = structref.new


class Held(NamedTuple):
    """A `Work` as compiled code holds it, that is as one thing: each call with its arrays would look at all of them.

    This stands in its place where numba is switched off.
    """

    work: Work


def hold(work: Work) -> Held:
    """Have compiled code hold these arrays."""
    return Held(work) if cast(Any, numba.config).DISABLE_JIT else _held(work)


@compiled(_WORK)
def _held(work: Work) -> Any:
    held = _new(_HELD)
    held.work = work
    return held


# ------------------------------------------------------------------------------------------------------------- tables


@_inlined
def _lengthened(state: Any, token: Any) -> Any:
    """The hash of a context one token longer, towards the start of the text."""
    state = (state ^ np.uint64(token + 2)) * _MIX
    return state ^ (state >> np.uint64(29))


@_inlined
def _key(state: Any, number: Any) -> Any:
    """Both halves of the key of the context of the order of that number."""
    low = np.int32(((state >> np.uint64(3)) << np.uint64(3) | np.uint64(number + 1)) & np.uint64(0xFFFFFFFF))
    return low, np.int32(state >> np.uint64(32))


@_inlined
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


@_inlined
def _average(best: Any, before: Any, slot: Any, rows: Any, row: Any) -> None:
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


@_inlined
def _insert(best: Any, entry: Any) -> None:
    """Put an entry where it belongs among the best ones, in falling order; the last one goes."""
    place = WIDTH
    while place > 0 and (entry > best[place - 1] or best[place - 1] == TOKEN):
        if place < WIDTH:
            best[place] = best[place - 1]
        place -= 1
    if place < WIDTH:
        best[place] = entry


@_inlined
def _take_in(young: Any, old: Any, tail: Any, rows: Any, row: Any, first: Any, end: Any, best: Any) -> Any:
    """Take one row in under the ends of a context; returns how many more slots are taken now."""
    state, number, taken = _SEED, first, 0
    for place in range(LENGTHS[end - 1]):
        state = _lengthened(state, tail[place])
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
            _average(best, before, at, rows, row)
            for entry in range(WIDTH):
                young[slot, 2 + entry] = best[entry]
        else:
            for entry in range(WIDTH):
                young[slot, 2 + entry] = rows[row, entry]
    return taken


@compiled(_TABLE, _TABLE, _TABLE, _TABLE, _INT, _INT, _INT, _INT, _INT)
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


@compiled(_TABLE, _TABLE, _TABLE, _TABLE, _LONGS, _LONGS)
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


@compiled(_TABLE, _TABLE)
def rehash(table: Ints, into: Ints) -> None:
    """Enter all slots of a table into a larger one, which lacks them."""
    for row in range(table.shape[0]):
        if table[row, 0] != 0:
            slot = ~_slot(into, table[row, 0], table[row, 1])
            for place in range(table.shape[1]):
                into[slot, place] = table[row, place]


@compiled(_TABLE, _TABLE)
def count_missing(table: Ints, other: Ints) -> int:
    """How many slots of a table another one lacks."""
    missing = 0
    for row in range(table.shape[0]):
        if table[row, 0] != 0 and _slot(other, table[row, 0], table[row, 1]) < 0:
            missing += 1
    return missing


@_inlined
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


@_inlined
def _look_up(young: Any, old: Any, tail: Any, rows: Any) -> Any:
    """Copy what is known; of either kind a longer end is known only if the shorter ones are."""
    found, heard, state = LOGITS, TEXT, _SEED
    for place in range(LONGEST):
        state = _lengthened(state, tail[place])
        if heard < END and place + 1 == LENGTHS[heard] and _copy(young, old, state, heard, rows):
            heard += 1
        if found < TEXT and place + 1 == LENGTHS[found] and _copy(young, old, state, found, rows):
            found += 1
    return found - LOGITS, heard - TEXT


@compiled(_TABLE, _TABLE, _INTS, _TABLE)
def look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> tuple[int, int]:
    """Copy what is known about a context into `rows`, `[END, WIDTH]`; returns how many rows of either kind."""
    found, heard = _look_up(young, old, tail, rows)
    return found, heard


@compiled(_LONGS, _INT, _INT)
def tails_of(text: npt.NDArray[np.int64], start: int, count: int) -> Ints:
    """Contexts `[count, LONGEST]` that end with the tokens of a text from number `start` on."""
    tails = np.full((count, LONGEST), -1, np.int32)
    for row in range(count):
        for place in range(min(LONGEST, start + row + 1)):
            tails[row, place] = text[start + row - place]
    return tails


@_inlined
def _certain(tokens: Any) -> Any:
    """Rows that are sure of one token each."""
    rows = np.full((tokens.shape[0], WIDTH), TOKEN, np.int32)
    for row in range(tokens.shape[0]):
        if tokens[row] < TOKEN:
            rows[row, 0] = 255 << BITS | tokens[row]
    return rows


@compiled(_LONGS)
def certain(tokens: npt.NDArray[np.int64]) -> Ints:
    """Rows `[M, WIDTH]` that are sure of one token each; of one that is too large for an entry they say nothing."""
    rows: Ints = _certain(tokens)
    return rows


# ------------------------------------------------------------------------------------------------------------- mixing


@_inlined
def _probability(log_odds: Any) -> Any:
    return 1.0 / (1.0 + math.exp(-log_odds))


@_inlined
def _has(found: Any, heard: Any, kind: Any) -> Any:
    """Whether a row of that kind was found, by the numbers of rows of either."""
    return kind < found or TEXT <= kind < TEXT + heard


@_inlined
def _line(found: Any, heard: Any) -> Any:
    """Which weights are in use, by the numbers of rows."""
    return found * (len(TEXT_ORDERS) + 1) + heard


@_inlined
def _note_at(notes: Any, place: Any, token: Any) -> Any:
    """The slot of what is noted of a place, and of a token there or -1."""
    state = _lengthened(_lengthened(_SEED, place), token)
    return np.int64((state >> np.uint64(40)) % np.uint64(notes.shape[0]))


@_inlined
def _recall(notes: Any, place: Any, token: Any, rows: Any) -> Any:
    """Copy what is noted of a place, and of a token there; returns which kinds there are."""
    near = 0
    for kind in range(NEAR):
        of = token if kind == AT_TOKEN else -1
        slot = _note_at(notes, place, of)
        if notes[slot, 0] == place and notes[slot, 1] == of:
            near |= 1 << kind
            for entry in range(WIDTH):
                rows[kind, entry] = notes[slot, 2 + entry]
    return near


@_inlined
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


@_inlined
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
    return offers


@_inlined
def _end_kind(agreed: Any) -> Any:
    """Which lengths of an end are counted together; see `_END_KINDS`."""
    if agreed <= 3:
        return agreed - 1
    if agreed <= 7:
        return 3 if agreed <= 5 else 4
    return 5 if agreed <= 15 else 6


@_inlined
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


@_inlined
def _told_set(place: Any, used: Any) -> Any:
    """Where the set of weights begins for what an earlier place told: of the prompt or not, behind a copy or not."""
    of_prompt, copying = place < used[PROMPT], used[ROOT] - used[COPY] < _AFTER_COPY
    return 2 * _END_KINDS * ((0 if of_prompt else 1) + (2 if copying else 0))


@_inlined
def _expand(work: Any, node: Any, young: Any, old: Any, weights: Any) -> None:
    """Ask the memory, and the notes, about a node, once."""
    if work.found[node] < 0:
        rows, near_rows, near_weights = work.rows[node], work.near_rows[node], work.near_weights
        found, heard = _look_up(young, old, work.tails[node], rows)
        near = _recall(work.notes, work.used[ROOT] + work.depths[node], work.ids[node], near_rows)
        told, told_rows, told_weights = -1, work.told_rows[node], work.told_weights
        if work.spot_counts[node] > 0:
            told = _tell(work.text, work.spots[node], work.spot_counts[node], work.agreed[node, 0], told_rows)
            told += _told_set(work.spots[node, 0], work.used)
        work.found[node], work.heard[node], work.near[node], work.told[node] = found, heard, near, told
        tokens, odds = work.tokens[node], work.odds[node]
        work.offers[node] = _mix(
            rows, found, heard, weights, near_rows, near, near_weights, told_rows, told, told_weights, tokens, odds
        )


@_inlined
def _bring_forward(tokens: Any, odds: Any, offers: Any, rank: Any) -> None:
    """Move the likeliest offer from number `rank` on to that place; those before are likelier."""
    best = rank
    for at in range(rank + 1, offers):
        if odds[at] > odds[best]:
            best = at
    tokens[rank], tokens[best] = tokens[best], tokens[rank]
    odds[rank], odds[best] = odds[best], odds[rank]


@_inlined
def _value(rows: Any, kind: Any, token: Any) -> Any:
    """What a row says of a token."""
    for place in range(WIDTH):
        if rows[kind, place] & TOKEN == token:
            return rows[kind, place] >> BITS
    return np.int32(0)


@_inlined
def _learn_told(work: Any, node: Any, chosen: Any, rate: Any) -> None:
    """Move the weights of what earlier places told of a node."""
    rows, weights = work.told_rows[node], work.told_weights[work.told[node]]
    rate *= weights[TOLD + 1]
    for at in range(work.offers[node]):
        token, log_odds = work.tokens[node, at], work.odds[node, at]
        if token != chosen and log_odds < _NEGLIGIBLE:
            continue
        error = (1.0 if token == chosen else 0.0) - _probability(log_odds)
        for kind in range(TOLD):
            weights[kind] += rate * error * (FLOOR + SCALE * _value(rows, kind, token))
        weights[TOLD] += rate * error


@_inlined
def _learn_weights(work: Any, young: Any, old: Any, weights: Any, path: Any, chosen: Any, rate: Any) -> None:
    """Move the weights down the gradient of the coding cost, for nodes that verification has reached."""
    for step in range(path.shape[0]):
        node = path[step]
        _expand(work, node, young, old, weights)
        found, heard = work.found[node], work.heard[node]
        line, gradient, rows = _line(found, heard), np.zeros(END + 1), work.rows[node]
        near, near_gradient, near_rows = work.near[node], np.zeros(NEAR), work.near_rows[node]
        for at in range(work.offers[node]):
            token, log_odds = work.tokens[node, at], work.odds[node, at]
            if token != chosen[step] and log_odds < _NEGLIGIBLE:
                continue
            error = (1.0 if token == chosen[step] else 0.0) - _probability(log_odds)
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


# ------------------------------------------------------------------------------------------------------------- growth


@_inlined
def _push(keys: Any, nodes: Any, ranks: Any, used: Any, key: Any, node: Any, rank: Any) -> None:
    """Enter one into the heap."""
    at = used[HEAP]
    used[HEAP] += 1
    while at > 0 and keys[(at - 1) >> 1] < key:
        above = (at - 1) >> 1
        keys[at], nodes[at], ranks[at] = keys[above], nodes[above], ranks[above]
        at = above
    keys[at], nodes[at], ranks[at] = key, node, rank


@_inlined
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


@_inlined
def _add(work: Any, parent: Any, token: Any) -> Any:
    """A child, and its context."""
    node = work.used[NODES]
    work.used[NODES] += 1
    work.ids[node], work.parents[node], work.depths[node] = token, parent, work.depths[parent] + 1
    work.found[node] = -1
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


@_inlined
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


@_inlined
def _is_among(tokens: Any, token: Any) -> bool:
    for at in range(tokens.shape[0]):  # noqa: SIM110 - numba compiles no generators
        if tokens[at] == token:
            return True
    return False


@_inlined
def _note(work: Any, entries: Any) -> None:
    """Note what was said at the nodes of a tree, by their places; rows that come to one place are averaged."""
    best = np.empty(WIDTH, np.int32)
    for node in range(entries.shape[0] - 1, -1, -1):  # what comes last counts most: the likelier node
        place = work.used[ROOT] + work.depths[node]
        for kind in range(NEAR):
            token = work.ids[node] if kind == AT_TOKEN else -1
            slot = _note_at(work.notes, place, token)
            if work.notes[slot, 0] == place and work.notes[slot, 1] == token:
                _average(best, work.notes, slot, entries, node)
                for entry in range(WIDTH):
                    work.notes[slot, 2 + entry] = best[entry]
            else:
                work.notes[slot, 0], work.notes[slot, 1] = place, token
                for entry in range(WIDTH):
                    work.notes[slot, 2 + entry] = entries[node, entry]


@compiled(_HELD, _TABLE, _TABLE, _MATRIX, _TABLE, _LONGS, _LONGS, _DOUBLE)
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
    _learn_weights(held.work, young, old, weights, path, chosen, rate)
    _note(held.work, entries)


@compiled(_HELD, _INT, _LONGS, _DOUBLE)
def plant(held: Held, root: int, tail: npt.NDArray[np.int64], promise: float) -> None:
    """Begin a new tree, whose root is token number `root` of the text, the last one of `tail`.

    Earlier places are known where the text has been read up to there.
    """
    work = held.work
    work.ids[0], work.parents[0], work.depths[0] = tail[tail.shape[0] - 1], -1, 0
    work.scores[0], work.found[0] = 1.0, -1
    for place in range(LONGEST):
        work.tails[0, place] = tail[tail.shape[0] - 1 - place] if place < tail.shape[0] else -1
    work.used[NODES], work.used[HEAP], work.used[ROOT] = 1, 0, root
    work.spot_counts[0] = 0
    if work.used[READ] == root + 1:
        work.spot_counts[0] = _find_spots(work.text, work.links, root, work.spots[0], work.agreed[0])
    if work.spot_counts[0] > 0 and work.agreed[0, 0] >= _COPIED:
        work.used[COPY] = root
    _push(work.keys, work.nodes, work.ranks, work.used, promise, 0, -1)


@compiled(_HELD, _TABLE, _TABLE, _MATRIX, _MATRIX, _LONGS, _INT, _INT, _DOUBLE)
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
                _expand(work, parent, young, old, weights)
            following = rank + 1
            if following < work.offers[parent] and work.depths[parent] < max_depth:
                _bring_forward(work.tokens[parent], work.odds[parent], work.offers[parent], following)
                key = work.scores[parent] * _probability(work.odds[parent, following])
                _push(keys, nodes, ranks, used, key, parent, following)
            token = work.tokens[parent, rank] if rank >= 0 else vocabulary
            if token < vocabulary and not _is_among(excluded, token):
                node = _add(work, parent, token)
                work.scores[node] = score
                _push(keys, nodes, ranks, used, promise * score, node, -1)
        if used[NODES] < size:
            break
    return int(work.used[NODES])


@compiled(_HELD, _INT, _LONGS, _LONGS)
def follow(held: Held, kept: int, ids: npt.NDArray[np.int64], parents: npt.NDArray[np.int64]) -> None:
    """Keep the first nodes, and add what others have added to the tree, each with its token and parent."""
    work = held.work
    work.used[NODES] = kept
    for at in range(ids.shape[0]):
        _add(work, parents[at], ids[at])


# ------------------------------------------------------------------------------------------------------------ reading


@_inlined
def _above(score: Any, other: Any) -> Any:
    """Whether a score is higher, where what is no number is highest of all, as for an argmax."""
    return score > other or (math.isnan(score) and not math.isnan(other))


@_inlined
def _rank(ids: Any, scores: Any, used: Any, new: Any, score: Any) -> Any:
    """Put an id where it belongs by its score, after those with the same; returns how many there are now."""
    if used == WIDTH and score <= scores[WIDTH - 1]:
        return used
    place = used if used < WIDTH else WIDTH - 1
    while place > 0 and _above(score, scores[place - 1]):
        ids[place], scores[place] = ids[place - 1], scores[place - 1]
        place -= 1
    ids[place], scores[place] = new, score
    return min(used + 1, WIDTH)


@_inlined
def _total(maxima: Any, best: Any) -> Any:
    """The sum over all maxima of a row, relative to the best score."""
    total = 0.0
    for at in range(maxima.shape[0]):
        if maxima[at] - best > _FAR:
            total += math.exp(maxima[at] - best)
    return total


@_inlined
def _entry(token: Any, weight: Any, total: Any) -> Any:
    """A token with its log-odds, by its share of a total; none where its number is too large."""
    if token >= TOKEN:
        return np.int32(TOKEN)
    odds = math.log(max(weight, TINY) / max(total - weight, TINY))
    value = min(max((odds - FLOOR) / SCALE + 0.5, 0.0), 255.0) if not math.isnan(odds) else 0.0
    return np.int32(value) << BITS | np.int32(token)


@_inlined
def _flipped(bits: Any) -> Any:
    """Between the bits of a float32 and a whole number of the same order, either way."""
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@_inlined
def _sortable(bits: Any) -> Any:
    """The whole number of a logit: what is no number is above all. Compilers compare many at once of such only."""
    if bits & np.int32(0x7FFFFFFF) > np.int32(0x7F800000):
        return np.int32(0x7FC00000)
    return _flipped(bits)


@_inlined
def _find_maxima(bits: Any, maxima: Any) -> None:
    """Of each `BLOCK` logits in turn the greatest; of both the bits."""
    for at in range(maxima.shape[0]):
        best = np.int32(-(2**31))
        for token in range(min(BLOCK, bits.shape[0] - at * BLOCK)):  # counted from 0: else they are compared singly
            best = max(best, _sortable(bits[at * BLOCK + token]))
        maxima[at] = _flipped(best)


@compiled(_SCORES)
def entries_of(logits: Floats) -> tuple[npt.NDArray[np.int64], Ints]:
    """The argmax of each row, and its likeliest tokens as entries.

    The `WIDTH` likeliest tokens lie in the `WIDTH` blocks with the highest maxima. Probabilities are relative to the
    sum over all maxima, which leaves out little: they only weigh guesses.

    Args:
        logits: `[M, V]`.

    Returns:
        `[M]` and `[M, WIDTH]`, in falling order.
    """
    rows, vocabulary = logits.shape
    picks, entries = np.empty(rows, np.int64), np.full((rows, WIDTH), TOKEN, np.int32)
    tokens, scores, among = np.empty(WIDTH, np.int64), np.empty(WIDTH, np.float32), np.empty(WIDTH, np.int64)
    maxima = np.empty((vocabulary + BLOCK - 1) // BLOCK, np.float32)
    for row in range(rows):
        _find_maxima(logits[row].view(np.int32), maxima.view(np.int32))
        kept = 0
        for at in range(maxima.shape[0]):
            kept = _rank(among, scores, kept, at, maxima[at])
        best, least = scores[0], scores[kept - 1] if kept == WIDTH else -np.inf  # as many tokens are no worse than that
        total = _total(maxima, best)
        among[:kept].sort()  # of equal scores the first token counts
        used = 0
        for place in range(kept):
            first = among[place] * BLOCK
            for token in range(first, min(first + BLOCK, vocabulary)):
                if not logits[row, token] < least:
                    used = _rank(tokens, scores, used, token, logits[row, token])
        picks[row] = tokens[0]
        for place in range(used):
            entries[row, place] = _entry(tokens[place], math.exp(scores[place] - best), total)
    return picks, entries
