"""Other programs take most of each processor: a pass now and then waits for many times what it takes.

The runner's clock is made up. Its thread runs for what passes take by their size; by the wall it waits, too.
"""

import random

import pytest
from growing import begun, written
from made_clock import MadeClock

from lade import LookaheadConfig, Stats
from lade.decoding.drafting.adaptive import drafter_for
from lade.decoding.drafting.controller import ControllerState
from lade.decoding.drafting.step_cost import StepCost
from lade_lab.fakes import FunctionRunner

TURN_S, OTHERS_S = 3e-3, 15e-3
"""How long a thread may run until it is the others' turn, and how long they then run, on average."""
PASSES_MS = {1: 2.4, 2: 2.75, 4: 3.05, 8: 3.5, 16: 3.95, 32: 4.8, 64: 7.0, 128: 11.0}
OWN_S = 0.2e-3
VOCABULARY, TEXTS, LENGTH = 40, 8, 140


def measured():
    return StepCost.of({size: [1e-3 * milliseconds] * 9 for size, milliseconds in PASSES_MS.items()})


def follow(text):
    """A third of all tokens are what mostly follows the one before: guesses come true, but too seldom to pay."""
    luck = random.Random(f"{text[-4:]}")
    return (7 * text[-1] + 3) % VOCABULARY if luck.random() < 0.35 else luck.randrange(VOCABULARY)


class BusyRunner(FunctionRunner):
    def __init__(self):
        super().__init__(follow, VOCABULARY)
        self.clock, self._cost, self._luck = MadeClock(), measured(), random.Random(0)

    def forward(self, trees, rows, cache):
        start = self.clock.start()
        self._run(self._cost.seconds(max(map(len, trees))))
        self.pass_time = self.clock.since(start)
        self._run(OWN_S)
        return super().forward(trees, rows, cache)

    def _run(self, seconds):
        others_turn = self._luck.random() < seconds / TURN_S
        self.clock.run(seconds, waiting_s=self._luck.expovariate(1 / OTHERS_S) if others_turn else 0.0)


def test_waiting_for_a_processor_does_not_make_guesses_look_cheap():
    """The waiting is left out of what is compared, since it comes by accident: in the long run all steps share it."""
    runner, cost, habits, stats = BusyRunner(), measured(), ControllerState(), Stats()
    for number in range(TEXTS):
        budget = begun(cost, habits)
        drafter = drafter_for(LookaheadConfig(), budget=budget)
        written([number, number + 1, number + 2], LENGTH, drafter, runner, budget, stats)
    plain_s = (stats.new_tokens - TEXTS) * (1e-3 * PASSES_MS[1] + OWN_S)
    assert runner.clock.running_s < 1.03 * plain_s
    assert stats.decode_s > 3 * plain_s, "what is reported has the waiting in it"


class Told:
    """A budget that remembers what it is told of steps."""

    def __init__(self):
        self.seconds = []

    def decide(self, candidates, emitted):
        pass

    def observe(self, fed, emitted, seconds, forward_s, *, rows, prepared):
        self.seconds.append((seconds, forward_s))


def test_passes_and_the_librarys_own_time_are_told_without_the_waiting():
    told = Told()
    written([1, 2, 3], LENGTH, drafter_for(LookaheadConfig(0, 2, 0)), BusyRunner(), told)  # feeds roots alone
    plain_s = 1e-3 * PASSES_MS[1]
    assert told.seconds == [(pytest.approx(plain_s + OWN_S), pytest.approx(plain_s))] * (LENGTH - 4)
