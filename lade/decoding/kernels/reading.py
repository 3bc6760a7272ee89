"""Top-k of logits as entries, see `layout`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lade.compilation import compiled
from lade.decoding.kernels.layout import BITS, BLOCK, FLOOR, SCALE, SCORES, TINY, TOKEN, WIDTH, Floats, Ints, inlined

_FAR = -12.0  # block maxima this far below the best score are negligible in the sum


@inlined
def _above(score: Any, other: Any) -> Any:
    """Return whether a score ranks higher; NaN ranks highest, as in argmax."""
    return score > other or (math.isnan(score) and not math.isnan(other))


@inlined
def _rank(ids: Any, scores: Any, used: Any, new: Any, score: Any) -> Any:
    """Insert an id by its score, after equal ones, into the best `WIDTH`; return their new number."""
    if used == WIDTH and score <= scores[WIDTH - 1]:
        return used
    place = used if used < WIDTH else WIDTH - 1
    while place > 0 and _above(score, scores[place - 1]):
        ids[place], scores[place] = ids[place - 1], scores[place - 1]
        place -= 1
    ids[place], scores[place] = new, score
    return min(used + 1, WIDTH)


@inlined
def _total(maxima: Any, best: Any) -> Any:
    """Return the sum of exp(maximum - best) over the block maxima of a row."""
    total = 0.0
    for at in range(maxima.shape[0]):
        if maxima[at] - best > _FAR:
            total += math.exp(maxima[at] - best)
    return total


@inlined
def _entry(token: Any, weight: Any, total: Any) -> Any:
    """Return a token and its quantised log-odds as an entry; the empty entry if its id does not fit."""
    if token >= TOKEN:
        return np.int32(TOKEN)
    odds = math.log(max(weight, TINY) / max(total - weight, TINY))
    value = min(max((odds - FLOOR) / SCALE + 0.5, 0.0), 255.0) if not math.isnan(odds) else 0.0
    return np.int32(value) << BITS | np.int32(token)


@inlined
def _flipped(bits: Any) -> Any:
    """Map float32 bits to an int32 of the same order, or back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


@inlined
def _sortable(bits: Any) -> Any:
    """Map float32 bits to an order-preserving int32; NaN sorts above everything. Integer maxima are vectorised."""
    if bits & np.int32(0x7FFFFFFF) > np.int32(0x7F800000):
        return np.int32(0x7FC00000)
    return _flipped(bits)


@inlined
def _find_maxima(bits: Any, maxima: Any) -> None:
    """Write the maximum of each block of `BLOCK` logits, as float32 bits."""
    for at in range(maxima.shape[0]):
        best = np.int32(-(2**31))
        for token in range(min(BLOCK, bits.shape[0] - at * BLOCK)):  # counted from 0, else the loop is not vectorised
            best = max(best, _sortable(bits[at * BLOCK + token]))
        maxima[at] = _flipped(best)


@compiled(SCORES)
def entries_of(logits: Floats) -> tuple[npt.NDArray[np.int64], Ints]:
    """Return the argmax of each row, and its `WIDTH` likeliest tokens as entries.

    The `WIDTH` likeliest tokens lie in the `WIDTH` blocks with the highest maxima. The normaliser is the sum over the
    block maxima alone, which is close enough for ranking drafts.

    Args:
        logits: `[M, V]`.

    Returns:
        `[M]` ids, and `[M, WIDTH]` entries in descending order.
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
        best, least = scores[0], scores[kept - 1] if kept == WIDTH else -np.inf  # `WIDTH` tokens score at least this
        total = _total(maxima, best)
        among[:kept].sort()  # the first of equal scores wins
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
