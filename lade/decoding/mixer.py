"""How likely each guess is to be accepted: the rows that a memory has for a context, weighed and calibrated online.

Log-odds from contexts of several lengths are summed with weights, as context mixing compressors do (M. Mahoney, PAQ6,
2005): a guess that the last token and the last three tokens both suggest counts for more than either says alone. The
weights are learned from every node that verification reached, by gradient descent on the coding cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import itemgetter

from lade.decoding.contexts import BITS, ORDERS, TOKEN, unpack_row
from lade.decoding.readout import FLOOR, SCALE

Ranked = list[tuple[int, float]]
"""Tokens with their log-odds of being accepted, the likeliest first."""

PRIORS = (
    (0.5, -0.6),
    (0.35, 0.3, 0.2),
    (0.3, 0.2, 0.3, 0.55),
    (0.1, 0.1, 0.15, 0.75, 0.65),
    (0.1, 0.1, 0.1, 0.2, 0.6, 0.65),
)
"""By the number of rows: the weight of each, shortest context first, and a bias. About what they
become on stories and on code."""
RATE = 0.01
_NEGLIGIBLE = -4.6
"""Log-odds of about 1 %; of tokens below it only the chosen one is learned from."""
_log_odds = itemgetter(1)


def probability(log_odds: float) -> float:
    """The logistic function."""
    return 1.0 / (1.0 + exp(-log_odds))


class Mixer:
    """Weights of the contexts of each length, one set for each number of rows found."""

    def __init__(self) -> None:
        self.weights = [list(prior) for prior in PRIORS[: len(ORDERS)]]

    def rank(self, rows: Sequence[bytes]) -> Ranked:
        """All tokens that some row suggests; a row that lacks a token says `FLOOR`."""
        if not rows:
            return []
        *weights, bias = self.weights[len(rows) - 1]
        base = bias + FLOOR * sum(weights)
        mixed: dict[int, float] = {}
        get = mixed.get
        for row, weight in zip(rows, weights, strict=True):
            step = weight * SCALE
            for entry in unpack_row(row):
                token = entry & TOKEN
                mixed[token] = get(token, base) + step * (entry >> BITS)
        mixed.pop(TOKEN, None)
        return sorted(mixed.items(), key=_log_odds, reverse=True)

    def learn(self, rows: Sequence[bytes], ranked: Ranked, chosen: int) -> None:
        """Learn from a context for which `rank` was asked and which the model then continued with `chosen`."""
        if not rows:
            return
        weights = self.weights[len(rows) - 1]
        values = [{entry & TOKEN: FLOOR + SCALE * (entry >> BITS) for entry in unpack_row(row)} for row in rows]
        for token, log_odds in ranked:
            if token != chosen and log_odds < _NEGLIGIBLE:
                continue
            step = RATE * ((token == chosen) - probability(log_odds))
            for i, row in enumerate(values):
                weights[i] += step * row.get(token, FLOOR)
            weights[-1] += step
