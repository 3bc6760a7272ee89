"""Top-k of logits as entries: `reading.cpp`."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import BITS, BLOCK, FLOOR, SCALE, TINY, TOKEN, WIDTH, Floats, Ints

Halves = npt.NDArray[np.uint16]

_FAR = -12.0  # block maxima this far below the best score are negligible in the sum


class _Best:
    """The `WIDTH` ids with the highest scores so far, in descending order; NaN ranks highest, as in argmax."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.scores: list[float] = []

    def rank(self, new: int, score: float) -> None:
        """Insert an id by its score, after equal ones."""
        if len(self.ids) == WIDTH:
            if score <= self.scores[-1]:
                return
            self.ids.pop()
            self.scores.pop()
        place = len(self.ids)
        while place > 0 and _above(score, self.scores[place - 1]):
            place -= 1
        self.ids.insert(place, new)
        self.scores.insert(place, score)


def _above(score: float, other: float) -> bool:
    return score > other or (math.isnan(score) and not math.isnan(other))


def _maxima(logits: Floats) -> Floats:
    """Return the maximum of each block of `BLOCK` logits; NaN is above everything."""
    bits = logits.view(np.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC00000
    maxima = np.maximum.reduceat(ordered, np.arange(0, len(logits), BLOCK))
    found: Floats = (maxima ^ ((maxima >> 31) & 0x7FFFFFFF)).view(np.float32)
    return found


def _exponential(score: float, best: float) -> float:
    """Return `exp(score - best)` in float32; C's `expf` may round a rare tie otherwise."""
    with np.errstate(invalid="ignore"):
        return float(np.float32(math.exp(np.float32(score) - np.float32(best))))


def _entry(token: int, weight: float, total: float) -> int:
    """Return a token and its quantised log-odds as an entry; the empty entry if its id does not fit."""
    if token >= TOKEN:
        return TOKEN
    odds = math.log(max(weight, TINY) / max(total - weight, TINY))
    value = min(max((odds - FLOOR) / SCALE + 0.5, 0.0), 255.0) if not math.isnan(odds) else 0.0
    return int(value) << BITS | token


def _entries_of(logits: Floats, maxima: Floats, picks: npt.NDArray[np.int64], entries: Ints) -> None:
    """See `entries_of`; `maxima`, `[ceil(V / BLOCK)]`, is written."""
    _read_rows(logits, maxima, picks, entries)


def _read_rows(logits: Floats, maxima: Floats, picks: npt.NDArray[np.int64], entries: Ints) -> None:
    for row, scores in enumerate(logits):
        maxima[:] = _maxima(scores)
        among, tokens, highest = _Best(), _Best(), maxima.tolist()
        for at, score in enumerate(highest):
            among.rank(at, score)
        best = among.scores[0]
        least = among.scores[-1] if len(among.ids) == WIDTH else -math.inf  # `WIDTH` tokens score at least this
        with np.errstate(invalid="ignore"):
            near = maxima[maxima - np.float32(best) > _FAR].tolist()
        total = 0.0
        for score in near:
            total += _exponential(score, best)
        for at in sorted(among.ids):  # the first of equal scores wins
            for token, score in enumerate(scores[at * BLOCK : (at + 1) * BLOCK].tolist(), start=at * BLOCK):
                if not score < least:
                    tokens.rank(token, score)
        picks[row], entries[row] = tokens.ids[0], TOKEN
        for place, (token, score) in enumerate(zip(tokens.ids, tokens.scores, strict=True)):
            entries[row, place] = _entry(token, _exponential(score, best), total)


def _entries_of_bfloat16(logits: Halves, maxima: Floats, picks: npt.NDArray[np.int64], entries: Ints) -> None:
    """See `entries_of`; `maxima`, `[ceil(V / BLOCK)]`, is written."""
    _read_rows((logits.astype(np.uint32) << 16).view(np.float32), maxima, picks, entries)
