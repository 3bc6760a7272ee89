"""The few shapes that passes are padded to, so that a pass captured once serves all that are no larger.

    tokens   1   8   16   32   64   128   then multiples of 128
    rows     1   2   4   8   ...
    keys     256   384   512   768   1024   1536   2048   ...

A pass over a bucket costs what its largest member costs, and each bucket is one more graph to capture. For tokens that
is negligible as long as reading the weights takes the time. Keys are different: what is read of the cache grows
with their number, and a graph over the whole capacity would read 32k tokens where a text has one thousand. Two
buckets an octave read at most 1.5 times what is there, 1.2 times on average, and a text that doubles its length meets
two new ones.
"""

from __future__ import annotations

STEP_SIZES = (1, 8, 16, 32, 64, 128)
"""Sizes of passes up to 128 tokens."""
LARGEST_STEP = STEP_SIZES[-1]
LEAST_KEYS = 256


def step_bucket(tokens: int) -> int:
    """The size that a pass over `tokens` tokens a row is padded to."""
    return next((size for size in STEP_SIZES if size >= tokens), -(-tokens // LARGEST_STEP) * LARGEST_STEP)


def batch_bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


def key_bucket(tokens: int) -> int:
    """Cache slots that a pass reads where the last one it needs is number `tokens`, counted from 1."""
    octave = max(LEAST_KEYS, batch_bucket(tokens))
    between = octave // 4 * 3
    return between if between > LEAST_KEYS and tokens <= between else octave
