"""A machine whose clock is simulated, and texts whose guesses come true with known probabilities.

What a pass takes is a function of its size and of the place in the text, so plain decoding and a controller meet the
same weather: hiccups, jumps and drifts lie at places of the text, not at passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from growing import grown, sized

from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.step_cost import KNOTS, StepCost

PLAIN_S = 0.010
OWN_S, LOOK_S, NODE_S = 1e-4, 1e-4, 1e-5
"""The library's own time: of any step, of looking for guesses, and of a node."""

Curve = Callable[[int], float]
"""Seconds of a pass by its size."""


def curve(*corners: tuple[int, float]) -> Curve:
    """Straight between corners, each a size and how many plain passes it takes."""

    def seconds(size: int) -> float:
        for (left, low), (right, high) in pairwise(corners):
            if size <= right:
                return PLAIN_S * (low + (high - low) * (size - left) / (right - left))
        (left, low), (right, high) = corners[-2:]
        return PLAIN_S * (high + (high - low) * (size - right) / (right - left))

    return seconds


@dataclass(frozen=True)
class Machine:
    """What passes take.

    Attributes:
        measured: what they took when they were measured.
        now: what they take at a place of the text.
        spike: how many times as long one takes now and then, and how often.
        jitter: spread of what they take otherwise, as of a log-normal distribution.
        luck: seed of hiccups and jitter.
    """

    measured: Curve
    now: Callable[[int], Curve]
    spike: tuple[float, float] = (1.0, 0.0)
    jitter: float = 0.03
    luck: int = 0

    def seconds(self, place: int, size: int) -> float:
        """Of the pass that begins there."""
        hiccup, noise = _drawn(self.luck, place)
        factor, share = self.spike
        return self.now(place)(size) * (factor if hiccup < share else 1.0) * math.exp(self.jitter * noise)

    def cost(self) -> StepCost:
        """What a controller begins with."""
        return StepCost.of({size: [self.measured(size)] * 9 for size in KNOTS})


@dataclass(frozen=True)
class Text:
    """Guesses: the likeliest continuation, and at each of its places a rival.

    Attributes:
        likely: how likely a place of the continuation comes true, given those before; drawn for each step between
            these bounds.
        truth: what this is in truth, of what scores say.
        known: how many places ahead are guessed.
        luck: seed of what comes true.
    """

    likely: tuple[float, float]
    truth: float = 1.0
    known: int = 24
    luck: int = 0

    def step(self, place: int) -> tuple[list[float], Callable[[int], list[int]]]:
        """Scores of the candidates, and which of so many of them are accepted, at a place."""
        likely, fortune, rivals = _guessed(self.luck, place)
        share = round(self.likely[0] + (self.likely[1] - self.likely[0]) * likely, 2)
        nodes = _nodes(share, self.known)
        true_share, run = share * self.truth, 0
        while run < self.known and fortune < true_share ** (run + 1):
            run += 1
        rival = rivals < self.truth / 3

        def accepted(size: int) -> list[int]:
            fed = list(enumerate(nodes[: size - 1], start=1))
            chain = [number for number, (_, depth, main) in fed if main and depth <= run]
            met = [number for number, (_, depth, main) in fed if depth == run + 1 and not main]
            return [*chain, *met] if len(chain) == run and rival else chain

        return [1.0, *(score for score, _, _ in nodes)], accepted


@cache
def _nodes(share: float, known: int) -> list[tuple[float, int, bool]]:
    """Score and depth of each candidate, and whether it belongs to the continuation; the best first."""
    depths = range(1, known + 1)
    nodes = [(share**depth, depth, True) for depth in depths]
    nodes += [(share ** (depth - 1) * (1 - share) / 3, depth, False) for depth in depths]
    return sorted(nodes, reverse=True)


@cache
def _drawn(luck: int, place: int) -> tuple[float, float]:
    """Whether there is a hiccup at a place, by a number from 0 to 1; and a number from a normal distribution."""
    rng = random.Random(f"machine {luck} {place}" if luck else f"machine {place}")
    return rng.random(), rng.gauss()


@cache
def _guessed(luck: int, place: int) -> tuple[float, float, float]:
    """How likely guesses are at a place, whether they come true, and whether a rival does, each from 0 to 1."""
    rng = random.Random(f"text {luck} {place}" if luck else f"text {place}")
    return rng.random(), rng.random(), rng.random()


def plain_seconds(machine: Machine, start: int, end: int) -> float:
    """What plain decoding takes from one place of a text to another."""
    return sum(machine.seconds(place, 1) + OWN_S for place in range(start, end))


def fixed_seconds(machine: Machine, text: Text, size: int, start: int, end: int) -> float:
    """What feeding the same number of tokens in each step takes."""
    place, seconds = start, 0.0
    while place < end:
        seconds += machine.seconds(place, size) + OWN_S + LOOK_S + NODE_S * size
        place += 1 + len(text.step(place)[1](size))
    return seconds


def controlled_seconds(machine: Machine, text: Text, controller: Controller, start: int, end: int) -> float:
    """What sizes that a controller chooses take."""
    place, seconds = start, 0.0
    while place < end:
        size, emitted, own_s = 1, 1, OWN_S
        if not controller.skip_drafting():
            scores, accepted_of = text.step(place)
            candidates = grown(scores, controller.stages())
            size = sized(controller, candidates)
            accepted, own_s = accepted_of(size), OWN_S + LOOK_S + NODE_S * size
            controller.learn(candidates[:size], accepted)
            emitted = 1 + len(accepted)
        forward_s = machine.seconds(place, size)
        controller.observe(size, emitted, forward_s + own_s, forward_s)
        place, seconds = place + emitted, seconds + forward_s + own_s
    return seconds
