"""Hash tables of the context memory: rows by hashed context; a row for a known context is averaged with the old one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import LONGEST, WIDTH, Doubles, Ints
from lade.native.kernel import INT, INTS, LONGS, TABLE, Struct, kernel


class Tables(Struct):
    """Both tables of a context memory, and the weights of its mixer.

    Args:
        young: `[C, 2 + WIDTH]`, the table that is written.
        old: `[C', 2 + WIDTH]`, the former one.
        weights: `[WEIGHT_SETS, END + 1]`, see `memory.prior_weights`.

    Attributes:
        counts: int64 `[2]`, while a call learns from whole steps: number of occupied slots of `young`, and the greatest
            that it may become.
    """

    __slots__ = ("counts", "old", "weights", "young")

    def __init__(self, young: Ints, old: Ints, weights: Doubles) -> None:
        self.young, self.old, self.weights = young, old, weights
        arrays = young, old, weights
        super().__init__([field for array in arrays for field in (array.ctypes.data, *array.shape)] + [0, 0], arrays)
        self.counts = np.ctypeslib.as_array(self.fields)[-2:]


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
    return divmod(_learn(young, old, tails, rows, first, end, start, taken, most), 1 << 32)


@kernel(TABLE, TABLE, TABLE, TABLE, INT, INT, INT, INT, INT, result=INT)
def _learn(
    young: Ints, old: Ints, tails: Ints, rows: Ints, first: int, end: int, start: int, taken: int, most: int
) -> int: ...


@kernel(TABLE, TABLE)
def rehash(table: Ints, into: Ints) -> None:
    """Copy all occupied slots of a table into a larger one that has none of their keys."""


@kernel(TABLE, TABLE, result=INT)
def count_missing(table: Ints, other: Ints) -> int:
    """Return the number of keys of a table that another one lacks."""


def look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> tuple[int, int]:
    """Copy the known rows of a context to `rows`, `[END, WIDTH]`; return the numbers of hits with logits and text.

    Hits are nested by length: a suffix is looked up only if all shorter ones are known.
    """
    return divmod(_look_up(young, old, tail, rows), 1 << 32)


@kernel(TABLE, TABLE, INTS, TABLE, result=INT)
def _look_up(young: Ints, old: Ints, tail: Ints, rows: Ints) -> int: ...


def tails_of(text: npt.NDArray[np.int64], start: int, count: int) -> Ints:
    """Return the contexts `[count, LONGEST]` that end with the tokens of a text from index `start` on."""
    tails = np.empty((count, LONGEST), np.int32)
    _tails_of(text, start, tails)
    return tails


@kernel(LONGS, INT, TABLE)
def _tails_of(text: npt.NDArray[np.int64], start: int, tails: Ints) -> None: ...


def certain(tokens: npt.NDArray[np.int64]) -> Ints:
    """Return rows `[M, WIDTH]` that hold one token each, with the highest log-odds; empty where its id does not fit."""
    rows = np.empty((len(tokens), WIDTH), np.int32)
    _certain(tokens, rows)
    return rows


@kernel(LONGS, TABLE)
def _certain(tokens: npt.NDArray[np.int64], rows: Ints) -> None: ...
