"""Trees of several processes are larger than those whose passes a curve knows: it goes straight on."""

import pytest

from lade.decoding.drafting.controller import LARGEST, LARGEST_SHARED, BatchBudget, Controller, most_fed
from lade.decoding.drafting.longer_cost import LongerCost
from lade.tuning.step_cost import StepCost

FLAT, CORNER = {1: [1.0], 256: [1.001]}, {1: [1.0], 64: [1.001], 256: [100.0]}


@pytest.mark.parametrize("heights", [FLAT, CORNER])
def test_it_is_the_curve_and_then_as_steep_as_that_ended(heights):
    curve = StepCost.of(heights)
    longer, known = LongerCost(curve, 512), len(curve.table)
    assert longer.table[:known] == curve.table and longer.marginals[:known] == curve.marginals
    assert len(longer.table) == len(longer.marginals) == 513
    assert longer.table[known:] == pytest.approx([curve.seconds(size) for size in range(known, 513)])
    assert longer.corners == [*curve.corners[:-1], 512]


def test_it_follows_what_the_curve_learns():
    curve = StepCost.of(FLAT)
    longer = LongerCost(curve, 512)
    before = longer.table
    for _ in range(20):
        longer.observe(300, 2.0)
    assert longer.table[512] > 1.2 * before[512] and longer.table[:257] == curve.table


def test_the_limit_is_that_of_one_process_times_their_number():
    assert [most_fed(processes) for processes in (1, 2, 3, 4, 8)] == [LARGEST, 256, 384, LARGEST_SHARED, LARGEST_SHARED]


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_a_controller_grows_and_fills_up_to_its_limit(processes):
    most = most_fed(processes)
    for budget in (Controller(StepCost.of(FLAT), most=most), BatchBudget(StepCost.of(FLAT), most=most)):
        assert budget.most == budget.fill_to(1) == most
    controller, scores = Controller(StepCost.of(FLAT), most=most), [1.0] * most
    for _ in range(3):
        ends = [size for size, _ in controller.thresholds()]
        assert ends == sorted(ends) and ends[-1] <= most
        size = controller.choose(scores[: ends[-1]])
        controller.observe(size, size, 1.0, 1.0)
    assert size == most
