"""Plain steps of a rest are noted, and learned later: what is learned is the same."""

from copy import deepcopy

import pytest

from lade.decoding.drafting.controller import STEPS, BatchBudget, Controller, ControllerState
from lade.testing import nearly_flat_cost
from lade.tuning.step_cost import StepCost


def test_a_rest_teaches_as_if_each_step_was_learned_at_once():
    cost, state = nearly_flat_cost(), ControllerState(spent=True, seconds=1e3)
    others, plain_s = (deepcopy(cost), deepcopy(state)), cost.table[1]
    for settles, (curve, kept) in ((False, (cost, state)), (True, others)):
        controller, noted = Controller(curve, kept), [0]
        for place in range(3 * STEPS):
            assert controller.skip_drafting()
            seconds = plain_s * (1.0 + 0.3 * (place % 7))
            controller.observe(1, 1, seconds + 1e-4, seconds)
            if settles:
                controller.settle()
            noted.append(len(controller._noted))
        controller.settle()
        assert max(noted) == (0 if settles else STEPS), "or else this shows nothing"
    assert others[0].to_json() == cost.to_json() and others[1] == state


def rest(budget: BatchBudget, steps: int) -> None:
    """Have so many plain steps of four seconds of a rest be observed."""
    for _ in range(steps):
        assert budget.skip_drafting()
        budget.observe_pass(1, 1.0, 4.0, 4.0, rows=1)


@pytest.mark.parametrize("settles", [True, False])
def test_what_is_settled_before_rows_change_is_learned_of_those_that_there_were(settles):
    """And otherwise it is not: the curve of fewer rows would learn what passes of more of them took."""
    fewer = StepCost.of({1: [1.0], 64: [99.0]})
    unmoved = fewer.to_json()
    budget = BatchBudget(StepCost.of({1: [4.0], 64: [396.0]}), ControllerState(spent=True, seconds=400.0))
    rest(budget, 2)
    if settles:
        budget.settle()
    budget.use(fewer)
    budget.settle()
    assert (fewer.to_json() == unmoved) is settles
