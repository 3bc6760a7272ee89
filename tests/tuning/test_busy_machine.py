"""Other programs take most of each processor: a pass waits now and then for many times what it takes.

The runner's clock is made up. The thread's time is what passes take by their size; the wall's has the waiting, too.
"""

import random

import pytest
from made_clock import MadeClock

from lade import LookaheadConfig
from lade.clock import Duration
from lade.decoding.drafting.factory import drafter_for
from lade.decoding.drafting.habits import Habits
from lade.decoding.loop import DecodeLoop
from lade.decoding.row import Row
from lade.decoding.verify import Greedy
from lade.testing import FunctionRunner, ListCache
from lade.tuning.step_cost import StepCost

VOCABULARY, LENGTH, TEXTS = 40, 140, 8
TURN_S, WAIT_S = 3e-3, 15e-3
"""How long a thread runs before others have their turn, and how long they have it, on average."""
PASSES_MS = {1: 2.4, 2: 2.75, 4: 3.05, 8: 3.5, 16: 3.95, 32: 4.8, 64: 7.0, 128: 11.0}
SHARE=0.7
OWN_S = 0.2e-3


def follow(text) -> int:
    """A third of all tokens are what mostly follows the one before; the others hang on four."""
    luck = random.Random(f"{text[-4:]}")
    return (7 * text[-1] + 3) % VOCABULARY if luck.random() < SHARE else luck.randrange(VOCABULARY)


class BusyRunner(FunctionRunner):
    clock: MadeClock

    def __init__(self, cost: StepCost, rng: random.Random) -> None:
        super().__init__(follow, VOCABULARY)
        self.clock, self.cost, self._rng = MadeClock(), cost, rng

    def forward(self, trees, rows, cache):
        start, seconds = self.clock.start(), self.cost.seconds(max(map(len, trees)))
        self._run(seconds)
        self.pass_time = self.clock.since(start)
        self._run(OWN_S)
        return super().forward(trees, rows, cache)

    def _run(self, seconds: float) -> None:
        others = self._rng.random() < seconds / TURN_S
        self.clock.run(seconds, waiting_s=self._rng.expovariate(1 / WAIT_S) if others else 0.0)


def test_sizes():
    rng = random.Random(0)
    true = StepCost.of({size: [1e-3 * ms] * 9 for size, ms in PASSES_MS.items()})
    learned = StepCost.of({size: [1e-3 * ms] * 9 for size, ms in PASSES_MS.items()})
    habits = Habits()
    run=plain=0
    for n in range(TEXTS):
        prompt=[n,n+1,n+2]
        runner = BusyRunner(true, rng)
        row = Row(prompt, drafter_for(LookaheadConfig(), cost=learned, habits=habits), Greedy(), lambda tokens: len(tokens) >= LENGTH)
        for _ in DecodeLoop([row], runner, ListCache()).run():
            pass
        run += runner.clock.running_s
        plain += (LENGTH-4)*(true.seconds(1)+OWN_S)
        print(n, runner.passes, LENGTH-4, runner.clock.wall_s/runner.clock.running_s, run/plain, learned.seconds(16)/learned.seconds(1))
    assert 0
