"""Contexts, the ends of a text as numbers, and rows, the likeliest tokens behind one as bytes.

A row is `WIDTH` entries of 4 bytes, each a token in the lower 21 bits and its value (see `Readout`) above: so entries
sort by value, and one array holds both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

ORDERS = (1, 2, 3, 5, 8)
"""Lengths of the contexts."""
WIDTH = 6
"""Tokens kept of a row."""

BITS = 21
TOKEN = (1 << BITS) - 1
"""The token of an entry; all ones where there is none."""
MASKS = tuple((1 << BITS * order) - 1 for order in ORDERS)
ENTRY = np.dtype("<i4")
unpack_row = struct.Struct(f"<{WIDTH}i").unpack
"""Bytes of a row -> its entries."""
_ROW = np.dtype((np.void, WIDTH * ENTRY.itemsize))


def entries_of(tokens: npt.NDArray[np.int32], values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Rows `[M, WIDTH]` of tokens (-1 where there is none) and values `[M, K]`; K <= WIDTH."""
    entries = values.astype(ENTRY, order="C")
    entries <<= BITS
    entries |= tokens & TOKEN
    if entries.shape[1] < WIDTH:
        return np.pad(entries, ((0, 0), (0, WIDTH - entries.shape[1])), constant_values=TOKEN)
    return entries


def tokens_and_values(rows: Sequence[bytes]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Both `[M, WIDTH]`; the token is -1 where there is none."""
    entries = np.frombuffer(b"".join(rows), dtype=ENTRY).reshape(-1, WIDTH)
    tokens = entries & TOKEN
    tokens[tokens == TOKEN] = -1
    return tokens, (entries >> BITS).astype(np.uint8)


def row_bytes(entries: npt.NDArray[np.int32]) -> list[bytes]:
    """Rows `[M, WIDTH]` as the bytes of each."""
    return cast(list[bytes], entries.view(_ROW).ravel().tolist())


def context_of(tokens: Sequence[int]) -> int:
    """The end of a text as one number: its last eight tokens, 21 bits each, the last one lowest.

    A token counts from 1, so that 0 stands for what lies before the text.
    """
    context = 0
    for token in tokens[-ORDERS[-1] :]:
        context = extended(context, token)
    return context


def extended(context: int, token: int) -> int:
    """The context after one more token."""
    return (context << BITS | (token + 1) & TOKEN) & MASKS[-1]
