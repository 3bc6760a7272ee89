"""The controller by a simulated clock: whatever passes come to cost, however guesses disappoint, it loses little."""

import pytest
from simulated_clock import Machine, Text, controlled_seconds, curve, fixed_seconds, plain_seconds

from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.habits import Habits
from lade.testing import nearly_flat_cost

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


def stalling(place):
    """Every fourth pass over guesses takes six times as long, which says nothing about most of them."""
    return slower(FLAT, 6.0) if place % 4 == 0 else FLAT


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
    "wide passes stall": Machine(FLAT, lambda place: lambda size: (FLAT if size == 1 else stalling(place))(size)),
}
TEXTS = {
    "hopeless": Text((0.0, 0.1)),
    "fair": Text((0.3, 0.7)),
    "good": Text((0.6, 0.95)),
    "boastful": Text((0.4, 0.8), truth=0.4),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_never_slower_than_plain_decoding(machine, text):
    """By 3 % at most, 200 tokens after whatever happened; and what it takes to notice is soon won back."""
    weather, guesses = MACHINES[machine], TEXTS[text]
    controller = Controller(weather.cost())
    first = controlled_seconds(weather, guesses, controller, 0, SETTLED)
    rest = controlled_seconds(weather, guesses, controller, SETTLED, TOKENS)
    assert rest < 1.03 * plain_seconds(weather, SETTLED, TOKENS)
    assert first + rest < 1.06 * plain_seconds(weather, 0, TOKENS)


@pytest.mark.parametrize("text", ["fair", "good"])
@pytest.mark.parametrize("machine", ["flat", "measured steep, flat", "jumps to faster", "jumps to slower"])
def test_it_is_near_the_best_size_there_is(machine, text):
    """Which nobody knows beforehand."""
    weather, guesses = MACHINES[machine], TEXTS[text]
    controller = Controller(weather.cost())
    controlled_seconds(weather, guesses, controller, 0, SETTLED)
    sizes = [fixed_seconds(weather, guesses, size, SETTLED, TOKENS) for size in (2, 4, 8, 16, 32)]
    best = min(plain_seconds(weather, SETTLED, TOKENS), *sizes)
    assert controlled_seconds(weather, guesses, controller, SETTLED, TOKENS) < 1.1 * best


@pytest.mark.parametrize("text", ["hopeless", "boastful"])
def test_with_habits_trying_anew_costs_nothing(text):
    """Short texts, one after the other; and one that can be guessed is noticed nevertheless."""
    machine, guesses, habits = MACHINES["steep"], TEXTS[text], Habits()
    cost, starts = machine.cost(), range(0, TOKENS, 60)
    taken = [controlled_seconds(machine, guesses, Controller(cost, habits), start, start + 60) for start in starts]
    assert sum(taken[5:]) < 1.02 * plain_seconds(machine, starts[5], TOKENS)
    good = controlled_seconds(machine, TEXTS["good"], Controller(cost, habits), CHANGE, TOKENS)
    assert good < 0.8 * plain_seconds(machine, CHANGE, TOKENS)


def test_what_was_measured_wrongly_is_noticed_in_short_texts_too():
    machine, guesses, habits = MACHINES["measured steep, flat"], TEXTS["fair"], Habits()
    cost, starts = machine.cost(), range(0, 2 * TOKENS, 60)
    taken = [controlled_seconds(machine, guesses, Controller(cost, habits), start, start + 60) for start in starts]
    assert sum(taken[15:]) < 0.85 * plain_seconds(machine, starts[15], 2 * TOKENS)


def test_a_step_that_compiled_something_is_not_held_against_guesses():
    """The first step on a machine takes seconds of the library's own; texts to come begin with what it taught."""
    habits, cost, scores = Habits(), nearly_flat_cost(), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    controller = Controller(cost, habits)
    size = controller.choose(scores)
    controller.observe(size, 3.0, 8.0 + cost.table[size], cost.table[size])
    assert size > 1 and controller.choose(scores) == size
    assert Controller(nearly_flat_cost(), habits).choose(scores) > 1
