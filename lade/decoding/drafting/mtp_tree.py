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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lade.decoding.drafting.best_first import TreeGrower
from lade.decoding.drafting.drafter import Unseen
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.kernels import growth
from lade.decoding.kernels.layout import MTP_DEPTHS, MTP_SLOTS, PREDICTED, Doubles, Ints

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


class MtpTree:
    """Grows a row's tree between passes of an MTP layer, and hands its predictions to the grower; see `PredictedTree`.

    Args:
        grower: grows the row's trees.
        memory: what they grow from.
        weights: how far predictions are trusted; they learn from every step.
        begin: begins a step, given the text and the greatest depth; returns whether guesses are looked for in it.
        grow: grows the tree of the step that has begun; returns the scores of its nodes.
    """

    def __init__(
        self,
        grower: TreeGrower,
        memory: ContextMemory,
        weights: MtpWeights,
        begin: Callable[[Sequence[int], int | None], bool],
        grow: Callable[[], Sequence[float]],
    ) -> None:
        self._grower, self._memory, self._begin, self._grow = grower, memory, begin, grow
        grower.use_mtp(weights.lines, weights.trust)
        self._scores: Sequence[float] = (1.0,)

    def begin(self, context: Sequence[int], max_depth: int | None) -> bool:
        """See `PredictedTree`."""
        return self._begin(context, max_depth)

    def grow(self) -> float:
        """See `PredictedTree`."""
        self._scores = self._grow()
        return sum(self._scores)

    def unseen(self, most: int) -> list[Unseen]:
        """See `PredictedTree`."""
        work, count = self._grower.work, len(self._scores)
        most = min(most, MTP_SLOTS - int(work.used[PREDICTED]))
        predicted, parents = work.predicted[:count], work.parents[:count]
        nodes = np.flatnonzero((predicted < 0) & (predicted[parents] >= 0) & (parents >= 0))
        best = sorted(nodes.tolist(), key=lambda node: -self._scores[node])[: max(0, most)]
        return [
            Unseen(node, int(predicted[parents[node]]), int(work.ids[node]), int(work.depths[node]), self._scores[node])
            for node in best
        ]

    def candidates(self, node: int) -> list[int]:
        """See `PredictedTree`."""
        offers = growth.candidates(self._grower.held, self._memory.bound, node)
        found: list[int] = self._grower.work.tokens[node, :offers].tolist()
        return found

    def hear(self, nodes: Sequence[Unseen], tokens: Ints, odds: Doubles) -> None:
        """See `PredictedTree`."""
        work = self._grower.work
        first = int(work.used[PREDICTED])
        span = slice(first, first + len(tokens))
        work.mtp_tokens[span], work.mtp_odds[span] = tokens, odds
        if nodes:
            work.mtp_parents[span] = [node.parent for node in nodes]
            work.mtp_ids[span] = [node.token for node in nodes]
            work.mtp_depths[span] = [node.depth + 1 for node in nodes]
        else:
            work.mtp_parents[span], work.mtp_ids[span], work.mtp_depths[span] = -1, -1, 1
        work.used[PREDICTED] = first + len(tokens)
