"""Passes of a checkpoint's MTP layer, which predict what follows the nodes of the next tree.

A multi-token prediction layer takes the model's hidden state at a token and the token that follows it, and predicts the
token after that (DeepSeek-V3, arXiv 2412.19437, section 2.2). Its output stands for the state of the next token, so
it can be used again, deeper in a tree:

    accept    the states of accepted tokens are kept, from the pass that verified them
    predict   they are fed to the layer, with the tokens that follow: the first pass, for the ends of all texts
    look      the likeliest nodes of each tree are fed, given the layer's outputs at their parents: another pass
    forget    the nodes leave the layer's cache; only accepted text stays there

Predictions only draft: they are weighed with all else that is known (`kernels.mixing`), and verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lade.clock import Clock
from lade.decoding.drafting.drafter import Drafter, PredictedTree, Unseen
from lade.decoding.drafting.mtp_tree import MtpWeights
from lade.decoding.kernels.layout import Doubles, Ints

NODES = 8
"""Nodes of each row that a pass looks at."""
FIXED_PASSES = 3
"""Passes in each step where the size of its tree is fixed, and nobody weighs times."""
MOST_PASSES = 5
_STEPS = 24  # that averages are over
_RETRIAL = 64  # steps without a pass that would not pay, until one is made to see whether that still holds
_FIRST_GAIN, _NEXT_GAIN = 1.0, 0.5  # tokens a pass is supposed to bring at first: see `MtpHabits.gains`


class Predictions(NamedTuple):
    """Predictions of a layer behind E nodes.

    Attributes:
        tokens: int32 `[E, MTP_WIDTH]`, the likeliest tokens, the likeliest first; -1 where there are fewer.
        odds: float64 `[E, MTP_WIDTH]`, their log-odds.
    """

    tokens: Ints
    odds: Doubles

    def rows(self, first: int, count: int) -> Predictions:
        """Those of `count` nodes from number `first` on."""
        return Predictions(self.tokens[first : first + count], self.odds[first : first + count])


class RowText(Protocol):
    """A row as a layer knows it, by identity.

    Attributes:
        tokens: prompt and output so far.
    """

    tokens: list[int]


class MtpLayer(Protocol):
    """Runs an MTP layer for rows that come and go, each with a length of its own."""

    @property
    def gathers(self) -> bool:
        """True where it computes the logits of some tokens only, and wants to be told which ones may follow."""
        ...

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """A block in which the prompts of these rows are fed, or pieces of them; their states are kept."""
        ...

    def watching(self) -> AbstractContextManager[object]:
        """A block in which one pass feeds a tree for every row; its states are kept until the next one."""
        ...

    def accept(self, rows: Sequence[RowText], paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep the states of the last pass at accepted nodes.

        Args:
            rows: B, in the order of the pass; their texts have the accepted tokens already.
            paths: for each row the nodes of its tree, in order; none for one that has ended.
            fed: S, the size of the largest tree.
        """
        ...

    def knows(self, row: RowText) -> bool:
        """Return True where the states of the end of a row's text are known."""
        ...

    def predict(self, rows: Sequence[RowText], candidates: Sequence[Sequence[int]]) -> Predictions:
        """Feed accepted tokens, and predict what follows the last token of each of these rows, `[R]`.

        Args:
            rows: R rows that it knows; for each a tree begins.
            candidates: for each row tokens that may follow by what else is known, if it `gathers`.
        """
        ...

    def look(
        self, rows: Sequence[RowText], nodes: Sequence[Sequence[Unseen]], candidates: Sequence[Sequence[int]]
    ) -> Predictions:
        """Feed nodes of trees, and predict what follows them: `[E]`, those of the first row first.

        Args:
            rows: R rows for which trees have begun.
            nodes: for each row nodes whose parents have been looked at; there may be none.
            candidates: for each node, see `predict`.
        """
        ...

    def forget(self) -> None:
        """Drop the nodes of all trees."""
        ...

    def leave(self, row: RowText) -> None:
        """Forget a row, known or not."""
        ...

    def retain(self, rows: Sequence[RowText]) -> None:
        """Forget all rows but these: after an error rows may end without leaving."""
        ...


@dataclass
class DraftPassCost:
    """Seconds of a pass of an MTP layer by how many nodes it is fed: a running mean for each power of two."""

    seconds: dict[int, float] = field(default_factory=dict)

    def observe(self, nodes: int, seconds: float) -> None:
        """Learn from a pass. The first one of a size is left out: it may have compiled or allocated something."""
        size = max(1, nodes).bit_length()
        known = self.seconds.get(size)
        self.seconds[size] = seconds if not known else known + (min(seconds, 4.0 * known) - known) / _STEPS
        if known is None:
            self.seconds[size] = 0.0

    def of(self, nodes: int) -> float:
        """Seconds of a pass; by the nearest size where none of this one was made, 0.0 where none was made at all."""
        size = max(1, nodes).bit_length()
        known = {each: seconds for each, seconds in self.seconds.items() if seconds}
        return known[min(known, key=lambda each: abs(each - size))] if known else 0.0


@dataclass
class MtpHabits:
    """Figures learned of one model's layer, which outlast a text.

    Attributes:
        weights: how far its predictions are trusted.
        cost: seconds of its passes.
        gains: by the number of a pass in its step, tokens that the tree promises more after it, for each token that the
            nodes looked at promised: of the first pass, which looks at the root, for each row.
        refused: steps in a row in which not even the first pass would have paid.
    """

    weights: MtpWeights = field(default_factory=MtpWeights)
    cost: DraftPassCost = field(default_factory=DraftPassCost)
    gains: list[float] = field(default_factory=lambda: [_FIRST_GAIN] + [_NEXT_GAIN] * (MOST_PASSES - 1))
    refused: int = 0

    def learn_gain(self, number: int, scores: float, more: float) -> None:
        """Pass `number`, from 0 on, looked at nodes with these scores in all, and promises grew by so many tokens."""
        self.gains[number] += (max(0.0, more) / scores - self.gains[number]) / _STEPS


class _Growing(NamedTuple):
    """A row whose tree is growing."""

    row: DraftedRow
    tree: PredictedTree


class DraftedRow(RowText, Protocol):
    """A row with the drafter that takes its predictions."""

    drafter: Drafter


class MtpPasses:
    """Makes the passes of a layer before each step of a batch, as many as pay.

    A pass is made where what it is expected to bring, the scores of the nodes that it looks at times the gain per unit
    of score that such passes had of late, is more than what its seconds would bring elsewhere, at the tokens per second
    of late. It is the rule by which `drafting.controller` chooses the size of a tree, applied to one more pass.

    Args:
        layer: makes the passes.
        habits: what earlier texts have taught; they learn from every step.
        clock: times the passes.
        fixed: passes in each step, whatever they cost; None for as many as pay.

    Attributes:
        fixed: as given; it may be changed.
    """

    def __init__(self, layer: MtpLayer, habits: MtpHabits, clock: Clock, fixed: int | None = None) -> None:
        self._layer, self._habits, self._clock, self.fixed = layer, habits, clock, fixed
        self._tokens = self._seconds = 0.0

    @property
    def weights(self) -> MtpWeights:
        """How far predictions are trusted."""
        return self._habits.weights

    @property
    def rate(self) -> float:
        """Tokens per second of late, of all rows together; 0.0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """See `MtpLayer`."""
        return self._layer.reading(rows)

    def watching(self) -> AbstractContextManager[object]:
        """See `MtpLayer`."""
        return self._layer.watching()

    def accept(self, rows: Sequence[RowText], paths: Sequence[Sequence[int]], fed: int) -> None:
        """See `MtpLayer`."""
        self._layer.accept(rows, paths, fed)

    def leave(self, row: RowText) -> None:
        """See `MtpLayer`."""
        self._layer.leave(row)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn how fast the batch is: a step took so long, all in all, and yielded so many tokens."""
        self._tokens += tokens - self._tokens / _STEPS
        self._seconds += seconds - self._seconds / _STEPS

    def draft(self, rows: Sequence[DraftedRow], depths: Sequence[int | None]) -> None:
        """Have the drafters of these rows hear what the layer predicts, before they are asked for candidates.

        Args:
            rows: all rows of the batch.
            depths: for each, how deep its tree may be.
        """
        self._layer.retain(rows)
        growing = []
        for row, depth in zip(rows, depths, strict=True):
            tree = row.drafter.mtp
            if tree is not None and self._layer.knows(row) and tree.begin(row.tokens, depth):
                growing.append(_Growing(row, tree))
        if not growing or not self._first_pays(len(growing)):
            return
        try:
            promised = self._predict(growing)
            for number in range(1, MOST_PASSES if self.fixed is None else self.fixed):
                nodes = [each.tree.unseen(NODES) for each in growing]
                scores = sum(node.score for own in nodes for node in own)
                count = max(map(len, nodes))
                if not count or not self._pays(number, scores, count):
                    break
                before, promised = promised, self._look(growing, nodes, count)
                self._habits.learn_gain(number, scores, promised - before)
        finally:
            self._layer.forget()

    def _first_pays(self, rows: int) -> bool:
        """Return True to make the first pass; where it would not pay, it is made now and then all the same."""
        habits = self._habits
        if self._pays(0, rows, 1) or habits.refused >= _RETRIAL:
            habits.refused = 0
            return True
        habits.refused += 1
        return False

    def _pays(self, number: int, scores: float, nodes: int) -> bool:
        """Return True where another pass is worth its seconds, see the class."""
        if self.fixed is not None:
            return True
        return self._habits.gains[number] * scores >= self.rate * self._habits.cost.of(nodes)

    def _predict(self, growing: Sequence[_Growing]) -> float:
        """The first pass; returns the tokens that the trees promise."""
        promised = sum(each.tree.grow() for each in growing)
        candidates = [each.tree.candidates(0) for each in growing] if self._layer.gathers else [()] * len(growing)
        start = self._clock.start()
        predictions = self._layer.predict([each.row for each in growing], candidates)
        self._habits.cost.observe(1, self._clock.since(start).undisturbed_s)
        for place, each in enumerate(growing):
            each.tree.hear((), *predictions.rows(place, 1))
        more = sum(each.tree.grow() for each in growing)
        self._habits.learn_gain(0, len(growing), more - promised)
        return more

    def _look(self, growing: Sequence[_Growing], nodes: Sequence[Sequence[Unseen]], count: int) -> float:
        """Another pass, over `count` nodes of a row at most; returns the tokens that the trees promise then."""
        pairs = [(each.tree, node) for each, own in zip(growing, nodes, strict=True) for node in own]
        candidates = [tree.candidates(node.node) if self._layer.gathers else () for tree, node in pairs]
        start = self._clock.start()
        predictions = self._layer.look([each.row for each in growing], nodes, candidates)
        self._habits.cost.observe(count, self._clock.since(start).undisturbed_s)
        first = 0
        for each, own in zip(growing, nodes, strict=True):
            each.tree.hear(own, *predictions.rows(first, len(own)))
            first += len(own)
        return sum(each.tree.grow() for each in growing)
