"""How likely each guess is to be accepted: the hits of a memory for a context, weighed and calibrated online.

Log-odds from contexts of several lengths are summed with weights, as context mixing compressors do (M. Mahoney, PAQ6,
2005): a guess that the last token and the last three tokens both suggest counts for more than either alone. The
weights are learned from every node that verification reached, by gradient descent on the coding cost.
"""

from __future__ import annotations

import numpy as np

from lade.decoding.kernels.layout import END, LINES, TEXT, Doubles

_OF_LOGITS = (
    (-2.5,),
    (0.5, -0.6),
    (0.35, 0.3, 0.2),
    (0.3, 0.2, 0.3, 0.55),
    (0.1, 0.1, 0.15, 0.75, 0.65),
    (0.1, 0.1, 0.1, 0.2, 0.6, 0.65),
)
"""By the number of hits with logits: the weight of each, shortest context first, and a bias. About what they
become on stories and on code."""
_OF_TEXT = ((0.0,), (0.05, 0.2), (0.05, 0.05, 0.4))
RATE = 0.01


def prior_weights() -> Doubles:
    """`[LINES, END + 1]`, a weight set for each number of hits: their weights and, in the last column, the bias."""
    weights = np.zeros((LINES, END + 1))
    lines = [(of_logits, of_text) for of_logits in _OF_LOGITS for of_text in _OF_TEXT]
    for line, ((*of_logits, bias), (*of_text, more_bias)) in enumerate(lines):
        weights[line, : len(of_logits)], weights[line, TEXT : TEXT + len(of_text)] = of_logits, of_text
        weights[line, END] = bias + more_bias
    return weights
