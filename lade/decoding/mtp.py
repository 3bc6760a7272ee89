"""Passes of a checkpoint's MTP layer, which predict the tokens after the nodes of the next tree.

A multi-token prediction layer takes the model's hidden state at a token and the token after it, and predicts the next
one (DeepSeek-V3, arXiv 2412.19437, section 2.2). Its output serves as the state of that token, so the layer can be
applied again, deeper in a tree:

    accept    keep the states of accepted tokens from the pass that verified them
    predict   first pass: feed them to the layer, with the tokens that follow, and predict after the ends of all texts
    look      further passes: feed the likeliest nodes of each tree, given the layer's outputs at their parents

Predictions only draft: they are mixed with all other evidence (`lade/native/mixing.cpp`), and verified like any draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from lade.clock import Clock
from lade.decoding.drafting.drafter import Drafter, PredictedTree
from lade.decoding.drafting.memory import MtpWeights
from lade.decoding.drafting.step_cost import StepCost
from lade.decoding.kernels.layout import MTP_DEPTHS, Doubles, Ints
from lade.decoding.kernels.native_tree import Frontier
from lade.decoding.row import RowStep
from lade.stats import Step

FIXED_PASSES = 3
"""Passes per step if the tree size is fixed, so that times are not compared."""
MOST_PASSES = MTP_DEPTHS
_STEPS = 24  # time constant of the running means
_RATE_STEPS = 200  # the same for the rate: with 24, slow beginnings of texts made passes that did not pay
_RETRIAL = 64  # steps after which a pass that does not seem to pay is tried again
_KNOWN_S = 1e-7  # a pass takes more
_STATES = 16  # steps before such a trial from which the layer is given states; it needs some text to predict from
_RECENT = 512  # tokens at the end of a text that may come again, where candidates alone are considered
_FIRST_GAIN, _NEXT_GAIN = 1.0, 0.5  # initial values of `MtpHabits.gains`


class Predictions(NamedTuple):
    """Predictions of a layer after E nodes: top tokens, int32 `[E, MTP_WIDTH]`, likeliest first, -1 if there are fewer.

    Their log-odds are float64 `[E, MTP_WIDTH]`.
    """

    tokens: Ints
    odds: Doubles


class RowText(Protocol):
    """A row of a layer, identified by object identity, with its prompt and output so far."""

    tokens: list[int]


class MtpLayer(Protocol):
    """Runs an MTP layer for rows of different lengths, which join and leave."""

    @property
    def may_gather(self) -> bool:
        """True if it can compute the logits of some candidate tokens only, which the caller has to provide."""

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """Return a context in which the prompts of these rows, or pieces of them, are fed; their states are kept."""

    def watching(self) -> AbstractContextManager[object]:
        """Return a context in which one pass feeds a tree per row; its states are kept until the next one."""

    def accept(self, rows: Sequence[RowText], paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep the states of the last pass at accepted nodes.

        Args:
            rows: B rows, in the order of the pass; their texts include the accepted tokens already.
            paths: for each row the accepted nodes of its tree, in order; empty for a row that has ended.
            fed: S, the size of the largest tree.
        """

    def knows(self, row: RowText) -> bool:
        """Return whether the states at the end of a row's text are known."""

    def predict(self, rows: Sequence[RowText], candidates: Collection[int] | None) -> Predictions:
        """Feed accepted tokens, begin trees after them, and predict the token after each of these rows, `[R]`.

        Their states are known. The nodes of all former trees are dropped. None considers all tokens as candidates.
        """

    def look(
        self, rows: Sequence[RowText], frontiers: Sequence[Frontier], candidates: Collection[int] | None
    ) -> Predictions:
        """Feed nodes of trees that have begun, and predict the tokens after them, `[E]`, row by row.

        The parents of each row's frontier, which may be empty, have been fed. For `candidates` see `predict`.
        """

    def give_up(self, problem: Exception) -> None:
        """Have later texts do without the layer, as a pass of it has failed."""

    def leave(self, row: RowText) -> None:
        """Remove a row, known or not."""

    def retain(self, rows: Sequence[RowText]) -> None:
        """Remove all rows but these: after an error rows may end without leaving."""


_unmeasured = partial(StepCost.unmeasured, 1000.0)  # until observed, nearly the same for any size


@dataclass
class MtpHabits:
    """Figures of one model's layer that are kept across generations.

    Attributes:
        weights: trust in its predictions.
        cost, gathered: seconds of its passes with the whole language model head, and with logits of candidates only.
        gains: by index of a pass in its step, expected tokens that it adds to the tree, per expected token of the nodes
            that it feeds; for the first pass, which feeds the root, per row.
        passes: number of passes made.
        refused: number of consecutive steps in which not even the first pass would have paid.
        tokens, seconds: fading sums over recent steps of all texts.
    """

    weights: MtpWeights = field(default_factory=MtpWeights)
    cost: StepCost = field(default_factory=_unmeasured)
    gathered: StepCost = field(default_factory=_unmeasured)
    gains: list[float] = field(default_factory=lambda: [_FIRST_GAIN] + [_NEXT_GAIN] * (MOST_PASSES - 1))
    passes: int = 0
    refused: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def learn_gain(self, number: int, scores: float, more: float) -> None:
        """Learn that pass `number` (from 0), over nodes with these scores in total, added `more` expected tokens."""
        self.gains[number] += (max(0.0, more) / scores - self.gains[number]) / _STEPS


class DraftedRow(RowText, Protocol):
    """A row with the drafter that learns its prompt, and uses predictions of an MTP layer."""

    drafter: Drafter


class BatchDrafter:
    """Drafts for all rows of a batch together, before their own drafters do. This base class drafts nothing.

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
        """Pass predictions to the drafters of all rows, before these are asked for candidates; see `Drafter.draft`."""

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
        fixed: see `BatchDrafter`.
    """

    def __init__(self, layer: MtpLayer, habits: MtpHabits, clock: Clock, fixed: int | None = None) -> None:
        self._layer, self._habits, self._clock, self.fixed = layer, habits, clock, fixed
        self.weights = habits.weights
        self._failed = False  # whether a pass has; texts go on without predictions
        self._paused = False  # whether no row drafts in this step
        self._cost, self._gathers = habits.cost, False  # of the passes of this step

    @property
    def rate(self) -> float:
        """Recent tokens per second of all rows together; 0.0 before the first step."""
        return self._habits.tokens / self._habits.seconds if self._habits.seconds else 0.0

    def reading(self, rows: Sequence[RowText]) -> AbstractContextManager[object]:
        """See `BatchDrafter`."""
        return self._layer.reading(rows)

    @property
    def _resting(self) -> bool:
        """True if passes fail, drafting is paused, or they do not pay and the next trial is far: no states are kept."""
        return self._failed or (self.fixed is None and (self._paused or 0 < self._habits.refused < _RETRIAL - _STATES))

    def watching(self) -> AbstractContextManager[object]:
        """See `BatchDrafter`."""
        return nullcontext() if self._resting else self._layer.watching()

    def accept(self, parts: Sequence[RowStep], fed: int) -> None:
        """See `BatchDrafter`."""
        paths = [() if part.row.done else part.verdict.path[: len(part.verdict.tokens)] for part in parts]
        self._layer.accept([part.row for part in parts], paths, fed)

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
        self.spent_s, self._paused = 0.0, all(row.drafter.rests for row in rows)
        if self._resting:
            self._habits.refused += not self._paused
            return
        try:
            self._draft(rows, depths)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the text goes on without predictions
            self._failed = True
            self._layer.give_up(problem)

    def _draft(self, rows: Sequence[DraftedRow], depths: Sequence[int | None]) -> None:
        self._choose_head()
        self._layer.retain(rows)
        drafting, trees, frontiers = list[DraftedRow](), list[PredictedTree](), list[Frontier]()
        for row, depth in zip(rows, depths, strict=True):
            tree = row.drafter.mtp
            if tree is not None and self._layer.knows(row) and (frontier := tree.begin_step(row.tokens, depth)):
                drafting.append(row)
                trees.append(tree)
                frontiers.append(frontier)
        for number in range(MOST_PASSES if self.fixed is None else self.fixed):
            most, scores = 0, 0.0
            for each in frontiers:
                most, scores = max(most, len(each.nodes)), scores + sum(each.scores)
            if not most or not self._pays(number, scores, most):
                break
            tokens, odds = self._predictions(number, most, drafting, trees, frontiers)
            more, end = 0.0, 0
            for place, each in enumerate(frontiers):
                if each.nodes:
                    first, end = end, end + len(each.nodes)
                    grown = trees[place].add_predictions(each, tokens[first:end], odds[first:end])
                    frontiers[place], more = grown, more + grown.expected - each.expected
            self._habits.learn_gain(number, scores, more)

    def _choose_head(self) -> None:
        """Have the passes of this step compute candidates' logits, unless those with the whole head were cheaper."""
        whole, gathered = self._habits.cost, self._habits.gathered
        self._gathers = self._layer.may_gather and not _KNOWN_S < whole.seconds(1) < gathered.seconds(1)
        self._cost = gathered if self._gathers else whole

    def _pays(self, number: int, scores: float, nodes: int) -> bool:
        """Return whether another pass is worth its seconds, by the rule of the class; the first is tried now and then.

        It would feed nodes with these scores in total, at most `nodes` of one row.
        """
        if self.fixed is not None:
            return True
        habits, worth = self._habits, self._habits.gains[number] * scores
        pays = worth >= self.rate * self._cost.seconds(nodes)
        if number > 0:
            return pays
        if not pays:  # it would not be tried for many steps: ask again with current costs
            self._cost.refresh()
            pays = worth >= self.rate * self._cost.seconds(nodes) or habits.refused >= _RETRIAL
        habits.refused = 0 if pays else habits.refused + 1
        return pays

    def _predictions(
        self,
        number: int,
        most: int,
        rows: Sequence[DraftedRow],
        trees: Sequence[PredictedTree],
        frontiers: Sequence[Frontier],
    ) -> Predictions:
        """Make a pass over at most `most` nodes of each row; return what it predicts, row by row."""
        candidates: set[int] | None = None
        if self._gathers:
            candidates = set()
            for row, tree, each in zip(rows, trees, frontiers, strict=True):
                if each.nodes:
                    candidates.update(tree.suggested(each.nodes), row.tokens[-_RECENT:])
        start = self._clock.start()
        if number == 0:
            predictions = self._layer.predict(rows, candidates)
        else:
            predictions = self._layer.look(rows, frontiers, candidates)
        seconds = self._clock.since(start).undisturbed_s
        self.spent_s += seconds
        self._habits.passes += 1
        self._cost.observe(most, seconds)
        if self._habits.passes.bit_count() == 1:  # 1, 2, 4, 8, ...: early ones change much
            self._cost.refresh()
        return predictions
