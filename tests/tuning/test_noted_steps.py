"""Plain steps of a rest are learned later. Nobody can tell: not by what is decided, nor by what has been learned."""

import random
from copy import deepcopy

import pytest
from growing import grown, weighed
from simulated_clock import LOOK_S, NODE_S, OWN_S, Text
from test_never_slower import MACHINES

from lade.decoding.drafting import controller as controller_module
from lade.decoding.drafting.batch_budget import BatchBudget
from lade.decoding.drafting.controller import Controller
from lade.decoding.drafting.habits import Habits
from lade.tuning.batch_cost import BatchCost
from lade.tuning.step_cost import StepCost

TEXTS = {"hopeless": Text((0.0, 0.1)), "now and then": Text((0.0, 0.4)), "fair": Text((0.3, 0.7))}
STEPS = 700


def chain_at(place: int) -> list[float]:
    """Scores of a guess from another text, which is there in every fifth step."""
    share = random.Random(place).choice([0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.97])
    return [share**number for number in range(1, 25)] if place % 5 == 0 else []


def decided(machine_name: str, text: Text, cost: StepCost, habits: Habits) -> list[object]:
    """What a controller decides at each step of a text, and then of another one with what the first has taught."""
    machine, found = MACHINES[machine_name], list[object]()
    for start in (0, STEPS):
        controller, luck = Controller(cost, habits), random.Random(start)
        for place in range(start, start + STEPS):
            own_s, size, emitted = OWN_S, 1, 1
            resting, chain = controller.skip_drafting(), chain_at(place)
            if place % 37 == 0:
                size = 3  # guesses of unknown worth
            elif chain and controller.pays(chain):
                size = controller.choose([1.0, *chain], [])
                emitted = size if luck.random() < 0.5 else 1
                found.append(controller.fill_to(size))
            elif not resting:
                scores, yielded = text.step(place)
                stages = controller.thresholds()
                size = controller.choose(weighed(grown(scores, stages), controller.trust))
                emitted, own_s = yielded(size), OWN_S + LOOK_S + NODE_S * size
                found.append(stages)
            forward_s = machine.seconds(place, size)
            controller.observe(size, emitted, forward_s + own_s, forward_s)
            found.append((resting, size))
            if luck.random() < 0.02:
                found.append(controller.rate)
        controller.settle()
    return found


@pytest.mark.one_in(5)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_decides_and_learns_as_if_each_step_was_learned_at_once(machine, text, monkeypatch):
    cost, habits = MACHINES[machine].cost(), Habits()
    at_once = deepcopy(cost), deepcopy(habits)
    later = decided(machine, TEXTS[text], cost, habits)
    monkeypatch.setattr(controller_module, "_NOTED", 1)
    assert decided(machine, TEXTS[text], *at_once) == later
    assert at_once[0].to_json() == cost.to_json() and at_once[1] == habits


def test_steps_of_a_rest_are_noted_at_all():
    """Or else this file shows nothing; and no more than so many are."""
    machine, noted = MACHINES["steep"], [0]
    controller = Controller(machine.cost())
    for place in range(STEPS):
        if not controller.skip_drafting():
            controller.choose([1.0, 0.01])
        forward_s = machine.seconds(place, 1)
        controller.observe(1, 1, forward_s + 5 * OWN_S, forward_s)
        noted.append(len(controller._noted))
    assert max(noted) == controller_module._NOTED - 1


def rest(budget: BatchBudget, steps: int) -> None:
    """Have it rest, and so many plain steps of four seconds be observed meanwhile."""
    while not budget.skip_drafting():
        budget.decide([[1.0, 0.01]])
        budget.observe_pass(1, 1.0, 6.0, 4.0, rows=1)
    for _ in range(steps):
        assert budget.skip_drafting()
        budget.observe_pass(1, 1.0, 4.0, 4.0, rows=1)


@pytest.mark.parametrize("settles", [True, False])
def test_what_is_settled_before_rows_change_is_learned_of_those_that_there_were(settles):
    """And otherwise it is not: the curve of fewer rows would learn what passes of more of them took."""
    curves: dict[int, StepCost] = {}

    def cost_of(rows: int) -> StepCost:
        curves[rows] = StepCost.of({1: [1.0 * rows], 64: [99.0 * rows]})
        return curves[rows]

    cost = BatchCost(cost_of, 4)
    budget = BatchBudget(cost)
    rest(budget, 2)
    if settles:
        budget.settle()
    cost.resize(1)
    unmoved = curves[1].to_json()
    budget.settle()
    assert (curves[1].to_json() == unmoved) is settles
