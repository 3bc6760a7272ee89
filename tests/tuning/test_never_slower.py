"""The controller by a simulated clock: whatever passes come to cost, however guesses disappoint, it loses little."""

from dataclasses import replace

import pytest
from effort import examples
from growing import begun
from simulated_clock import Machine, Text, controlled_seconds, curve, fixed_seconds, plain_seconds

from lade.decoding.drafting.controller import ControllerState

FLAT = curve((1, 1.0), (8, 1.15), (16, 1.4), (32, 2.0), (64, 3.4))
STEEP = curve((1, 1.0), (2, 2.0), (4, 2.3), (8, 2.6), (16, 4.0), (32, 7.0))
LINEAR = curve((1, 1.0), (64, 58.0))
CHANGE, SETTLED, TOKENS = 300, 500, 900
"""Places of a text: where the weather changes, where the controller has had 200 tokens to notice, and the end."""


def slower(cost, factor):
    return lambda size: factor * cost(size)


def after(change, before=FLAT):
    return lambda place: before if place < CHANGE else change


def drifting(place):
    share = min(1.0, place / CHANGE)
    return lambda size: (1 - share) * FLAT(size) + share * LINEAR(size)


MACHINES = {
    "flat": Machine(FLAT, lambda place: FLAT),
    "steep": Machine(STEEP, lambda place: STEEP),
    "measured flat, linear": Machine(FLAT, lambda place: LINEAR),
    "measured steep, flat": Machine(STEEP, lambda place: FLAT),
    "jumps to steep": Machine(FLAT, after(STEEP)),
    "jumps to linear, all slower": Machine(FLAT, after(slower(LINEAR, 3.0))),
    "jumps to faster": Machine(STEEP, after(slower(STEEP, 1 / 3), STEEP)),
    "jumps to slower": Machine(FLAT, after(slower(FLAT, 3.0))),
    "drifts to linear": Machine(FLAT, drifting),
    "spikes": Machine(STEEP, lambda place: STEEP, spike=(20.0, 0.05)),
    "noisy": Machine(FLAT, lambda place: STEEP, spike=(5.0, 0.1), jitter=0.3),
}
TEXTS = {
    "hopeless": Text((0.0, 0.1)),
    "fair": Text((0.3, 0.7)),
    "good": Text((0.6, 0.95)),
    "boastful": Text((0.4, 0.8), truth=0.4),
}


LUCKS = examples(40)
"""Seeds of hiccups, and of what comes true: 10, and 16 with `make test-slow`."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_never_slower_than_plain_decoding(machine, text):
    """Over all lucks 3.5 % at most, 3 % and two steps, where passes take what they took when they were measured.

    Elsewhere that has to be found out: 15 %, where a pass over 8 tokens takes 7 times what was measured.

    A single luck is bounded less tightly: one hiccup of 20 steps in a pass over guesses is 5 % of the 400 tokens.
    """
    settled, whole = [], []
    for luck in range(LUCKS):
        weather, guesses = replace(MACHINES[machine], luck=luck), replace(TEXTS[text], luck=luck)
        controller = begun(weather.cost())
        first = controlled_seconds(weather, guesses, controller, 0, SETTLED)
        rest = controlled_seconds(weather, guesses, controller, SETTLED, TOKENS)
        settled.append(rest / plain_seconds(weather, SETTLED, TOKENS))
        whole.append((first + rest) / plain_seconds(weather, 0, TOKENS))
    as_measured = machine in ("flat", "steep")
    assert sum(settled) / LUCKS < (1.02 if as_measured else 1.11)
    assert sum(whole) / LUCKS < (1.035 if as_measured else 1.15) and max(whole) < 1.4


@pytest.mark.parametrize("text", ["fair", "good"])
@pytest.mark.parametrize("machine", ["flat", "measured steep, flat", "jumps to faster", "jumps to slower"])
def test_it_is_near_the_best_size_there_is(machine, text):
    """Which nobody knows beforehand."""
    weather, guesses = MACHINES[machine], TEXTS[text]
    controller = begun(weather.cost())
    controlled_seconds(weather, guesses, controller, 0, SETTLED)
    sizes = [fixed_seconds(weather, guesses, size, SETTLED, TOKENS) for size in (2, 4, 8, 16, 32)]
    best = min(plain_seconds(weather, SETTLED, TOKENS), *sizes)
    taken = controlled_seconds(weather, guesses, controller, SETTLED, TOKENS)
    assert taken < (1.1 if machine == "flat" else 1.3) * best


@pytest.mark.parametrize("length", [20, 60])
@pytest.mark.parametrize("text", ["hopeless", "boastful"])
@pytest.mark.parametrize("name", ["steep", "flat"])
def test_short_calls_one_after_the_other_are_not_slower_either(name, text, length):
    """And a text that can be guessed is noticed nevertheless."""
    state, machine, guesses = ControllerState(), MACHINES[name], TEXTS[text]
    cost, starts = machine.cost(), range(0, TOKENS, length)
    taken = [controlled_seconds(machine, guesses, begun(cost, state), start, start + length) for start in starts]
    settled = CHANGE // length
    assert sum(taken[settled:]) < (1.065 if length == 20 else 1.03) * plain_seconds(machine, starts[settled], TOKENS)
    assert sum(taken) < plain_seconds(machine, 0, TOKENS) / 0.93
    good = controlled_seconds(machine, TEXTS["good"], begun(cost, state), CHANGE, TOKENS)
    assert good < 0.95 * plain_seconds(machine, CHANGE, TOKENS)


def test_what_was_measured_wrongly_is_noticed_in_short_texts_too():
    machine, guesses, state = MACHINES["measured steep, flat"], TEXTS["fair"], ControllerState()
    cost, starts = machine.cost(), range(0, 2 * TOKENS, 60)
    taken = [controlled_seconds(machine, guesses, begun(cost, state), start, start + 60) for start in starts]
    assert sum(taken[15:]) < 0.85 * plain_seconds(machine, starts[15], 2 * TOKENS)
