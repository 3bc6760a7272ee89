"""Memory layout shared by the kernels: entries, contexts, kinds of rows, and their sizes.

A context, or *tail*, is int32 `[LONGEST]`: the last tokens of a text, latest first, -1 before its start. An entry is
int32: a token in the lower `BITS` bits, its quantised log-odds above, so entries sort by log-odds. A table is int32
`[C, 2 + WIDTH]` with open addressing and linear probing: both halves of a context's hash, then its row of entries. The
low half of an occupied slot is never 0, since its lowest bits hold the index of the context's order, counted from 1.

The build writes the constants into a header for lade/native: they stand here alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ORDERS = (1, 2, 3, 5, 8)
"""Lengths of the contexts that rows of logits are stored under."""
TEXT_ORDERS = (2, 4)
"""Lengths of the contexts that the following tokens of the text are stored under."""
LENGTHS = ORDERS + TEXT_ORDERS
LOGITS, TEXT, END = 0, len(ORDERS), len(LENGTHS)
"""Index of the first kind of rows of logits, of the first one of text, and the number of kinds."""
WEIGHT_SETS = (len(ORDERS) + 1) * (len(TEXT_ORDERS) + 1)
"""Number of weight sets of the mixer: one for each pair of numbers of hits."""
NOTE_KINDS = 2
"""Kinds of notes: logits seen at a position, and at a position and token."""
COPY_KINDS = 2
"""Kinds of copy rows: the token after the latest longest match, and those after all matches."""
LONGEST = max(LENGTHS)
WIDTH = 6
"""Entries per row."""
BITS = 21
TOKEN = (1 << BITS) - 1
"""Mask of an entry's token; all ones for an empty entry."""
FLOOR, CEILING = -7.0, 5.0
"""Range of log-odds, beyond which they are clamped: probabilities of 0.1 % and 99 %."""
SCALE = (CEILING - FLOOR) / 255
"""Quantisation step of log-odds: 0 stands for `FLOOR` and below, 255 for `CEILING` and above."""
TINY = 1e-9
"""Smallest probability mass, to keep log-odds finite."""
BLOCK = 64
"""Logits per block of the top-k search; a block is scanned only if its maximum is among the best."""
MTP_WIDTH = 16
"""Tokens kept per prediction of an MTP layer."""
MTP_DEPTHS = 5
"""Depths with weights of their own: 1, which is predicted from a true state of the model, 2, 3, 4, and deeper."""
MTP_INPUTS = 4
"""Inputs of the final mixing: log-odds of the memory and of the layer, the memory's positive part, and a bias."""
MOST_CANDIDATES = (END + NOTE_KINDS + COPY_KINDS) * WIDTH + MTP_WIDTH
"""Maximum number of distinct tokens that rows, notes, copies and a prediction suggest after a node."""
