"""Trees of several processes are larger than those whose passes a curve knows: it goes straight on."""

import pytest
from growing import sized

from lade.decoding.drafting.controller import Controller, max_tree_size
from lade.decoding.drafting.step_cost import KNOTS, StepCost

FLAT, CORNER = {1: [1.0], 256: [1.001]}, {1: [1.0], 64: [1.001], 256: [100.0]}


@pytest.mark.parametrize("heights", [FLAT, CORNER])
def test_beyond_its_last_knot_a_curve_is_as_steep_as_it_ended(heights):
    curve, known = StepCost.of(heights), KNOTS[-1]
    slope = curve.marginals[known]
    assert curve.table[known:] == pytest.approx([curve.table[known] + slope * more for more in range(513 - known)])
    assert set(curve.marginals[known:]) == {slope} and len(curve.marginals) == 513 and curve.corners[-1] == 512


def test_passes_beyond_the_last_knot_move_the_curve():
    curve = StepCost.of(FLAT)
    before = curve.table[512]
    for _ in range(10):
        curve.observe(1, 1.0)
        curve.observe(300, 2.0)
    assert curve.table[512] > 1.2 * before


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_a_controller_grows_and_fills_up_to_its_limit(processes):
    most = max_tree_size(processes)
    controller, scores = Controller(StepCost.of(FLAT), most=most), [1.0] * most
    assert controller.most == controller.fill_size(1) == most
    for _ in range(3):
        ends = [size for size, _ in controller.stages()]
        assert ends == sorted(ends) and ends[-1] <= most
        size = sized(controller, scores[: ends[-1]])
        controller.observe(size, size, 1.0, 1.0)
    assert size == most
