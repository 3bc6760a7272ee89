"""What feeding nodes teaches beside the tokens it brings: the rows of logits of nodes that are rejected, too.

Each row is kept for its context, and that is what later guesses are made of. The likeliest nodes are fed first, and
their contexts come up again soonest, so each further node teaches less than the one before.
"""

from __future__ import annotations

import math

NEWS = 0.22
"""Tokens. Where the rows of rejected nodes were not learned, some 15 a step, stories yielded 0.36 tokens a step less
(lab/log/tree-size.md, "Exploration value of rejected nodes"); this says 0.47 where they are of use."""
FIRST = 2.0
"""Nodes at which the worth of one more has fallen to a half."""


def taught(size: int) -> float:
    """Tokens that a step over so many nodes saves later, next to one over the root alone."""
    return NEWS * math.log1p((size - 1) / FIRST)


def taught_by_last(size: int) -> float:
    """What the last of so many nodes adds to that."""
    return NEWS / (FIRST + size - 1)


def most_worth(cost: float, use: float) -> int:
    """The largest size whose last node teaches as much as it costs, in tokens, if what it teaches is of so much use."""
    return int(min(use * NEWS / cost if cost > 0.0 else math.inf, 1e6) + 1.0 - FIRST)
