"""How the last mixing weighs the memory and an MTP layer, before texts have taught it.

    odds = (1 - t) * memory + t * (a * memory + b * layer + c * max(memory, 0) + d)

Weights a, b, c, d are those of the prediction's depth and of how many rows of logits the memory has found; t is the
share that the layer has earned. A layer may be worth nothing, so the share begins low; it is one number that all nodes
teach, so it is learned within some tens of steps, while the weights take hundreds.
"""

from __future__ import annotations

from lade.decoding.kernels.layout import MTP_DEPTHS, ORDERS

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


def prior_weights() -> list[tuple[float, ...]]:
    """`[MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS]`: a, b, c, d by depth, then by the number of rows found."""
    assert len(_OF_FOUND) == len(ORDERS) + 1
    return list(_OF_FOUND) * MTP_DEPTHS


def prior_trust() -> list[float]:
    """`[1]`, log-odds of t."""
    return [_SHARE]
