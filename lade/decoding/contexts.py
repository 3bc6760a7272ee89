"""Contexts, the ends of a text as numbers, and rows, the likeliest tokens behind one as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

ORDERS = (1, 2, 3, 5)
"""Lengths of the contexts."""
WIDTH = 6
"""Tokens kept of a row."""

_BITS = 21
_TOKEN = (1 << _BITS) - 1
MASKS = tuple((1 << _BITS * order) - 1 for order in ORDERS)
ROW = np.dtype([("tokens", "<i4", (WIDTH,)), ("values", "u1", (WIDTH,))])
unpack_row = struct.Struct(f"<{WIDTH}i{WIDTH}B").unpack
"""Bytes of a row -> its tokens (-1 where there is none), then their values, see `Readout`."""


def context_of(tokens: Sequence[int]) -> int:
    """The end of a text as one number: its last five tokens, 21 bits each, the last one lowest.

    A token counts from 1, so that 0 stands for what lies before the text.
    """
    context = 0
    for token in tokens[-ORDERS[-1] :]:
        context = extended(context, token)
    return context


def extended(context: int, token: int) -> int:
    """The context after one more token."""
    return (context << _BITS | (token + 1) & _TOKEN) & MASKS[-1]
