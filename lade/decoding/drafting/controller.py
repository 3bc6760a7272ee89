"""Tree-size controller: how many tokens each step feeds, with a bounded loss per text.

**Decision.** A step that feeds S tokens takes t(S) seconds and emits E(S) tokens on average. Throughput over a long
text is highest with the S that maximises E(S) - r t(S), where r is the text's throughput at its best size (renewal
reward theorem). S = 1 is plain decoding.

**Expected tokens E(S).** Trees grow best first, so a step with a large tree is evidence about all smaller ones: the
ranks of the accepted nodes show what each of them would have emitted. `YieldCurve` is the mean of that, for each
doubling of the tree size. It belongs to a model; each text scales it by ratios of its own, 1 at first. Two thirds of
E(S) come from the curve, the rest from the scores of this step's nodes, calibrated for each doubling. Verified nodes
also help later steps, accepted or not, since the memory learns their logits: `LEARNING_GAIN`.

**Seconds t(S).** Those of the pass are `StepCost`, to which the library's overhead is added, a median of recent steps.
An outlier, such as a garbage collection or a burst of another process, cannot move a median, and passes that did
one-time work are left out.

**Bounded loss.** A text's loss against plain decoding is counted in plain steps by t(S). It may be `ALLOWANCE` steps
plus `ALLOWED_SHARE` of the text's tokens. No step risks more than half of what is left, so that the rest still affords
smaller trees; once it affords no draft at all, drafting pauses until more tokens are emitted. All texts of a kind also
draw on one reserve, to which each token adds one percent of a step: if drafting never pays, they lose less than each of
them may. Exploration is paid from the same allowance: where drafting does not pay by the curve, a tree is fed if it
does by its raw scores, and while there is reserve one drafted token is, to time the pass. So an unpredictable text does
not stop drafting in the next one, and gains of one text do not excuse losses of another.

**Several rows.** All rows of a batch or an engine share one controller, since passes are padded to the largest tree. It
goes by the mean row. A call that waits for all of its rows takes as long as the slowest one, so there rows that are
ahead count less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp, fsum, log
from statistics import median
from typing import Protocol

import numpy as np

from lade.decoding.kernels.layout import Doubles

LARGEST = 128
"""Tokens fed per step at most, by one process: what passes are measured for, and what CUDA graphs are captured for."""
LARGEST_SHARED = 512
"""The same by several processes, each of which feeds a part."""
RECENT = 9
"""Number of recent times that a median is taken of, of passes and of the library's overhead: four may be outliers."""
PRIOR_GAIN = 0.3
"""Accepted nodes per doubling of the tree size before there are observations; many models have 0.2 to 0.5 in texts
without a memory. At 0.1 the default reaches 0.002 less of the best fixed size's speed (lab/log/tree-size.md, "Twelve
answers a cell", also for the figures below)."""
CURVE_STEPS = 500.0
"""Time constant of a model's yield curve, in steps; 100 and 2000 are as good, 50 is 0.005 worse."""
PRIOR_WEIGHT = 8.0
"""Weight of the prior in a model's curve, in steps, and, in accepted nodes, of the curve in a text's ratio and of this
in those of its doublings; 2 is 0.002 worse and 32 0.004, in the worst cell 0.012 and 0.022."""
SCORES = 0.35
"""Weight of the scores of a step's nodes; the curve has the rest, as the highest scores are the most overestimated. 0
is 0.015 worse and 1 0.072; 0.5 is 0.003 better, but 0.05 worse where t(S) has a ledge at 2 and at 8 tokens."""
LEARNING_GAIN = 0.035
"""Verifying node number n yields `LEARNING_GAIN / sqrt(n)` tokens in later steps, as the memory learns its logits. 0 is
0.019 worse."""
ALLOWANCE, ALLOWED_SHARE = 2.0, 0.03
"""Most that a text may lose against plain decoding, in plain steps and as a share of its tokens. No share is 0.040
worse, half a step 0.012, 8 steps 0.004."""
RESERVE, RESERVE_SHARE, TEXT_CREDIT = 6.0, 0.01, 0.25
"""Plain steps that all texts of a kind may lose together, and what each token and each new text add to them. Without
this bound unpredictable texts lose 3 % each, for ever; with 1 step, or no share, it is learned late or never that
drafting pays; with no credit a bad text stops drafting in the next (tests/decoding/test_controller.py,
tests/tuning/test_never_slower.py)."""
OVERHEAD_NODES = 100
"""Fixed overhead of a drafting step, as a number of nodes: on a GPU some 1.2 ms beside 10 us per node; on a CPU 0.4 ms
beside 6 us. 10 is 0.065 worse."""
LAG_SCALE = 4.0
"""Lead over the slowest row, in tokens, that divides a row's weight by e where a call waits for all rows. By the mean
row a batch of 16 unequal texts takes 1.11 times as long as plain decoding, with 4 tokens 1.02; by the slowest row alone
the controller learns nothing from the others (lab/log/batches-and-engine.md)."""

_DOUBLINGS = LARGEST_SHARED.bit_length() - 1
_NODES = np.arange(LARGEST_SHARED)
_LOG_SIZES = np.log2(_NODES + 1)
_POWER = _LOG_SIZES.astype(np.int64)  # by size, as all of these: the greatest power of two within it
_BEYOND = _LOG_SIZES - _POWER
_LOGS: list[float] = _LOG_SIZES.tolist()
_DOUBLING = np.maximum(0, np.ceil(_LOG_SIZES).astype(np.int64) - 1)
_LEARNING: list[float] = (((_NODES + 1) ** -0.5).cumsum() - 1.0).tolist()
_LEARNING_TOKENS = LEARNING_GAIN * np.array(_LEARNING)


def max_tree_size(processes: int) -> int:
    """Return the tokens per step at most where so many processes feed a part of each tree."""
    return LARGEST if processes == 1 else min(LARGEST * processes, LARGEST_SHARED)


class PassCost(Protocol):
    """What a forward pass costs.

    Attributes:
        table: seconds by size, from 0 on; never decreasing.
        marginals: seconds that one more token adds, on the lower convex hull of the table; never decreasing.
        corners: sizes where the table touches its hull, ascending.
        wants_baseline: whether a pass over one token is due, to compare others with.
    """

    table: list[float]
    marginals: list[float]
    corners: list[int]
    wants_baseline: bool

    def observe(self, size: int, seconds: float, *, prepared: bool = False) -> None:
        """Learn from a pass; `prepared`: it did work that is done once, and its time is no evidence."""


class FixedBudget:
    """Decides how large trees are: the same number of tokens in each step, as long as there are guesses.

    Args:
        size: tokens fed, the root included.

    Attributes:
        most: tokens fed per step at most.
        exhausted: whether drafting is paused, since this text has lost all that it may lose.
    """

    def __init__(self, size: int) -> None:
        self.size = self.most = size
        self.exhausted = False

    def skip_drafting(self) -> bool:
        """Return whether this step feeds the root alone, without a search for candidates."""
        return False

    def stages(self) -> list[tuple[int, float]]:
        """Return growth stages: (target size, minimum node score)."""
        return [(self.size, 0.0)]

    def choose(self, scores: Sequence[float]) -> int:
        """Return how many of the candidates to feed.

        Args:
            scores: how likely each is to be accepted, likeliest first, the root's 1.0 before them.
        """
        return len(scores)

    def worth_verifying(self, scores: Sequence[float]) -> bool:
        """Return whether a guess with these scores would be fed if it were the only one."""
        return True

    def fill_size(self, size: int) -> int:
        """Return the size up to which to fill a tree of `size` with guesses without scores and the window."""
        return self.size

    def learn(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """Learn which of the candidates fed in this step were accepted.

        Args:
            scores: as in `choose`, of those that were fed.
            accepted: indices into `scores` of those that were accepted, the root left out.
        """


def slowest_row_weights(emitted: Sequence[int]) -> list[float]:
    """Return the weight of each row where a call waits for all, `[B]`, given the tokens they emitted; the slowest 1."""
    slowest = min(emitted)
    return [exp((slowest - count) / LAG_SCALE) for count in emitted]


def common_progress(emitted: Sequence[int]) -> float:
    """Return the progress of a call that waits for all its rows: a soft minimum of the tokens that they have emitted.

    It is no less than the minimum and exceeds it by `LAG_SCALE` log B at most; of rows that keep pace it is theirs.
    """
    return min(emitted) - LAG_SCALE * log(fsum(slowest_row_weights(emitted)) / len(emitted))


class YieldCurve:
    """Accepted nodes of the mean step per doubling of the tree size: of rank 1, ranks 2 and 3, 4 to 7, and so on.

    These are lists, since a step reads and changes a few numbers, for each of which numpy takes a microsecond.

    Attributes:
        gains: `[doublings]`, nodes accepted.
        predicted: `[doublings]`, nodes accepted according to the scores.
        steps: `[doublings]`, number of steps observed, at most `CURVE_STEPS`.
    """

    def __init__(self) -> None:
        self.gains, self.predicted = [PRIOR_GAIN] * _DOUBLINGS, [PRIOR_GAIN] * _DOUBLINGS
        self.steps = [PRIOR_WEIGHT] * _DOUBLINGS

    @property
    def slopes(self) -> list[float]:
        """Expected tokens per unit of score, `[doublings]`."""
        pairs = zip(self.gains, self.predicted, strict=True)
        return [SCORES * (max(gain, 1e-3) / max(predicted, 1e-3)) for gain, predicted in pairs]  # neither is 0

    def share(self, ratios: Sequence[float]) -> list[float]:
        """Return what of E(S) does not come from scores, for a text of these ratios to the curve; see `_sums`."""
        return _sums([(1.0 - SCORES) * ratio * gain for ratio, gain in zip(ratios, self.gains, strict=True)])

    def learn(self, shares: Sequence[float], predicted: Sequence[float], accepted: Sequence[float]) -> None:
        """Learn from a step: `[D]` each, the share of a doubling that was fed, its scores, and its accepted nodes."""
        for at, share in enumerate(shares):
            steps = self.steps[at] = min(self.steps[at] + share, CURVE_STEPS)
            self.gains[at] += (accepted[at] - share * self.gains[at]) / steps
            self.predicted[at] += (predicted[at] - share * self.predicted[at]) / steps


@dataclass
class ControllerState:
    """What is learned about a model and a kind of text, kept between generations by the model's `StepCost`.

    Generations on several threads may share it: at worst an observation is lost.

    Attributes:
        curve: yield by tree size.
        reserve: plain steps that may be lost before drafting is paused in all texts.
        node_s: overhead of recent drafting steps, in seconds per node.
        plain_own_s: overhead of recent plain steps, in seconds.
    """

    curve: YieldCurve = field(default_factory=YieldCurve, compare=False)
    reserve: float = RESERVE
    node_s: deque[float] = field(default_factory=lambda: deque([0.0] * 3, RECENT))
    plain_own_s: deque[float] = field(default_factory=lambda: deque([0.0], RECENT))


class Controller:
    """Decides the tree size of all rows of a batch, or of a single row: passes are padded to the largest tree.

    In each step the candidates of all rows are collected first; then `decide` compares their scores, the drafts are
    made, and `observe` gets the times of the pass.

    Args:
        cost: seconds of a forward pass over the whole batch, by the size of each row's tree; updated by every step.
        state: what was learned from earlier texts, updated; None to start from the priors.
        most: tokens that a row feeds per step at most; see `max_tree_size`.
    """

    def __init__(self, cost: PassCost, state: ControllerState | None = None, most: int = LARGEST) -> None:
        self._cost = cost
        self.most = most
        self._state = ControllerState() if state is None else state
        self._expected, self._accepted = [0.0] * _DOUBLINGS, [0.0] * _DOUBLINGS  # of these texts
        self._lost = self._tokens = 0.0
        self._rows, self._size, self._fed = 0, 1, 1
        self._skipping: bool | None = None
        self._looked, self._is_new = True, False
        self._node_s = self._plain_own_s = self._rate = 0.0
        self._measure_own_time()

    def _measure_own_time(self) -> None:
        self._node_s, self._plain_own_s = median(self._state.node_s), median(self._state.plain_own_s)

    def use(self, cost: PassCost) -> None:
        """Switch to the cost curve of another batch size."""
        self._cost = cost

    def go_by(self, state: ControllerState) -> None:
        """Switch to what was learned from another kind of text."""
        if state is not self._state:
            self._state = state
            self._measure_own_time()

    def begin_texts(self, count: int, *, alone: bool = False) -> None:
        """Begin `count` texts without losses; texts that go on, unless the new ones are `alone`, keep their shares."""
        kept = 0.0 if alone else self._rows / (self._rows + count)
        self._lost, self._tokens = kept * self._lost, kept * self._tokens
        self._expected = [kept * nodes for nodes in self._expected]
        self._accepted = [kept * nodes for nodes in self._accepted]
        self._state.reserve = min(RESERVE, max(0.0, self._state.reserve) + TEXT_CREDIT * count)

    @property
    def exhausted(self) -> bool:
        """Whether this text has lost all that it may lose, so that drafting is paused."""
        return self._state.reserve <= 0.0 or self._affordable < 2

    @property
    def reads_logits(self) -> bool:
        """Whether the logits of a prompt should be computed, to learn from them."""
        return not self.exhausted

    @property
    def _affordable(self) -> int:
        """The largest tree that may be rejected as a whole: no step risks more than half of what may still be lost."""
        table, left = self._cost.table, ALLOWANCE + ALLOWED_SHARE * self._tokens - self._lost
        most_s = (1.0 + left / 2.0) * (table[1] + self._plain_own_s) - OVERHEAD_NODES * self._node_s
        return min(self.most, bisect_right(table, most_s, 2) - 1)

    @property
    def rate(self) -> float:
        """Tokens per second of this text at its best size, at least those of plain decoding."""
        table, node_s, best = self._cost.table, self._node_s, 1.0 / (self._cost.table[1] + self._plain_own_s)
        sums = _sums([ratio * gain for ratio, gain in zip(self._ratios, self._state.curve.gains, strict=True)])
        for size in self._sizes(1):
            tokens = 1.0 + (_at(sums, size) + LEARNING_GAIN * _LEARNING[size - 1])
            best = max(best, tokens / (table[size] + node_s * (size + OVERHEAD_NODES)))
        return best

    def _sizes(self, above: int) -> list[int]:
        """Return the corners of the cost's hull above a size, and the largest size that may be fed."""
        return [*(corner for corner in self._cost.corners if above < corner < self.most), self.most]

    def skip_drafting(self) -> bool:
        """See `FixedBudget`: in baseline probes, and while the allowance is exhausted; all rows in the same steps."""
        if self._skipping is None:
            self._skipping = self.exhausted or self._cost.wants_baseline
            self._looked = not self._skipping
            if self._looked:
                self._rate = self.rate
        return self._skipping

    @property
    def _ratios(self) -> list[float]:
        """Accepted nodes of this text relative to the curve, `[doublings]`: as long as one has few, those of all."""
        ratio = (PRIOR_WEIGHT + fsum(self._accepted)) / (PRIOR_WEIGHT + fsum(self._expected))
        pairs = zip(self._accepted, self._expected, strict=True)
        return [(PRIOR_WEIGHT * ratio + accepted) / (PRIOR_WEIGHT + expected) for accepted, expected in pairs]

    def stages(self) -> list[tuple[int, float]]:
        """See `FixedBudget`: between two corners of the cost's hull all nodes cost the same."""
        curve, ratios, marginals = self._state.curve, self._ratios, self._cost.marginals
        sums, slopes = curve.share(ratios), curve.slopes
        size, before, stages = 1, 0.0, list[tuple[int, float]]()
        for corner in self._sizes(1):
            price = self._rate * (marginals[corner - 1] + self._node_s)
            base = _at(sums, corner) + LEARNING_GAIN * _LEARNING[corner - 1]
            doubling = (corner - 1).bit_length() - 1
            slope = ratios[doubling] * slopes[doubling]
            weight = 1.0 if self._fed == 1 else slope  # exploration goes by raw scores
            stages.append((corner, max(0.0, (price - (base - before) / (corner - size)) / weight)))
            size, before = corner, base
        return [(2, 0.0), *stages] if self._fed == 1 and self._state.reserve >= 1.0 else stages

    def expected(self, scores: Sequence[float], ratios: Sequence[float] | None) -> Doubles:
        """Return E(S) for each S from 1 on, `[C]`, given a text's ratios to the curve; None to go by raw scores."""
        given, curve = np.array(scores[:LARGEST_SHARED], dtype=np.float64), self._state.curve
        if ratios is None:
            return np.cumsum(given)
        size, sums = len(given), curve.share(ratios)
        power, rises = _POWER[:size], [after - before for before, after in pairwise(sums)]
        mean = np.array(rises)[power] * _BEYOND[:size] + np.array(sums)[power]
        given[0] = 0.0
        slopes = np.array(curve.slopes) * ratios
        tokens = mean + (slopes[_DOUBLING[:size]] * given).cumsum() + _LEARNING_TOKENS[:size]
        if max(scores[1:], default=0.0) >= 1.0:
            tokens = np.maximum(tokens, np.where(given >= 1.0, given, 0.0).cumsum())
        return np.asarray(1.0 + tokens)

    def decide(self, candidates: Sequence[Sequence[float]], emitted: Sequence[int] | None = None) -> None:
        """Choose the size of this step's trees.

        Args:
            candidates: `[B]`, of each row the scores of all nodes that it could feed; empty where drafting is skipped.
                A row without scores beside others that have some drafts by another method or not at all: it counts as
                one token.
            emitted: `[B]`, tokens that each row has emitted, if a call waits for all; None if rows are on their own.
        """
        if not any(candidates):
            return
        found = [scores or [1.0] for scores in candidates]
        self._is_new = max(map(len, found)) == 1
        size = self._best(self._mean(found, emitted, self._ratios))
        if size == 1:  # explore: trust the raw scores
            size = self._best(self._mean(found, emitted, None))
        if size == 1 and self._state.reserve >= 1.0:
            size = min(2, max(map(len, found)))  # to time a pass over several tokens
        forced = max(sum(map((1.0).__le__, scores)) for scores in found)  # they are accepted for certain
        self._size = min(size, max(self._affordable, forced))

    def choose(self, scores: Sequence[float]) -> int:
        """See `FixedBudget`: the common size of all rows, or all candidates if there are fewer."""
        return min(self._size, len(scores))

    def _mean(
        self, candidates: Sequence[Sequence[float]], emitted: Sequence[int] | None, ratios: Sequence[float] | None
    ) -> Doubles:
        """Return E(S) of the mean row, by size; a row with fewer candidates feeds all of them."""
        expected = [self.expected(scores, ratios) for scores in candidates]
        if len(expected) == 1:
            return expected[0]
        weights = np.ones(len(expected)) if emitted is None else np.array(slowest_row_weights(emitted))
        mean = np.zeros(max(map(len, expected)))
        for each, weight in zip(expected, weights / weights.sum(), strict=True):
            mean[: len(each)] += weight * each
            mean[len(each) :] += weight * each[-1]
        return mean

    def _best(self, expected: Doubles) -> int:
        """Return the S that maximises E(S) - r t(S), given E `[C]`."""
        seconds = np.array(self._cost.table[1 : len(expected) + 1]) + self._node_s * _NODES[: len(expected)]
        return int((expected - self._rate * seconds).argmax()) + 1

    def worth_verifying(self, scores: Sequence[float]) -> bool:
        """See `FixedBudget`."""
        if self._cost.wants_baseline or sum(scores) <= self._rate * (self._cost.table[2] - self._cost.table[1]):
            return False
        return self._best(self.expected([1.0, *scores], self._ratios)) > 1

    def fill_size(self, size: int) -> int:
        """See `FixedBudget`: up to the size of other rows, which is free, and on while learning alone pays for it."""
        size = max(size, self._size)
        table, filled = self._cost.table, size
        for end in self._sizes(size):
            price = self._rate * (table[end] - table[size] + self._node_s * (end - size))
            # where the memory knows nothing of the context no node is likelier than another: each counts as the first
            nodes = end - size if self._is_new else _LEARNING[end - 1] - _LEARNING[size - 1]
            if end > size and LEARNING_GAIN * nodes > price:
                filled = end
        return max(size, min(filled, self._affordable))

    def learn(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """See `FixedBudget`."""
        doublings, curve = range((len(scores) - 1).bit_length()), self._state.curve
        shares = [min(1.0, _LOGS[len(scores) - 1] - number) for number in doublings]
        predicted = [fsum(scores[1 << number : 2 << number]) for number in doublings]
        counts = [0.0 for _ in doublings]
        for rank in accepted:
            counts[rank.bit_length() - 1] += 1.0
        for at, share in enumerate(shares):
            self._expected[at] += share * curve.gains[at]
            self._accepted[at] += counts[at]
        curve.learn(shares, predicted, counts)

    def observe(
        self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int = 1, prepared: bool = False
    ) -> None:
        """Learn from the times of a step.

        Args:
            fed: tokens fed, the root included; of a batch, the size of its largest tree.
            emitted: tokens of the mean row; where a call waits for all, the increase of `common_progress`.
            seconds: undisturbed seconds of the whole step, see `lade.clock`, without the passes of an MTP layer, which
                `MtpPasses` decides about.
            forward_s: the part of `seconds` spent in the model.
            rows: B, number of rows.
            prepared: whether the pass did one-time work, such as capturing a graph; its times are then ignored.
        """
        state = self._state
        if not prepared and self._looked:
            state.node_s.append((seconds - forward_s) / (fed + OVERHEAD_NODES))
        elif not prepared and fed == 1:
            state.plain_own_s.append(seconds - forward_s)
        self._measure_own_time()
        table = self._cost.table
        plain_s = table[1] + self._plain_own_s
        own_s = self._node_s * (fed + OVERHEAD_NODES) if self._looked else self._plain_own_s
        steps = (table[min(fed, len(table) - 1)] + own_s) / plain_s
        self._tokens += emitted
        state.reserve += RESERVE_SHARE * emitted
        if self._looked:
            self._lost = max(0.0, self._lost + steps - emitted)
            state.reserve += emitted - steps
        state.reserve = min(RESERVE, state.reserve)
        self._rows, self._fed, self._skipping = rows, fed, None
        self._cost.observe(fed, forward_s, prepared=prepared)


def _sums(gains: Sequence[float]) -> list[float]:
    """Return the sums of the gains of doublings up to each power of two, from 1 on; the last one twice."""
    sums = [0.0, *accumulate(gains)]
    return [*sums, sums[-1]]


def _at(sums: Sequence[float], size: int) -> float:
    """Return the sum of gains up to a size, between two powers of two by its logarithm."""
    power = size.bit_length() - 1
    return (sums[power + 1] - sums[power]) * (_LOGS[size - 1] - power) + sums[power]


Budget = FixedBudget | Controller
