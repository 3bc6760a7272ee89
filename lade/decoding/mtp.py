"""Passes of a checkpoint's MTP layer, which predict the tokens after the nodes of the next tree.

A multi-token prediction layer takes the model's hidden state at a token and the token after it, and predicts the next
one (DeepSeek-V3, arXiv 2412.19437, section 2.2). Its output serves as the state of that token, so the layer can be
applied again, deeper in a tree:

    accept    keep the states of accepted tokens from the pass that verified them
    predict   first pass: feed them to the layer, with the tokens that follow, and predict after the ends of all texts
    look      further passes: feed the likeliest nodes of each tree, given the layer's outputs at their parents
    forget    drop the nodes from the layer's cache; only accepted text stays there

Predictions only draft: they are mixed with all other evidence (`lade/native/mixing.cpp`), and verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lade.clock import Clock, Moment
from lade.decoding.drafting.drafter import Drafter, PredictedTree, Unseen
from lade.decoding.drafting.mtp_tree import MtpWeights
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.row import RowStep
from lade.stats import Step

NODES = 8
"""Maximum number of nodes per row that a further pass feeds."""
FIXED_PASSES = 3
"""Passes per step if the tree size is fixed, so that times are not compared."""
MOST_PASSES = 5
_STEPS = 24  # time constant of the running means
_RATE_STEPS = 200  # the same for the rate: with 24, slow beginnings of texts made passes that did not pay
_RETRIAL = 64  # steps after which a pass that does not seem to pay is tried again
_KNOWN_S = 1e-7  # a pass takes more
_STATES = 16  # steps before such a trial from which the layer is given states; it needs some text to predict from
_FIRST_GAIN, _NEXT_GAIN = 1.0, 0.5  # initial values of `MtpHabits.gains`


class Predictions(NamedTuple):
    """Predictions of a layer after E nodes.

    Attributes:
        tokens: int32 `[E, MTP_WIDTH]`, top tokens, likeliest first; -1 if there are fewer.
        odds: float64 `[E, MTP_WIDTH]`, log-odds of the tokens.
    """

    tokens: Ints
    odds: Doubles

    def rows(self, first: int, count: int) -> Predictions:
        """Return the predictions of `count` nodes from index `first` on."""
        return Predictions(self.tokens[first : first + count], self.odds[first : first + count])


class RowText(Protocol):
    """A row of a layer, identified by object identity.

    Attributes:
        tokens: prompt and output so far.
    """

    tokens: list[int]


class MtpLayer(Protocol):
    """Runs an MTP layer for rows of different lengths, which join and leave."""

    @property
    def gathers(self) -> bool:
        """True if it computes the logits of some candidate tokens only, which the caller has to provide."""
        ...

    def prefer(self, gathers: bool) -> None:
        """Choose whether later passes compute the logits of candidates only, if the layer can do either."""
        ...

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """Return a context in which the prompts of these rows, or pieces of them, are fed; their states are kept."""
        ...

    def watching(self) -> AbstractContextManager[object]:
        """Return a context in which one pass feeds a tree per row; its states are kept until the next one."""
        ...

    def accept(self, rows: Sequence[RowText], paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep the states of the last pass at accepted nodes.

        Args:
            rows: B rows, in the order of the pass; their texts include the accepted tokens already.
            paths: for each row the accepted nodes of its tree, in order; empty for a row that has ended.
            fed: S, the size of the largest tree.
        """
        ...

    def knows(self, row: RowText) -> bool:
        """Return whether the states at the end of a row's text are known."""
        ...

    def predict(self, rows: Sequence[RowText], candidates: Sequence[Sequence[int]]) -> Predictions:
        """Feed accepted tokens, and predict the token after each of these rows, `[R]`.

        Args:
            rows: R rows with known states, for each of which a tree begins.
            candidates: for each row the tokens to consider, if the layer `gathers`.
        """
        ...

    def look(
        self, rows: Sequence[RowText], nodes: Sequence[Sequence[Unseen]], candidates: Sequence[Sequence[int]]
    ) -> Predictions:
        """Feed nodes of trees, and predict the tokens after them, `[E]`, row by row.

        Args:
            rows: R rows for which trees have begun.
            nodes: for each row nodes whose parents have been fed; may be empty.
            candidates: for each node the tokens to consider, if the layer `gathers`.
        """
        ...

    def forget(self) -> None:
        """Drop the nodes of all trees."""
        ...

    def give_up(self, problem: Exception) -> None:
        """Have later texts do without the layer, as a pass of it has failed."""
        ...

    def leave(self, row: RowText) -> None:
        """Remove a row, known or not."""
        ...

    def retain(self, rows: Sequence[RowText]) -> None:
        """Remove all rows but these: after an error rows may end without leaving."""
        ...


def _unmeasured() -> StepCost:
    return StepCost.unmeasured(1000.0)  # nearly the same whatever they feed, before it is seen


@dataclass
class MtpHabits:
    """Figures of one model's layer that are kept across generations.

    Attributes:
        weights: trust in its predictions.
        cost: seconds of its passes with the whole language model head.
        gathered: seconds of its passes with the logits of candidates only.
        gains: by index of a pass in its step, expected tokens that it adds to the tree, per expected token of the nodes
            that it feeds; for the first pass, which feeds the root, per row.
        refused: number of consecutive steps in which not even the first pass would have paid.
        tokens, seconds: fading sums over recent steps of all texts.
    """

    weights: MtpWeights = field(default_factory=MtpWeights)
    cost: StepCost = field(default_factory=_unmeasured)
    gathered: StepCost = field(default_factory=_unmeasured)
    gains: list[float] = field(default_factory=lambda: [_FIRST_GAIN] + [_NEXT_GAIN] * (MOST_PASSES - 1))
    refused: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def learn_gain(self, number: int, scores: float, more: float) -> None:
        """Learn that pass `number` (from 0), over nodes with these scores in total, added `more` expected tokens."""
        self.gains[number] += (max(0.0, more) / scores - self.gains[number]) / _STEPS


class _Growing(NamedTuple):
    """A row whose tree is growing."""

    row: DraftedRow
    tree: PredictedTree


class DraftedRow(RowText, Protocol):
    """A row with the drafter that uses its predictions."""

    drafter: Drafter


class BatchDrafter:
    """Drafts for all rows of a batch together, before their own drafters do. This one drafts nothing.

    Attributes:
        fixed: number of passes per step, which may be changed; None for as many as pay.
        spent_s: seconds that the passes of the last step took; 0.0 if it made none.
        weights: trust in its predictions; None if it makes none.
    """

    fixed: int | None = None
    spent_s: float = 0.0
    weights: MtpWeights | None = None

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """Return a context in which the prompts of these rows, or pieces of them, are fed."""
        return nullcontext()

    def watching(self) -> AbstractContextManager[object]:
        """Return a context in which one pass feeds a tree per row."""
        return nullcontext()

    def draft(self, rows: Sequence[DraftedRow], depths: Sequence[int | None]) -> None:
        """Pass predictions to the drafters of these rows, before these are asked for candidates.

        Args:
            rows: all rows of the batch.
            depths: maximum depth of each row's tree; None for no limit.
        """

    def accept(self, parts: Sequence[RowStep], fed: int) -> None:
        """Learn what the pass of a step accepted, whose largest tree had `fed` nodes."""

    def observe(self, steps: Sequence[Step], seconds: float) -> None:
        """Learn what a step yielded, which took `seconds` in total."""

    def leave(self, row: RowText) -> None:
        """Remove a row, known or not."""


class MtpPasses(BatchDrafter):
    """Makes the passes of a layer before each step of a batch, as many as pay.

    A pass pays if its expected tokens, that is the scores of the nodes that it feeds times the recent gain per unit of
    score, exceed the tokens that its seconds would yield at the recent rate of the batch. It is the rule by which
    `drafting.controller` chooses the size of a tree, applied to one more pass.

    Args:
        layer: MTP layer that makes the passes.
        habits: figures of earlier texts, updated by every step.
        clock: clock that times the passes.
        fixed: number of passes per step; None for as many as pay.
    """

    def __init__(self, layer: MtpLayer, habits: MtpHabits, clock: Clock, fixed: int | None = None) -> None:
        self._layer, self._habits, self._clock, self.fixed = layer, habits, clock, fixed
        self.weights = habits.weights
        self._failed = False  # a pass has; predictions may be missed, texts may not

    @property
    def rate(self) -> float:
        """Recent tokens per second of all rows together; 0.0 before the first step."""
        return self._habits.tokens / self._habits.seconds if self._habits.seconds else 0.0

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """See `BatchDrafter`."""
        return self._layer.reading(rows)

    @property
    def _cost(self) -> StepCost:
        """Seconds of passes with the part of the head that they compute now."""
        return self._habits.gathered if self._layer.gathers else self._habits.cost

    def _prefer_the_cheaper_head(self) -> None:
        """Prefer candidates' logits, unless passes with the whole head were observed to be cheaper."""
        whole, gathered = self._habits.cost.seconds(1), self._habits.gathered.seconds(1)
        self._layer.prefer(gathers=not _KNOWN_S < whole < gathered)

    @property
    def _resting(self) -> bool:
        """True where passes fail, or do not pay and the next trial is far: then not even states are kept."""
        return self._failed or (self.fixed is None and 0 < self._habits.refused < _RETRIAL - _STATES)

    def watching(self) -> AbstractContextManager[object]:
        """See `BatchDrafter`."""
        return nullcontext() if self._resting else self._layer.watching()

    def accept(self, parts: Sequence[RowStep], fed: int) -> None:
        """See `BatchDrafter`."""
        self._layer.accept([part.row for part in parts], [_accepted(part) for part in parts], fed)

    def leave(self, row: RowText) -> None:
        """See `BatchDrafter`."""
        self._layer.leave(row)

    def observe(self, steps: Sequence[Step], seconds: float) -> None:
        """See `BatchDrafter`."""
        habits, tokens = self._habits, sum(len(step.tokens) for step in steps)
        habits.tokens += tokens - habits.tokens / _RATE_STEPS
        habits.seconds += seconds - habits.seconds / _RATE_STEPS

    def draft(self, rows: Sequence[DraftedRow], depths: Sequence[int | None]) -> None:
        """See `BatchDrafter`."""
        self.spent_s = 0.0
        if self._resting:
            self._habits.refused += 1
            return
        try:
            self._draft(rows, depths)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the text goes on without predictions
            self._failed = True
            self._layer.give_up(problem)

    def _draft(self, rows: Sequence[DraftedRow], depths: Sequence[int | None]) -> None:
        self._layer.retain(rows)
        self._prefer_the_cheaper_head()
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
        """Return whether to make the first pass; one that does not seem to pay is tried again now and then."""
        habits = self._habits
        if self._pays(0, rows, 1) or habits.refused >= _RETRIAL:
            habits.refused = 0
            return True
        habits.refused += 1
        return False

    def _pays(self, number: int, scores: float, nodes: int) -> bool:
        """Return whether another pass is worth its seconds, by the rule of the class."""
        if self.fixed is not None:
            return True
        return self._habits.gains[number] * scores >= self.rate * self._cost.seconds(nodes)

    def _predict(self, growing: Sequence[_Growing]) -> float:
        """Make the first pass; return the expected tokens of the trees."""
        promised = sum(each.tree.grow() for each in growing)
        candidates = [each.tree.candidates(0) for each in growing] if self._layer.gathers else [()] * len(growing)
        cost, start = self._cost, self._clock.start()
        predictions = self._layer.predict([each.row for each in growing], candidates)
        self._time(cost, 1, start)
        for place, each in enumerate(growing):
            each.tree.hear((), *predictions.rows(place, 1))
        more = sum(each.tree.grow() for each in growing)
        self._habits.learn_gain(0, len(growing), more - promised)
        return more

    def _look(self, growing: Sequence[_Growing], nodes: Sequence[Sequence[Unseen]], count: int) -> float:
        """Make another pass, over at most `count` nodes per row; return the expected tokens of the trees."""
        pairs = [(each.tree, node) for each, own in zip(growing, nodes, strict=True) for node in own]
        candidates = [tree.candidates(node.node) if self._layer.gathers else () for tree, node in pairs]
        cost, start = self._cost, self._clock.start()
        predictions = self._layer.look([each.row for each in growing], nodes, candidates)
        self._time(cost, count, start)
        first = 0
        for each, own in zip(growing, nodes, strict=True):
            each.tree.hear(own, *predictions.rows(first, len(own)))
            first += len(own)
        return sum(each.tree.grow() for each in growing)

    def _time(self, cost: StepCost, nodes: int, start: Moment) -> None:
        """Observe what a pass over at most `nodes` nodes per row has taken since `start`."""
        seconds = self._clock.since(start).undisturbed_s
        cost.observe(nodes, seconds)
        cost.refresh()
        self.spent_s += seconds


def _accepted(part: RowStep) -> Sequence[int]:
    """Return the nodes at which tokens were emitted; empty for a row that has ended."""
    return () if part.row.done else part.verdict.path[: len(part.verdict.tokens)]
