"""The tree of one row while an MTP layer looks at it.

A prediction belongs to a path of tokens from the root, not to a node: after each pass of the layer the tree is grown
again, and other nodes may become likely. So a node asks for its prediction by its parent's and its own token.

Predictions are weighed with what is known without them by a last mixing of log-odds, whose weights every node teaches
that verification reaches:

    odds = (1 - t) * memory + t * (a * memory + b * layer + c * max(memory, 0) + d)

Weights a, b, c, d are those of the prediction's depth and of how many rows of logits the memory has found; t is the
share that the layer has earned. A layer may be worth nothing, so the share begins low; it is one number that all nodes
teach, so it is learned within some tens of steps, while the weights take hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lade.decoding.kernels.layout import MTP_DEPTHS, Doubles

# By the number of rows found: about what they become on stories that a layer predicts with an agreement of 0.7.
_OF_FOUND: tuple[tuple[float, ...], ...] = (
    (-0.15, 1.25, 0.0, 0.15),
    (0.0, 1.1, 0.1, 0.35),
    (0.2, 0.95, 0.25, 0.35),
    (0.3, 0.75, 0.25, 0.25),
    (0.25, 0.65, 0.1, 0.1),
    (0.25, 0.8, 0.05, 0.0),
)
_SHARE = -1.0  # log-odds: 27 %


@dataclass(frozen=True)
class MtpWeights:
    """How far the predictions of one model's layer are trusted; texts share them, on several threads, too.

    Attributes:
        lines: float64 `[MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS]`, see above.
        trust: float64 `[1]`, log-odds of the share that the last mixing has.
    """

    lines: Doubles = field(default_factory=lambda: np.array(_OF_FOUND * MTP_DEPTHS))
    trust: Doubles = field(default_factory=lambda: np.array([_SHARE]))
