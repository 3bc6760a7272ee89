"""How what is compiled lays out what it knows: entries, contexts, kinds of rows, and their numbers.

Tokens of a context, its *tail*, are int32 `[LONGEST]`, the last one first, -1 before the text. Entries of a row are
int32: a token in the lower `BITS` bits, its value above; so entries sort by value. Tables are int32 `[C, 2 + WIDTH]`,
open addressing with linear probing: the two halves of a context's hash, then its row. The lower half is never 0 where a
slot is taken: its lowest bits tell the number of the order, from 1 on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
NODES, HEAP, ROOT, READ, PROMPT, COPY, PREDICTED = range(7)
"""What `Work.used` counts: nodes, entries of the heap, the place of the root, tokens of the text that have been read,
those of them that are the prompt's, the place of the last root behind a copy, and predictions of MTP layers."""
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
MTP_WIDTH = 16
"""Tokens kept of a prediction of an MTP layer."""
MTP_DEPTHS = 5
"""Depths whose predictions have weights of their own: 1, made from a true state of the model, 2, 3, 4, and deeper."""
MTP_INPUTS = 4
"""Inputs of the last mixing: log-odds of the memory, of the layer, the memory's above even odds, and a bias."""
MTP_SLOTS = 256
"""Predictions kept in a step."""
AFTER_COPY = 64
"""Tokens after a copied place during which more copies are likely."""
END_KINDS = 7
"""Kinds of lengths of ends: 1, 2, 3, 4 and 5, 6 and 7, 8 to 15, and more tokens."""
