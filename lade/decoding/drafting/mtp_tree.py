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

from lade.decoding.drafting.drafter import Unseen
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.kernels.layout import MTP_DEPTHS, Doubles, Ints
from lade.decoding.kernels.native_tree import NativeTree

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
    """Grows a row's tree between passes of an MTP layer, and adds its predictions to it; see `PredictedTree`.

    Args:
        tree: the row's tree, which is grown anew after each pass.
        memory: what it grows from.
        weights: how far predictions are trusted; they learn from every step.
        begin: begins a step, given the text and the greatest depth; returns whether guesses are looked for in it.
        grow: grows the tree of the step that has begun; returns the scores of its nodes.
    """

    def __init__(
        self,
        tree: NativeTree,
        memory: ContextMemory,
        weights: MtpWeights,
        begin: Callable[[Sequence[int], int | None], bool],
        grow: Callable[[], Sequence[float]],
    ) -> None:
        self._tree, self._memory, self._begin, self._grow = tree, memory, begin, grow
        tree.use_mtp(weights.lines, weights.trust)
        self._count = 1  # nodes of the tree grown last

    def begin(self, context: Sequence[int], max_depth: int | None) -> bool:
        """See `PredictedTree`."""
        return self._begin(context, max_depth)

    def grow(self) -> float:
        """See `PredictedTree`."""
        scores = self._grow()
        self._count = len(scores)
        return sum(scores)

    def unseen(self, most: int) -> list[Unseen]:
        """See `PredictedTree`."""
        return [Unseen(*node) for node in self._tree.unpredicted(self._count, most)]

    def candidates(self, node: int) -> list[int]:
        """See `PredictedTree`."""
        return self._tree.candidates(self._memory.bound, node)

    def hear(self, nodes: Sequence[Unseen], tokens: Ints, odds: Doubles) -> None:
        """See `PredictedTree`."""
        places = [(node.parent, node.token, node.depth + 1) for node in nodes] or [(-1, -1, 1)]
        self._tree.add_predictions(places, tokens, odds)
