"""Tree-size controller: a learned yield curve against the seconds of passes, and a bounded loss in each text.

**The decision.** A step that feeds S tokens takes t(S) seconds and yields E(S) tokens. Most tokens per second in the
long run come from the S that maximises E(S) - r t(S), where r is the rate in tokens per second that the text has at its
best size: the yield of the step less what its time yields elsewhere (renewal reward theorem). S = 1 is plain decoding.

**The yield.** Trees grow best first, so a step that feeds many nodes tells about all smaller trees: the ranks of the
accepted nodes say what each would have yielded. The curve of a model is the mean of that, by doublings of the tree.
A text has one factor of its own to it, which begins at 1. Two thirds of E(S) are the curve, the rest a step's own
scores, by what such scores have brought in each doubling. And feeding teaches: logits of rejected nodes are learned.

**The seconds.** t(S) is the curve of the model on this machine (`step_cost`) plus the library's own time, a median of
recent steps. One step's time alone decides nothing: a burst of another process or garbage collection can only move a
median, and passes that were prepared do not even that.

**State.** Per model and kind of text: `ControllerState`, owned by the model's cost curve. Per text: its factor,
and its *loss* against plain decoding, in plain steps by t(S). `ALLOWANCE` steps and `ALLOWED_SHARE` of the text are the
most that it may be. No tree costs more than half of what may still be lost, so that what is left buys smaller ones; and
where two tokens cost more than that, drafting rests until the share has grown. All texts of a kind share a reserve,
which grows by one percent of the tokens: where nothing ever pays, less is lost than a text may lose. What seems not to
pay is fed if its raw scores say that it would; and while some reserve is left, two tokens, to see what they
cost. So a text that cannot be guessed silences none of the next ones, and gains license no losses.

**Several rows.** All rows of a batch or an engine share one controller, since passes are padded to the largest tree:
the yield of the mean row decides. A call that waits for all of its rows takes as long as the slowest, so there rows
weigh the less the further they are ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import fsum
from statistics import median
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LARGEST = 128
"""Tokens fed per step at most, by one process: what passes are measured for, and what CUDA graphs are captured for."""
LARGEST_SHARED = 512
"""The same by several processes, each of which feeds a part."""
RECENT = 9
"""Recent times that a median is taken over, of passes and of the library's own work: it withstands four outliers."""
PRIOR_GAIN = 0.3
"""Accepted nodes for each doubling of a tree, before anything is seen: cold texts of many models have 0.2 to 0.5. At
0.1 the default has 0.002 less of the best fixed size (these figures: lab/log/tree-size.md, "Twelve answers a cell")."""
CURVE_STEPS = 500.0
"""Steps that the yield curve of a model remembers; 100 and 2000 are as good, at 50 it has 0.005 less."""
PRIOR_WEIGHT = 8.0
"""Steps that the prior counts for in a curve, and accepted nodes that a curve counts for in a text; at 2 it has 0.002
less, at 32 0.004, and its worst cell 0.012 and 0.022."""
SCORES = 0.35
"""Weight of a step's own scores beside the curve's mean: in steps that promise most, least of it comes. At 0 it has
0.015 less, at 1 0.072; at 0.5 0.003 more, and 0.05 less where passes have a ledge at 2 and 8 tokens."""
TAUGHT = 0.035
"""The logits of node number n bring `TAUGHT / sqrt(n)` tokens later, accepted or not: the memory learns them. At 0 it
has 0.019 less."""
ALLOWANCE, ALLOWED_SHARE = 2.0, 0.03
"""Plain steps, and share of its tokens, that a text may lose against plain decoding: what is promised. With no share it
has 0.040 less, with half a step 0.012, with 8 steps 0.004; without a bound the embedded model 3 to 7 % more."""
RESERVE, RESERVE_SHARE, TEXT_CREDIT = 6.0, 0.01, 0.25
"""Plain steps that all texts of a kind may lose together, and what each token and each text add again. With no bound
hopeless texts lose 3 % each, for ever; at 1 step, or with no share, what pays is found out late or never; with no
credit a bad text silences the next (tests/decoding/test_controller.py, tests/tuning/test_never_slower.py)."""
OVERHEAD_NODES = 100
"""Fixed overhead of a drafting step, in nodes: on a GPU some 1.2 ms and 10 us for each node; on a CPU some 0.4 ms and
6 us. At 10 it has 0.065 less."""
LAG_SCALE = 4.0
"""A lead of this many tokens over the slowest row divides a row's weight by e where a call waits for all. With the
mean row a batch of 16 that differ takes 1.11 times as long as plain decoding, at 4 tokens 1.02; with the slowest row
alone nothing is learned from all others (lab/log/batches-and-engine.md)."""

_DOUBLINGS = LARGEST_SHARED.bit_length() - 1
_NODES = np.arange(LARGEST_SHARED)
_LOG_SIZES = np.log2(_NODES + 1)
_POWER = _LOG_SIZES.astype(np.int64)  # by size, as all of these: the greatest power of two within it
_BEYOND = _LOG_SIZES - _POWER
_LOGS: list[float] = _LOG_SIZES.tolist()
_DOUBLING = np.maximum(0, np.ceil(_LOG_SIZES).astype(np.int64) - 1)
_TAUGHT: list[float] = (((_NODES + 1) ** -0.5).cumsum() - 1.0).tolist()
_TAUGHT_TOKENS = TAUGHT * np.array(_TAUGHT)


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
        exhausted: whether drafting rests, since this text has lost all that it may lose by drafts.
    """

    def __init__(self, size: int) -> None:
        self.size = self.most = size
        self.exhausted = False

    def skip_drafting(self) -> bool:
        """Return whether to feed the root alone in the step that begins, without a search for candidates."""
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
        """Return whether some tokens of a guess with these scores would be fed, if there were no others."""
        return True

    def fill_size(self, size: int) -> int:
        """Return the size up to which to fill a tree of `size` with guesses without scores and the window."""
        return self.size

    def learn(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """Learn what the candidates fed in this step have brought.

        Args:
            scores: as in `choose`, of those that were fed.
            accepted: indices into `scores` of those that were accepted, the root left out.
        """


def slowest_row_weights(emitted: Sequence[int]) -> Floats:
    """Return how much each row weighs where a call waits for all: `[B]`, the slowest 1.

    Args:
        emitted: `[B]`, tokens that each row has emitted.
    """
    return np.exp((min(emitted) - np.array(emitted, dtype=np.float64)) / LAG_SCALE)


def common_progress(emitted: Sequence[int]) -> float:
    """Return the progress of a call that waits for all its rows: a soft minimum of the tokens that they have emitted.

    It is no less than the minimum and exceeds it by `LAG_SCALE` log B at most; of rows that keep pace it is theirs.
    """
    return min(emitted) - LAG_SCALE * float(np.log(slowest_row_weights(emitted).mean()))


class YieldCurve:
    """Accepted nodes by doublings of a tree, in the mean step: of rank 1, of 2 and 3, of 4 to 7; and those promised.

    These are lists: a step reads and changes a few numbers, for each of which numpy takes a microsecond.

    Attributes:
        gains: `[doublings]`, nodes accepted.
        promised: `[doublings]`, sums of scores.
        steps: `[doublings]`, how many steps have shown this, at most `CURVE_STEPS`.
    """

    def __init__(self) -> None:
        self.gains, self.promised = [PRIOR_GAIN] * _DOUBLINGS, [PRIOR_GAIN] * _DOUBLINGS
        self.steps = [PRIOR_WEIGHT] * _DOUBLINGS

    @property
    def slopes(self) -> list[float]:
        """What a score of 1.0 adds to the expected yield, `[doublings]`."""
        pairs = zip(self.gains, self.promised, strict=True)
        return [SCORES * (max(gain, 1e-3) / max(promised, 1e-3)) for gain, promised in pairs]  # neither is nothing

    def learn(self, shares: Sequence[float], promised: Sequence[float], accepted: Sequence[float]) -> None:
        """Learn from a step that fed some doublings, the last maybe in part: `[fed]` each, shares of 0.0 to 1.0."""
        for at, share in enumerate(shares):
            steps = self.steps[at] = min(self.steps[at] + share, CURVE_STEPS)
            self.gains[at] += (accepted[at] - share * self.gains[at]) / steps
            self.promised[at] += (promised[at] - share * self.promised[at]) / steps


@dataclass
class ControllerState:
    """What a model has taught with one kind of text, kept between its generations.

    Generations on several threads may share it: a lost step is the worst.

    Attributes:
        curve: what trees yield.
        reserve: plain steps that may be lost before drafting rests in all texts.
        node_s: seconds of the library's own time per node, in steps of late that looked for guesses.
        plain_own_s: seconds of it in steps that did not.
    """

    curve: YieldCurve = field(default_factory=YieldCurve, compare=False)
    reserve: float = RESERVE
    node_s: deque[float] = field(default_factory=lambda: deque([0.0] * 3, RECENT))
    plain_own_s: deque[float] = field(default_factory=lambda: deque([0.0], RECENT))


class Controller:
    """Decides about the trees of all rows of one batch, or of a lone one: passes are padded to the largest tree.

    In each step the candidates of all rows are found first, then `decide` weighs their scores, then the drafts are
    made, and `observe` gets the pass as a whole.

    Args:
        cost: what a forward pass over the whole batch costs, by the size of each row's tree; updated by every step.
        state: what earlier texts have taught, updated; None to start from the priors.
        most: tokens that a row feeds per step at most; see `max_tree_size`.
    """

    def __init__(self, cost: PassCost, state: ControllerState | None = None, most: int = LARGEST) -> None:
        self._cost = cost
        self.most = most
        self._state = ControllerState() if state is None else state
        self._expected = self._accepted = PRIOR_WEIGHT
        self._lost = self._tokens = 0.0
        self._rows, self._size, self._fed = 0, 1, 1
        self._skipping: bool | None = None
        self._looked = True
        self._node_s = self._plain_own_s = self._rate = 0.0
        self._measure_own_time()

    def _measure_own_time(self) -> None:
        self._node_s, self._plain_own_s = median(self._state.node_s), median(self._state.plain_own_s)

    def use(self, cost: PassCost) -> None:
        """Switch to the cost curve of another batch size."""
        self._cost = cost

    def go_by(self, state: ControllerState) -> None:
        """Switch to what another kind of text has taught."""
        if state is not self._state:
            self._state = state
            self._measure_own_time()

    def begin_texts(self, count: int, *, alone: bool = False) -> None:
        """Begin so many texts, which have lost nothing yet; the others, if they are not alone, keep their shares."""
        kept = 0.0 if alone else self._rows / (self._rows + count)
        self._lost, self._tokens = kept * self._lost, kept * self._tokens
        self._expected += (1.0 - kept) * (PRIOR_WEIGHT - self._expected)
        self._accepted += (1.0 - kept) * (PRIOR_WEIGHT - self._accepted)
        self._state.reserve = min(RESERVE, max(0.0, self._state.reserve) + TEXT_CREDIT * count)

    @property
    def exhausted(self) -> bool:
        """Whether this text may lose no more than it has lost, so that drafting rests."""
        return self._state.reserve <= 0.0 or self._affordable < 2

    @property
    def reads_logits(self) -> bool:
        """Whether it is worth its time to learn from the logits of a prompt that is going to be fed."""
        return not self.exhausted

    @property
    def _affordable(self) -> int:
        """The largest tree of which a text may lose all: no step risks more than half of the allowance that is left."""
        table, left = self._cost.table, ALLOWANCE + ALLOWED_SHARE * self._tokens - self._lost
        most_s = (1.0 + left / 2.0) * (table[1] + self._plain_own_s) - OVERHEAD_NODES * self._node_s
        return min(self.most, bisect_right(table, most_s, 2) - 1)

    @property
    def rate(self) -> float:
        """Tokens per second that this text yields with the best size, at least those of plain decoding."""
        table, ratio, node_s = self._cost.table, self._ratio, self._node_s
        best, sums = 1.0 / (table[1] + self._plain_own_s), _sums(self._state.curve.gains)
        for size in self._sizes(1):
            tokens = 1.0 + (ratio * _at(sums, size) + TAUGHT * _TAUGHT[size - 1])
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
    def _ratio(self) -> float:
        """What this text yields of what the curve says."""
        return self._accepted / self._expected

    def stages(self) -> list[tuple[int, float]]:
        """See `FixedBudget`: between two corners of the cost's hull all nodes cost the same."""
        curve, ratio, marginals = self._state.curve, self._ratio, self._cost.marginals
        sums, slopes = _sums([ratio * (1.0 - SCORES) * gain for gain in curve.gains]), curve.slopes
        size, before, stages = 1, 0.0, list[tuple[int, float]]()
        for corner in self._sizes(1):
            price = self._rate * (marginals[corner - 1] + self._node_s)
            base = _at(sums, corner) + TAUGHT * _TAUGHT[corner - 1]
            slope = ratio * slopes[(corner - 1).bit_length() - 1]
            weight = 1.0 if self._fed == 1 else slope  # what explores goes by scores
            stages.append((corner, max(0.0, (price - (base - before) / (corner - size)) / weight)))
            size, before = corner, base
        return [(2, 0.0), *stages] if self._fed == 1 and self._state.reserve >= 1.0 else stages

    def expected(self, scores: Sequence[float], ratio: float | None) -> Floats:
        """Return E(S) for each S from 1 on, `[C]`, given what the text yields of the curve; None to go by scores."""
        given, curve = np.array(scores[:LARGEST_SHARED], dtype=np.float64), self._state.curve
        if ratio is None:
            return np.cumsum(given)
        size, sums = len(given), _sums([(1.0 - SCORES) * gain for gain in curve.gains])
        power, rises = _POWER[:size], [after - before for before, after in pairwise(sums)]
        mean = np.array(rises)[power] * _BEYOND[:size] + np.array(sums)[power]
        given[0] = 0.0
        tokens = ratio * (mean + (np.array(curve.slopes)[_DOUBLING[:size]] * given).cumsum()) + _TAUGHT_TOKENS[:size]
        if max(scores[1:], default=0.0) >= 1.0:
            tokens = np.maximum(tokens, np.where(given >= 1.0, given, 0.0).cumsum())
        expected: Floats = 1.0 + tokens
        return expected

    def decide(self, candidates: Sequence[Sequence[float]], emitted: Sequence[int] | None = None) -> None:
        """Choose the size of this step's trees.

        Args:
            candidates: `[B]`, of each row the scores of all nodes that it could feed; empty where drafting is skipped.
                A row without scores, beside others with some, drafts by another method or not at all: it counts one
                token.
            emitted: `[B]`, tokens that each row has emitted, if a call waits for all; None if rows are on their own.
        """
        if not any(candidates):
            return
        found = [scores or [1.0] for scores in candidates]
        size = self._best(self._mean(found, emitted, self._ratio))
        if size == 1:  # explore: as if scores came true
            size = self._best(self._mean(found, emitted, None))
        if size == 1 and self._state.reserve >= 1.0:
            size = min(2, max(map(len, found)))  # what passes over several tokens take is found out
        forced = max(sum(map((1.0).__le__, scores)) for scores in found)  # feeding these loses nothing
        self._size = min(size, max(self._affordable, forced))

    def choose(self, scores: Sequence[float]) -> int:
        """See `FixedBudget`: as many as in all other rows, if there are as many."""
        return min(self._size, len(scores))

    def _mean(
        self, candidates: Sequence[Sequence[float]], emitted: Sequence[int] | None, ratio: float | None
    ) -> Floats:
        """Return the expected yield of the mean row by size; a row with fewer candidates feeds all that it has."""
        expected = [self.expected(scores, ratio) for scores in candidates]
        if len(expected) == 1:
            return expected[0]
        weights = np.ones(len(expected)) if emitted is None else slowest_row_weights(emitted)
        mean = np.zeros(max(map(len, expected)))
        for each, weight in zip(expected, weights / weights.sum(), strict=True):
            mean[: len(each)] += weight * each
            mean[len(each) :] += weight * each[-1]
        return mean

    def _best(self, expected: Floats) -> int:
        """Return the size whose expected yield `[C]` exceeds most what its time would yield elsewhere."""
        seconds = np.array(self._cost.table[1 : len(expected) + 1]) + self._node_s * _NODES[: len(expected)]
        return int((expected - self._rate * seconds).argmax()) + 1

    def worth_verifying(self, scores: Sequence[float]) -> bool:
        """See `FixedBudget`."""
        if self._cost.wants_baseline or sum(scores) <= self._rate * (self._cost.table[2] - self._cost.table[1]):
            return False
        return self._best(self.expected([1.0, *scores], self._ratio)) > 1

    def fill_size(self, size: int) -> int:
        """See `FixedBudget`: up to the other rows' size, which is free, and on while nodes pay by what they teach."""
        size = max(size, self._size)
        table, filled = self._cost.table, size
        for end in self._sizes(size):
            price = self._rate * (table[end] - table[size] + self._node_s * (end - size))
            if end > size and TAUGHT * (_TAUGHT[end - 1] - _TAUGHT[size - 1]) > price:
                filled = end
        return max(size, min(filled, self._affordable))

    def learn(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """See `FixedBudget`."""
        doublings, curve = range((len(scores) - 1).bit_length()), self._state.curve
        shares = [min(1.0, _LOGS[len(scores) - 1] - number) for number in doublings]
        promised = [fsum(scores[1 << number : 2 << number]) for number in doublings]
        came = [0.0 for _ in doublings]
        for rank in accepted:
            came[rank.bit_length() - 1] += 1.0
        self._expected += fsum(share * gain for share, gain in zip(shares, curve.gains, strict=False))
        self._accepted += len(accepted)
        curve.learn(shares, promised, came)

    def observe(
        self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int = 1, prepared: bool = False
    ) -> None:
        """Learn what a step took.

        Args:
            fed: tokens fed, the root included; of a batch, the size of its largest tree.
            emitted: tokens that the mean row got; where a call waits for all, by how many `common_progress` rose.
            seconds: undisturbed seconds that the whole step took, see `lade.clock`; without passes of an MTP layer,
                whose payoff `MtpPasses` weighs: they are no price of nodes.
            forward_s: seconds of those that the model took.
            rows: B, how many took part.
            prepared: whether the pass did work that is done once, such as capturing a graph: its times are no evidence.
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
