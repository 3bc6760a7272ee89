"""How many tokens a step feeds: belief, evidence, and a budget for finding out.

**The decision.** A step that feeds S tokens takes t(S) seconds and yields E(S) tokens. Most tokens per second in the
long run come from the S that maximises E(S) - r t(S), where r is the rate of late in tokens per second: the yield of
the step less what its time would yield elsewhere (renewal reward theorem). S = 1 is plain decoding.

**The belief.** Before anything is seen, E(S) = 1 + 0.36 (S - 1)^0.45: 1.6 at 4 tokens, 1.9 at 8, 2.2 at 16, 2.7 at 32.
Cold texts of many models give 1.5, 1.65, 2.0 and 2.4; the prior is a little above them, since an optimist finds out.
It is what a *policy* of S tokens yields: feeding rejected nodes teaches the memory their logits, so that later steps
yield more. What the scores of one step promise counts that step alone, and the best-looking steps promise too much. So
a step is expected to yield halfway between the prior and its scores,

    E(S) = 1 + u (sum of the scores / 2 + prior gain(S) / 2).

**The evidence.** u is the calibration: tokens that guesses brought over tokens that this formula (with u = 1) had
expected of the same steps. It begins at 1 with the weight of 25 expected tokens; evidence fades over 300.

**The price.** t(S) is the step cost of the model on this machine (`lade.tuning`) and the library's own time.
Both are learned from the steps that are made, and no pass is made for measuring alone. Where every step feeds guesses,
each 64th is a plain one, to see what plain decoding takes; where none does, four tokens are tried now and then.

**The budget of regret.** Belief may be wrong, so the loss is bounded. A ledger adds up, over all steps in which guesses
were looked for, tokens yielded less the plain steps that the same time would have been worth. It begins at 16 plain
steps and never rises above: gains of one text license no larger losses in the next. When it is used up, guesses are
not looked for any more. Each plain step then earns 0.2 % of a step. When one step is saved up, looking is resumed: if
it wins, the ledger fills up and guessing goes on, else twice as much is saved up for the next attempt: few large ones
escape from bad luck, many small ones do not. Between them each 200th step peeks: it looks for guesses, and begins an
attempt at once if they promise as much as an attempt costs, which notices a text that has become easy. All is paid from
the same ledger: plain decoding is undercut by 16 steps and 0.2 % of the time, and no more than one step's loss beyond.

**Who keeps what.** A machine and a model: the step cost, in a file. A model, by kind of text (greedy, drawn):
`ControllerState`, that is calibration, ledger, rate and own time; a process has it until the model is freed. A call:
nothing but the step that is being made. A text: its memory of contexts, which is not this module's.

**Several rows.** All rows of a batch or an engine share one controller. One price per token holds for all of them: rows
that are padded to the largest tree pay for the padded pass, so the next size is fed if the scores that it adds, over
all rows, are worth it. The budget of regret is in tokens, which they share: as many rows learn as much faster. An
engine has another request for a row that ends, so the mean row counts. A call that waits for all of its rows takes as
long as the slowest: there `common_progress` counts, to which a row adds the less the further it is ahead. No runner
makes passes that are not padded; for engines that do, `lade.engines.price` is the threshold of all requests.

Steps that look for nothing need no decision; they are noted, and learned together later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lade.decoding.drafting.copy_drafting import Agreement
from lade.decoding.drafting.tree_size import PassCost

LARGEST = 128
"""Tokens fed per step at most, by one process."""
LARGEST_SHARED = 512
"""The same by several, each of which feeds a part."""

PRIOR_GAIN, PRIOR_POWER = 0.36, 0.45
"""Tokens that a policy of S yields beyond the first: PRIOR_GAIN * (S - 1) ** PRIOR_POWER. The power is that of cold
texts; the factor is a fifth above theirs (0.3 lost 2 % where passes hardly grow with their size)."""
SCORES = 0.5
"""Weight of a step's scores beside the prior. With 0 sizes do not follow the text, with 1 nothing is fed to learn."""
EVIDENCE_TOKENS = 300.0
"""Weight of all evidence on the yield, in expected tokens: some 400 steps are remembered."""
STEPS = 24
"""Weight of the prior, in expected tokens; steps that rate and own time are averaged over, or that a rest notes."""
REGRET, REGRET_STEPS = 16.0, 2.0
"""Tokens of plain decoding that guessing may lose, which of one row are as many plain steps; a batch shares them, since
its rows learn together, but has so many plain steps at least. A cold memory costs some 12 before it pays; with 20 more
simulated texts fall 3 % behind plain decoding (`tests/tuning/test_never_slower.py`). With one step 16 rows lose 6 %
where passes hardly grow (lab/log/batches-and-engine.md). A single pass is charged no more than all of it."""
EARNED, RESUMED = 0.002, 1.0
"""Plain steps earned by each step that rests, a share of the time; and how many are saved up for the first attempt, or
promised by a peek. With 0.005 earned, twice as many simulated texts are slower than plain decoding."""
LOOK_NODES = 40
"""The library's time of a step is that of its nodes and of so many more: some 290 us and 7 us for each node."""
CHECK_AFTER = 64
"""Steps with guesses after which a plain one shows what plain decoding takes. 16 cost 1 % where guesses double the
speed."""
TRIAL, TRIAL_AFTER = 4, 200
"""Tokens fed to see what they cost, and plain steps after which they are; after as many of a rest there is a peek."""
SURPRISE = 0.2
"""Share by which a pass takes more or less time than expected that is no accident, if it recurs. A trial that was so
much faster is followed by the next at once; else a machine that was measured as steep takes 1.34 times as long as with
the best size (`tests/tuning/test_never_slower.py`)."""
APART = 4.0
"""Tokens by which a row is ahead of the slowest that make it weigh e times less where a call waits for all. With the
mean row a batch of 16 that differ takes 1.11 times as long as plain decoding, at 4 tokens 1.02; with the slowest row
alone nothing is learned from all others, at 8 and 16 tokens some batches lose a quarter of their gain
(lab/log/batches-and-engine.md)."""
OUTLIER = 6.0
"""Multiple of what is usual beyond which a step's own time was something else, such as garbage collection, and a plain
pass a stall."""


def _prior() -> list[float]:
    return [0.0, *(PRIOR_GAIN * np.arange(LARGEST_SHARED + 1) ** PRIOR_POWER).tolist()]


_PRIOR = _prior()
"""By size: tokens beyond the first that a policy of this size is believed to yield."""


def most_fed(processes: int) -> int:
    """Tokens per step at most, where so many processes feed a part of each tree: about as many each as one alone."""
    return LARGEST if processes == 1 else min(LARGEST * processes, LARGEST_SHARED)


def lags(emitted: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return how much each row weighs where a call waits for all: `[B]`, the slowest 1.

    Args:
        emitted: `[B]`, tokens that each row has emitted.
    """
    return np.exp((min(emitted) - np.array(emitted, dtype=np.float64)) / APART)


def common_progress(emitted: Sequence[int]) -> float:
    """Return how far a call is that waits for all of its rows: a soft minimum of the tokens that they have emitted.

    It is no less than the minimum and exceeds it by `APART` log B at most; of rows that keep pace it is theirs.
    """
    return min(emitted) - APART * float(np.log(lags(emitted).mean()))


@dataclass
class ControllerState:
    """What a controller keeps between the generations of one model with one kind of text.

    Generations on several threads may share it: a lost step is the worst.

    Attributes:
        expected, brought: tokens expected of guesses before calibration, and tokens that they brought.
        pace_tokens, pace_steps: fading sums of tokens, and of plain steps that the same time is worth.
        node_s: seconds of the library's own time per node, in steps that look for guesses.
        plain_own_s: seconds of it in steps that do not.
        since_guesses: plain steps since guesses were fed, in all texts.
        spent: whether the budget of regret is used up.
        rested: resting steps since guesses were last looked for.
        saved_up: plain steps to save up for the next attempt.
        tokens, seconds, earned: the ledger since it was last full: tokens and seconds of steps that looked for guesses,
            and plain steps earned by resting.
        copies: how likely a text goes on as it did where its last tokens stood before.
    """

    expected: float = STEPS
    brought: float = STEPS
    pace_tokens: float = STEPS
    pace_steps: float = STEPS
    node_s: float = 0.0
    plain_own_s: float = 0.0
    since_guesses: int = 0
    spent: bool = False
    rested: int = 0
    saved_up: float = RESUMED
    earned: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    copies: Agreement = field(default_factory=Agreement, compare=False)

    @property
    def calibration(self) -> float:
        """u: what guesses bring of what is expected of them before calibration."""
        return self.brought / self.expected

    def learn_yield(self, expected: float, brought: float) -> None:
        """Learn from the guesses of one step."""
        fading = min(1.0, EVIDENCE_TOKENS / (self.expected + expected))
        self.expected = fading * (self.expected + expected)
        self.brought = fading * (self.brought + brought)

    def regret_left(self, plain_s: float, rows: int = 1) -> float:
        """Return what is left of the budget of regret, in tokens of which a plain step takes so many seconds."""
        return max(REGRET, REGRET_STEPS * rows) + self.earned + self.tokens - self.seconds / plain_s

    def settle_regret(self, plain_s: float, rows: int, *, looked: bool) -> None:
        """Start the ledger anew where it is full, and stop or resume looking for guesses."""
        left = self.regret_left(plain_s, rows)
        if left >= max(REGRET, REGRET_STEPS * rows):
            self.tokens = self.seconds = self.earned = 0.0
            self.saved_up = RESUMED
        if looked:
            self.rested = 0
            self.spent |= left <= 0.0
            return
        self.rested += self.spent
        if self.spent and left >= self.saved_up:
            self.saved_up *= 2.0
            self.resume()

    def resume(self) -> None:
        """Look for guesses again, the prior weighing as much as all evidence: the text may have changed."""
        self.spent = False
        self.expected, self.brought = 2.0 * STEPS, STEPS * (1.0 + self.calibration)


class Controller:
    """Decides about the trees of one row; see `Budget`.

    Args:
        cost: what a forward pass costs; it learns from every step.
        state: what earlier texts have taught, learned further; None to know nothing.
        most: tokens fed per step at most; see `most_fed`.
    """

    def __init__(self, cost: PassCost, state: ControllerState | None = None, most: int = LARGEST) -> None:
        self._cost = cost
        self.most = most
        self._state = ControllerState() if state is None else state
        self._looked = True
        self._check = self._peek = False
        self._rows = self._most_rows = 1
        self._since_plain = 0
        self._noted: list[tuple[float, float, float]] = []
        self._expected = 0.0
        self._of_memory = True

    @property
    def _plain_s(self) -> float:
        """Seconds of a plain step on average, hiccups included."""
        return self._cost.plain_s + self._state.plain_own_s

    @property
    def rate(self) -> float:
        """Tokens per second of late, at least those of plain decoding."""
        self.settle()
        pace = self._state.pace_tokens / self._state.pace_steps
        return max(1.0, pace) / (self._cost.table[1] + self._state.plain_own_s)

    @property
    def trust(self) -> float:
        """See `Budget`."""
        return min(1.0, self._state.calibration)

    def thresholds(self) -> list[tuple[int, float]]:
        """See `Budget`: between two corners of the cost's hull all nodes cost the same."""
        corners = [size for size in self._cost.corners if 1 < size < self.most] + [self.most]
        rate, node_s, marginals = self.rate, self._state.node_s, self._cost.marginals
        use, stages, size = self._state.calibration, list[tuple[int, float]](), 1
        weight = (1.0 - SCORES) * use
        for corner in corners:
            price, explored = rate * (marginals[corner - 1] + node_s), size
            while explored < corner and weight * (_PRIOR[explored + 1] - _PRIOR[explored]) >= price:
                explored += 1
            if explored > size:  # nodes that are worth it whatever their scores
                stages.append((explored, 0.0))
            if explored < corner:
                taught = weight * (_PRIOR[explored + 1] - _PRIOR[explored])
                stages.append((corner, (price - taught) / (SCORES * use)))
            size = corner
        return stages

    def choose(self, scores: Sequence[float], alone: Sequence[float] | None = None) -> int:
        """See `Budget`."""
        self.settle()
        promised = sum(scores[1:])
        share = 1.0 if alone is None else min(1.0, sum(alone[1:]) / promised) if promised else 0.0
        use = self._state.calibration
        worth = self._worth(scores, share, (1.0 + use) / 2.0 if self._peek else use)  # doubted as by `resume`
        if self._peek and max(worth) - worth[0] < RESUMED:
            worth = worth[:1]
        elif self._peek:
            self._state.resume()
        size = worth.index(max(worth)) + 1
        if size == 1 and self._looked and self._state.since_guesses >= TRIAL_AFTER:
            size = min(TRIAL, len(scores))
        fed = sum(scores[1:size])
        self._of_memory = alone is None or 2.0 * sum(alone[1:size]) >= fed
        self._expected = SCORES * fed / self.trust + (1.0 - SCORES) * _PRIOR[size]
        return size

    def pays(self, scores: Sequence[float]) -> bool:
        """See `Budget`."""
        self.settle()
        table = self._cost.table
        if self._check or sum(scores) <= self.rate * (table[2] - table[1]):
            return False  # a plain step is due, or they bring no more than the first of them costs
        worth = self._worth([1.0, *scores], 0.0, 0.0)
        return max(worth) > worth[0]

    def _worth(self, scores: Sequence[float], share: float, use: float) -> list[float]:
        """By size, from 1 on: expected yield less what the time would yield elsewhere.

        Args:
            scores: likeliest first, the memory's times `trust`.
            share: of the sum of scores, how much is the memory's; other scores are calibrated by their sources.
            use: the calibration u.
        """
        rate, table, state = self.rate, self._cost.table, self._state
        node_s = state.node_s
        weight = 1.0 - share + share * SCORES * use / self.trust
        prior = share * (1.0 - SCORES) * use
        worth = [
            1.0 + weight * (promised - 1.0) + prior * _PRIOR[size] - rate * (table[size] + node_s * size)
            for size, promised in enumerate(accumulate(scores), start=1)
        ]
        worth[0] = 1.0 - rate * (table[1] + node_s)
        return worth

    def fill_to(self, size: int) -> int:
        """See `Budget`: as far as a node is worth its price for what it teaches."""
        for end, threshold in self.thresholds():
            if end > size and threshold > 0.0:
                break
            size = max(size, end)
        return size

    def skip_drafting(self) -> bool:
        """See `Budget`: while the budget of regret is used up, but for peeks, and in a plain step that is due."""
        state = self._state
        if state.spent:
            if len(self._noted) % STEPS:  # nothing to decide yet
                return True
            self.settle()
        self._peek = (
            state.spent and state.rested >= TRIAL_AFTER and state.regret_left(self._plain_s, self._most_rows) > 0
        )
        self._check = not state.spent and self._since_plain >= CHECK_AFTER
        self._looked = self._peek or not (state.spent or self._check)
        return not self._looked

    def observe(self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int = 1) -> None:
        """See `Budget`; `emitted` is that of the mean row, and each of the rows is evidence and may lose tokens."""
        self._rows, self._most_rows = rows, max(rows, self._most_rows)
        if fed == 1:
            self._since_plain = 0
            self._state.since_guesses += 1
            if self._state.spent and not self._looked:
                self._noted.append((emitted, seconds, forward_s))
                return
        self.settle()
        self._learn(fed, emitted, seconds, forward_s, looked=self._looked)

    def settle(self) -> None:
        """See `Budget`."""
        if self._noted:
            noted, self._noted = self._noted, []
            for emitted, seconds, forward_s in noted:
                self._learn(1, emitted, seconds, forward_s, looked=False)

    def _learn(self, fed: int, emitted: float, seconds: float, forward_s: float, *, looked: bool) -> None:
        """Learn from a step, in which guesses were looked for or not."""
        state, table = self._state, self._cost.table
        expected_s, own_s = table[min(fed, len(table) - 1)], self._own_s(fed, seconds - forward_s)
        if looked:
            state.node_s += (own_s / (fed + LOOK_NODES) - state.node_s) / STEPS
        elif fed == 1:
            state.plain_own_s += (own_s - state.plain_own_s) / STEPS
        state.pace_tokens += emitted - state.pace_tokens / STEPS
        state.pace_steps += (expected_s + own_s) / (table[1] + state.plain_own_s) - state.pace_steps / STEPS
        if looked and self._of_memory:
            state.tokens += self._rows * emitted
            state.seconds += self._rows * (min(forward_s, REGRET * self._cost.plain_s) + own_s)
        elif fed == 1:
            state.earned += self._rows * EARNED
        state.settle_regret(self._plain_s, self._most_rows, looked=looked)
        if fed > 1:
            self._since_plain += 1
            if forward_s > (1.0 - SURPRISE) * expected_s:  # else the next trial comes at once
                state.since_guesses = 0
            if self._of_memory:
                state.learn_yield(self._rows * self._expected, self._rows * (emitted - 1.0))
        self._cost.observe(fed, forward_s)

    def _own_s(self, fed: int, seconds: float) -> float:
        """The library's own time of a step, without what took far longer than usual, such as garbage collection."""
        usual_s = self._state.node_s * (fed + LOOK_NODES)
        return min(seconds, OUTLIER * max(usual_s, self._cost.plain_s))


class BatchBudget(Controller):
    """The `Budget` of every row of one batch, whose passes are padded to the largest tree.

    In each step the candidates of all rows are found first, then `decide` weighs their scores, then the drafts are
    made. The cost is that of a pass over the whole batch, by the size of each row's tree.
    """

    def __init__(self, cost: PassCost, state: ControllerState | None = None, most: int = LARGEST) -> None:
        super().__init__(cost, state, most)
        self._skipping: bool | None = None
        self._size = 1

    def use(self, cost: PassCost) -> None:
        """Go by the cost of another number of rows from now on; `settle` first, so that it learns nothing of others."""
        self._cost = cost

    @property
    def reads_logits(self) -> bool:
        """Whether it is worth its time to learn from the logits of a prompt that is going to be fed."""
        return not self._state.spent

    def skip_drafting(self) -> bool:
        """See `Budget`: all rows skip it in the same steps."""
        if self._skipping is None:
            self._skipping = super().skip_drafting()
        return self._skipping

    def decide(self, candidates: Sequence[Sequence[float]], emitted: Sequence[int] | None = None) -> None:
        """Choose the size of this step's trees.

        Args:
            candidates: `[B]`, of each row the scores of all nodes that it could feed; empty where drafting is skipped.
                A row without scores beside others with some drafts by another method, or not at all: it counts one
                token.
            emitted: `[B]`, tokens that each row has emitted, if a call waits for all; None if rows are on their own.
        """
        if not any(candidates):
            return
        weights = np.ones(len(candidates)) if emitted is None else lags(emitted)
        mean = np.zeros(max(map(len, candidates)))
        for scores, weight in zip(candidates, weights / weights.sum(), strict=True):
            mean[: max(1, len(scores))] += weight * np.array(scores or [1.0])
        resting = bool(self._skipping)  # then what is there comes from other sources than the memory, or a grammar
        self._size = super().choose(mean.tolist(), () if resting else None)

    def choose(self, scores: Sequence[float], alone: Sequence[float] | None = None) -> int:
        """See `Budget`: as many as in all other rows, if there are as many."""
        return min(self._size, len(scores))

    def fill_to(self, size: int) -> int:
        """See `Budget`: a row with fewer candidates than others fills up, which costs nothing."""
        return super().fill_to(max(size, self._size))

    def observe(self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int = 1) -> None:
        """No-op: `observe_pass` gets the pass as a whole."""

    def observe_pass(self, fed: int, emitted: float, seconds: float, forward_s: float, *, rows: int) -> None:
        """Learn from a forward pass.

        Args:
            fed: size of its largest tree.
            emitted: tokens that the mean row got; where a call waits for all, by how many `common_progress` rose.
            seconds: undisturbed seconds that the whole step took; see `lade.clock`.
            forward_s: seconds of those that the model took.
            rows: B, how many took part.
        """
        super().observe(fed, emitted, seconds, forward_s, rows=rows)
        self._skipping = None
