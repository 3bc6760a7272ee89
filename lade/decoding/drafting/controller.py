"""The size of a tree that pays best, learned from what passes take and what guesses bring.

Let t(S) be the seconds of a step that feeds S tokens, E(S) the tokens it is expected to yield, and r the tokens per
second of late. In the long run most tokens per second come from the S that maximises E(S) - r t(S): what a step yields,
less what its time would yield elsewhere (renewal reward theorem). S = 1, plain decoding, is always a candidate.

That counts what a step yields now. What it teaches pays later, most of all while hardly anything is known and E(S)
stays low. So a step feeds no less than steps were worth feeding lately, unless that costs too much, and what the memory
cannot fill is left to the lookahead window.

Neither t nor E is taken on trust. Passes over guesses and plain ones are compared with what the step cost expects of
them, and guesses with what their scores promise (`Habits`). What is not done is not known: where all steps feed guesses
a plain one now and then shows what plain decoding takes, and where none does, a few guesses show what these would.

While it rests from looking, nothing is decided by what plain steps teach. They are noted then, and learned together
when something is to be decided: behind a pass everything lies far from the core, and one after the other they would
take several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lade.decoding.drafting.habits import Habits
from lade.decoding.drafting.longer_cost import LongerCost
from lade.decoding.drafting.news import most_worth, taught, taught_by_last
from lade.decoding.drafting.tree_size import PassCost

LARGEST = 128
"""Tokens fed per step at most, by one process."""
LARGEST_SHARED = 512
"""The same by several, each of which feeds a part."""
TUITION = 0.15
"""Tokens that feeding the usual size may cost, for what it teaches, where less would yield more now."""
_GAIN_OF_NEWS = 0.8
_SPREAD, _LEAP = 2, 8  # a tree has at most _SPREAD times the usual size, and _LEAP nodes more
_STEPS = 24  # that averages are over
_LEAST_NODES = 40  # the library's time of a step is that of the nodes fed and of this many more
_MOST_OWN, _LEAST_OWN_S = 6.0, 0.001  # times what is usual, or this: what takes longer was compiling, or collecting

# Rests from looking for guesses, where nothing comes of it.
_PATIENCE = 3  # steps
_KEPT_IDLE = 3  # a new text is looked at after some steps, however long guesses were in vain before
_LONGEST_SKIP = 64  # steps
_NOTED = 16  # steps of a rest, at most, before they are learned
_CHEAP, _CHEAP_GAIN = 0.005, 0.05  # looking that costs less never rests: shares of a step's time, and of what is gained

# Steps that are taken to see what they cost.
_CHECK_AFTER, _LONGEST_UNCHECKED = 16, 256  # steps with guesses; the first where these gain nothing
_SURPRISE, _MOST_CHECKS = 0.15, 4  # a plain step that took so much more or less is followed by others, up to so many
_TRIAL_AFTER, _TRIAL_SIZE = 192, 4  # plain steps, and tokens fed then


def most_fed(processes: int) -> int:
    """Tokens per step at most, where so many processes feed a part of each tree: about as many each as one alone."""
    return LARGEST if processes == 1 else min(LARGEST * processes, LARGEST_SHARED)


class Controller:
    """Decides about the trees of one row; see `Budget`.

    Args:
        cost: what a forward pass costs; it learns from every step.
        habits: what earlier texts have taught; they learn from every step, too. None for none.
        most: tokens fed per step at most; see `most_fed`.
    """

    def __init__(self, cost: PassCost, habits: Habits | None = None, most: int = LARGEST) -> None:
        self._cost = cost if most < len(cost.table) else LongerCost(cost, most)
        self._most = most
        self._habits = Habits() if habits is None else habits
        self._tokens, self._seconds = _STEPS * 1.0, _STEPS * cost.table[1]
        self._idle = min(self._habits.idle, _PATIENCE + _KEPT_IDLE)  # times in a row that plain decoding was chosen
        self._skip = 0  # steps to go
        self._checks = 0  # plain steps in a row that were taken to see what they cost
        self._since_plain = 0  # steps
        self._noted: list[tuple[float, float, float]] = []  # plain steps of this rest that have not been learned
        self._promised = 0.0  # tokens that the guesses being fed are expected to bring
        self._of_memory = True  # whether all of these are the memory's

    @property
    def most(self) -> int:
        """See `Budget`."""
        return self._most

    @property
    def rate(self) -> float:
        """Tokens per second of late, at least those of plain decoding."""
        self.settle()
        return max(self._tokens / self._seconds, 1.0 / self._cost.table[1])

    @property
    def _use_of_news(self) -> float:
        """How far what nodes teach counts; not at all, if what is learned never helps."""
        return min(1.0, self._habits.gain / _GAIN_OF_NEWS)

    def _costs_of_nodes(self, sizes: Sequence[int]) -> list[float]:
        """What the last nodes of trees of these sizes cost, in tokens."""
        rate, toll, node_s, marginals = self.rate, self._habits.toll, self._habits.node_s, self._cost.marginals
        return [rate * (toll * marginals[size - 1] + node_s) for size in sizes]

    def thresholds(self) -> list[tuple[int, float]]:
        """See `Budget`: the usual size, then the corners of the cost's hull, between which all nodes cost the same.

        Of those before a corner the first teaches most: by its price none is missed that would be worth feeding.
        """
        self.settle()
        least, trust = int(self._habits.usual), self.trust
        most = min(self._most, _SPREAD * least + _LEAP)
        corners = [size for size in self._cost.corners if least < size < most] + [most]
        costs, use, stages = self._costs_of_nodes(corners), self._use_of_news, [(least, 0.0)]
        for before, corner, cost in zip([least, *corners], corners, costs, strict=False):
            stages.append((corner, max(0.0, cost - use * taught_by_last(before + 1)) / trust))
        return stages

    @property
    def trust(self) -> float:
        """See `Budget`."""
        return self._habits.trust

    def choose(self, scores: Sequence[float], alone: Sequence[float] | None = None, *, tuition: bool = True) -> int:
        """See `Budget`; without `tuition` no more than is worth it now."""
        self.settle()
        worth = self._worth(scores, self._use_of_news)
        best = _best(worth)
        if alone is None:
            self._note_search(best)
        elif alone:
            self._note_search(_best(self._worth(alone, self._use_of_news)))
        size = self._with_tuition(best, worth) if tuition else best
        self._note_promise(scores[1:size], None if alone is None else alone[1:size])
        return size

    def _note_search(self, best: int) -> None:
        """Take in how many of the memory's candidates would be fed if there were no others.

        What another text makes expect says nothing about what there is to be found, and what it teaches.
        """
        self._idle = self._habits.idle = self._idle + 1 if best == 1 else 0
        self._habits.usual += (best - self._habits.usual) / _STEPS

    def _with_tuition(self, best: int, worth: Sequence[float]) -> int:
        """The size that is best now, or a larger one for what it teaches: the usual one, if that costs little, or a few
        tokens once guesses have not been tried for long.
        """
        usual = min(int(self._habits.usual), len(worth))
        if usual > best and worth[usual - 1] > worth[best - 1] - TUITION:
            return usual
        if best == 1 and self._habits.since_guesses >= _TRIAL_AFTER:
            return min(_TRIAL_SIZE, len(worth))
        return best

    def _note_promise(self, scores: Sequence[float], alone: Sequence[float] | None) -> None:
        """Remember what the guesses to be fed are expected to bring, and whether half of it or more is the memory's."""
        promised = sum(scores)
        self._promised = promised / self._habits.trust
        self._of_memory = alone is None or 2.0 * sum(alone) >= promised

    def pays(self, scores: Sequence[float]) -> bool:
        """See `Budget`."""
        self.settle()
        table = self._cost.table
        if self._checks or sum(scores) <= self.rate * (table[2] - table[1]):
            return False  # a plain step is due, or they bring no more than the first of them costs
        return _best(self._worth([1.0, *scores], use_of_news=0.0)) > 1  # the memory learns little from another text

    def _worth(self, scores: Sequence[float], use_of_news: float) -> list[float]:
        """By size, from 1 on: what a step is expected to yield, less what its time would yield elsewhere."""
        rate, table, habits = self.rate, self._cost.table, self._habits
        toll, node_s = habits.toll, habits.node_s
        worth = [
            yielded + use_of_news * taught(size) - rate * (toll * table[size] + node_s * (size + _LEAST_NODES))
            for size, yielded in enumerate(accumulate(scores), start=1)
        ]
        worth[0] = 1.0 - rate * (table[1] + habits.plain_own_s)  # plain decoding soon skips the search
        return worth

    def fill_to(self, size: int) -> int:
        """See `Budget`: to the usual size, and as far as a node costs less than its news is worth."""
        self.settle()
        ends = [min(corner, self._most) for corner in self._cost.corners]  # the hull may go straight on beyond it
        costs, use = self._costs_of_nodes(ends), self._use_of_news
        worth = (min(end, most_worth(cost, use)) for end, cost in zip(ends, costs, strict=True))
        return max([size, int(self._habits.usual), *worth])

    def skip_drafting(self) -> bool:
        """See `Budget`: for longer and longer, if the search costs time and has found nothing worth feeding.

        And now and then, to see what a plain step takes: the more often, the less guesses gain.
        """
        if self._noted and self._skip > 1:  # the rest goes on, and behind a plain step nothing else is due
            self._skip -= 1
            return True
        self.settle()
        habits, plain_s = self._habits, self._cost.table[1]
        dear = habits.node_s * _LEAST_NODES > max(_CHEAP, _CHEAP_GAIN * habits.gain) * plain_s
        if self._skip == 0 and self._idle > _PATIENCE and dear:
            self._skip = 1 + min(_LONGEST_SKIP, 2 ** (self._idle - _PATIENCE - 1))
        self._skip = max(0, self._skip - 1)
        if not self._checks and self._since_plain >= min(_LONGEST_UNCHECKED, _CHECK_AFTER * (self.rate * plain_s) ** 2):
            self._checks = 1
        return self._skip > 0 or self._checks > 0

    def rest(self, steps: int) -> None:
        """Look for nothing in the next `steps` steps, `_LONGEST_SKIP` at most."""
        if steps:
            self._skip = max(self._skip, 1 + min(_LONGEST_SKIP, steps))

    def in_plain_steps(self, fed: int, seconds: float, forward_s: float) -> float:
        """How many plain steps could have been made while one took so long that fed so many tokens."""
        habits = self._habits
        plain_s = habits.plain.mean * self._cost.table[1] + habits.plain_own_s
        return (forward_s + self._own_s(fed, seconds - forward_s)) / plain_s

    def observe(self, fed: int, emitted: float, seconds: float, forward_s: float) -> None:
        """See `Budget`."""
        if fed == 1:
            self._since_plain = 0
            self._habits.since_guesses += 1
            if self._skip and not self._checks:
                self._noted.append((emitted, seconds, forward_s))
                if len(self._noted) == _NOTED:
                    self.settle()
                return
        self.settle()
        self._learn(fed, emitted, seconds, forward_s, looked=not (self._skip or self._checks))

    def settle(self) -> None:
        """See `Budget`."""
        if self._noted:
            noted, self._noted = self._noted, []
            for emitted, seconds, forward_s in noted:
                self._learn(1, emitted, seconds, forward_s, looked=False)

    def _learn(self, fed: int, emitted: float, seconds: float, forward_s: float, *, looked: bool) -> None:
        """Learn from a step, in which guesses were looked for or not."""
        habits, table = self._habits, self._cost.table
        expected, own_s = table[min(fed, len(table) - 1)], self._own_s(fed, seconds - forward_s)
        if looked:
            habits.node_s += (own_s / (fed + _LEAST_NODES) - habits.node_s) / _STEPS
        elif fed == 1:
            habits.plain_own_s += (own_s - habits.plain_own_s) / _STEPS
        self._tokens += emitted - self._tokens / _STEPS
        self._seconds += expected * (1.0 if fed == 1 else habits.toll) + own_s - self._seconds / _STEPS
        if fed == 1 or self._of_memory:
            habits.gain += (emitted - 1.0 - habits.gain) / _STEPS
        if fed == 1:
            self._observe_plain(forward_s / expected)
        else:
            self._observe_guesses(forward_s / expected, emitted - 1.0)
        self._cost.observe(fed, forward_s)

    def _own_s(self, fed: int, seconds: float) -> float:
        """Of what a step took beside its pass, what steps may take at all."""
        usual_s = self._habits.node_s * (fed + _LEAST_NODES)
        return min(seconds, _MOST_OWN * max(usual_s, _LEAST_OWN_S))

    def _observe_plain(self, ratio: float) -> None:
        """A pass over one token took so many times what was expected."""
        self._habits.plain.add(ratio)
        again = abs(ratio - 1.0) > _SURPRISE and self._checks < _MOST_CHECKS
        self._checks = self._checks + 1 if self._checks and again else 0

    def _observe_guesses(self, ratio: float, brought: float) -> None:
        """A pass over guesses took so many times what was expected, and brought so many tokens."""
        self._habits.guessing.add(ratio)
        if self._of_memory:
            self._habits.learn_yield(self._promised, brought)
        self._since_plain += 1
        if ratio > 1.0 - _SURPRISE:  # else the next trial comes at once
            self._habits.since_guesses = 0


def _best(worth: Sequence[float]) -> int:
    """The size that is worth most, from 1 on."""
    return worth.index(max(worth)) + 1
