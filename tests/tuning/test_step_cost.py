"""The latency curve: medians of paces and of ratios of consecutive passes."""

import json
import math
import random
from itertools import pairwise

import pytest
from growing import lower_hull
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting.controller import LARGEST_SHARED
from lade.decoding.drafting.step_cost import KNOTS, StepCost

TIMES = st.floats(1e-5, 10.0)
CURVES = st.lists(TIMES, min_size=len(KNOTS), max_size=len(KNOTS))
FLAT = {1: [1.0], 256: [1.001]}
OBSERVATIONS = st.lists(st.tuples(st.integers(1, 400), st.floats(1e-7, 1e3)), max_size=80)


def flat_then_steep(size: int) -> float:
    """A pass that is free up to 16 tokens, and compute-bound then."""
    return 1e-3 * max(10.0, 10.0 * size / 16)


def measured(cost=flat_then_steep, sizes=KNOTS, passes=9) -> StepCost:
    return StepCost.of({size: [cost(size)] * passes for size in sizes})


def watched(cost, observations):
    for size, seconds in observations:
        cost.observe(size, seconds)
    cost.refresh()
    return cost


@given(CURVES, OBSERVATIONS)
def test_more_tokens_never_cost_less_and_the_hull_is_convex_and_below(curve, observations):
    cost = watched(StepCost(curve), observations)
    assert len(cost.table) == len(cost.marginals) == LARGEST_SHARED + 1
    assert all(0 < a <= b < math.inf for a, b in zip(cost.table, cost.table[1:], strict=False))
    assert all(0 <= a <= b < math.inf for a, b in zip(cost.marginals, cost.marginals[1:], strict=False))
    hull = lower_hull(cost)
    assert all(below <= seconds * (1 + 1e-9) for below, seconds in zip(hull, cost.table, strict=True))
    assert (cost.corners[0], cost.corners[-1]) == (1, LARGEST_SHARED)
    assert cost.seconds(LARGEST_SHARED + 100) == pytest.approx(cost.table[-1] + 100 * cost.marginals[-1])


@given(CURVES, OBSERVATIONS)
def test_json_brings_back_the_same_curve(curve, observations):
    cost = watched(StepCost(curve, measured_at=12.5), observations)
    again = StepCost.from_json(json.loads(json.dumps(cost.to_json())))
    assert again.table == pytest.approx(cost.table) and again.measured_at == 12.5


@given(st.integers(1, 400), st.floats(5.0, 1e6))
def test_one_pass_that_took_ages_moves_nothing(size, factor):
    cost = measured()
    for number in range(40):
        cost.observe((1, 8, 32)[number % 3], flat_then_steep((1, 8, 32)[number % 3]))
    cost.refresh()
    before = list(cost.table)
    watched(cost, [(size, factor * cost.seconds(size)), (1, flat_then_steep(1))])
    assert cost.change_since(before) < 0.01


@pytest.mark.parametrize("every", [10, 20])
def test_passes_that_take_ages_now_and_then_do_not_add_up(every):
    """A burst of another process, or garbage collection."""
    cost, before = measured(), list(measured().table)
    luck, disturbed = random.Random(1), 0
    for _ in range(2000):
        size = luck.choice((1, 8, 20, 64))
        cost.observe(size, flat_then_steep(size) * (100.0 if luck.random() < 1 / every else 1.0))
        disturbed += cost.change_since(before) > 0.05
    assert disturbed < 60


def test_a_pass_that_was_prepared_is_no_evidence():
    cost, other = measured(), measured()
    luck = random.Random(2)
    for _ in range(300):
        size, noise = luck.choice((1, 8, 20, 64)), luck.uniform(1.0, 1.2)
        if luck.random() < 0.7:
            cost.observe(size, 50.0 * flat_then_steep(size), prepared=True)
            other.observe(size, 1e-9, prepared=True)
        for each in (cost, other):
            each.observe(size, noise * flat_then_steep(size))
        assert cost.table == other.table and cost.wants_baseline == other.wants_baseline


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_sizes_that_are_not_visited_follow_when_everything_gets_slower_or_faster(factor):
    cost = measured()
    for i in range(20):
        size = (1, 7, 16, 40)[i % 4]
        cost.observe(size, factor * flat_then_steep(size))
    cost.refresh()
    for size in (1, 7, 12, 16, 40, 128, 256):
        assert cost.seconds(size) == pytest.approx(factor * flat_then_steep(size), rel=0.05)


def test_passes_show_a_shape_that_the_measurement_had_not_also_beyond_the_sizes_visited():
    cost = measured(lambda size: 10e-3)
    for i in range(200):
        size = (1, 5, 16, 32, 60, 128)[i % 6]
        cost.observe(size, flat_then_steep(size))
    cost.refresh()
    for size in (1, 5, 16, 32, 60, 128):
        assert cost.seconds(size) == pytest.approx(flat_then_steep(size), rel=0.1)
    cost = watched(measured(lambda size: 10e-3), [(1, 10e-3), (16, 30e-3)] * 9)
    assert cost.seconds(1) == pytest.approx(10e-3) and cost.seconds(16) == pytest.approx(30e-3)
    assert cost.seconds(64) == pytest.approx(30e-3) and 10e-3 < cost.seconds(4) < 30e-3


@pytest.mark.parametrize("drafts", [0.05, 0.3, 0.9])
def test_a_machine_whose_pace_goes_up_and_down_leaves_the_shape_as_it_was(drafts):
    """200 times: what is not visited keeps its distance, or trees of any size would come to seem free, or too dear."""
    luck, cost = random.Random(1), measured(lambda size: 4e-3 + 1e-4 * size)
    before = list(cost.table)
    for number in range(12_000):
        size = luck.choice((4, 8)) if luck.random() < drafts else 1
        pace = 1.0 if number // 60 % 2 else 1.6
        hiccup = luck.choice((0.0,) * 9 + (1.5,)) + abs(luck.gauss(0.0, 0.1))
        cost.observe(size, before[size] * pace * (1.0 + hiccup))
    cost.refresh()
    for size in (2, 4, 8, 16, 64, 256):
        assert cost.table[size] / cost.table[1] == pytest.approx(before[size] / before[1], rel=0.15)


@pytest.mark.parametrize(("sizes", "second"), [((), 16), (tuple(KNOTS), 128)], ids=["", "captured"])
def test_a_baseline_is_due_after_passes_over_several_tokens_and_seldom_where_they_are_as_expected(sizes, second):
    cost, due = measured(), []
    cost.pad_to(sizes)
    for number in range(2000):
        size = 1 if cost.wants_baseline else 16
        due += [number] * (size == 1)
        cost.observe(size, flat_then_steep(size))
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert due[0] == 8 and gaps == sorted(gaps) and gaps[0] == second + 1 and 100 < gaps[-1] < 140


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_machine_that_changed_is_compared_again_soon(factor):
    """Only passes over several tokens change: what they cost beside one token is found out within some tens of them."""
    cost = measured()
    for _ in range(600):
        size = 1 if cost.wants_baseline else 32
        cost.observe(size, flat_then_steep(size))
    for _ in range(100):
        size = 1 if cost.wants_baseline else 32
        cost.observe(size, flat_then_steep(size) * (factor if size > 1 else 1.0))
    cost.refresh()
    assert cost.seconds(32) / cost.seconds(1) == pytest.approx(max(1.0, 2.0 * factor), rel=0.15)


def test_what_is_only_observed_costs_nothing_before_it_was():
    cost = StepCost.unmeasured(8.0)
    assert cost.seconds(1) < 1e-6
    watched(cost, [(8, 16e-3)])
    assert cost.seconds(8) == pytest.approx(16e-3) and cost.seconds(1) == pytest.approx(9e-3)


def test_between_measured_sizes_the_curve_is_straight_beyond_it_goes_on_and_of_many_passes_a_fast_one_counts():
    cost = StepCost.of({1: [1.0], 16: [1.0, 9.0], 32: [2.0]})
    assert [cost.seconds(size) for size in (1, 5, 16, 24, 32)] == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0])
    assert cost.seconds(64) == pytest.approx(4.0)
    assert cost.seconds(320) == pytest.approx(20.0)
    assert [cost.marginals[size] for size in (1, 15, 16, 31, 32, 256)] == pytest.approx([0, 0] + [1 / 16] * 4)
    assert cost.corners[:2] == [1, 16]
    slow_machine = [3.0, 1.1, 1.0, 50.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert StepCost.of({1: slow_machine}).seconds(1) == 1.1
    assert StepCost.of({1: [7.0, 2.0]}).seconds(1) == 2.0
    cost = StepCost.of({1: [1.0], 4: [3.0], 8: [2.0]})
    assert cost.seconds(4) == cost.seconds(8)
    assert 2.0 < cost.seconds(8) < 3.0
    for size in (0, -3):
        with pytest.raises(ValueError, match=rf"size={size} is not valid"):
            measured().seconds(size)


@pytest.mark.parametrize("heights", [FLAT, {1: [1.0], 64: [1.001], 256: [100.0]}])
def test_beyond_its_last_knot_a_curve_is_as_steep_as_it_ended(heights):
    curve, known = StepCost.of(heights), KNOTS[-1]
    slope = curve.marginals[known]
    assert curve.table[known:] == pytest.approx([curve.table[known] + slope * more for more in range(513 - known)])
    assert set(curve.marginals[known:]) == {slope} and len(curve.marginals) == 513 and curve.corners[-1] == 512


def test_passes_beyond_the_last_knot_move_the_curve():
    curve = StepCost.of(FLAT)
    before = curve.table[512]
    watched(curve, [(1, 1.0), (300, 2.0)] * 10)
    assert curve.table[512] > 1.2 * before


def test_reading_is_refreshed_by_the_time_that_passes_took():
    cost = measured(lambda size: 1e-3)
    before = cost.table
    for _ in range(40):
        cost.observe(4, 1.1e-3)
    assert cost.table is before
    for _ in range(10):
        cost.observe(4, 1.1e-3)
    assert cost.table is not before and cost.table[4] > before[4]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_clock_that_did_not_move_teaches_nothing(seconds):
    cost = measured()
    before = cost.to_json()
    cost.observe(4, seconds)
    assert cost.to_json() == before


def test_a_clock_that_went_mad_does_not_count_and_one_that_crawls_leaves_a_curve_that_can_be_saved():
    cost = measured()
    before = cost.table
    watched(cost, [(4, 1e300), (4, 1e-300), (500, math.inf), *[(4, 10e-3)] * 3])
    assert cost.change_since(before) < 0.1
    cost = watched(measured(lambda size: 1e-8), [(size, 1e-15) for size in KNOTS] * 300)
    assert StepCost.from_json(cost.to_json()).table == pytest.approx(cost.table)


@pytest.mark.parametrize("samples", [{}, {1: []}, {1: [1.0], 5: [1.0]}])
def test_samples_are_of_known_sizes(samples):
    with pytest.raises(ValueError, match="not valid: give some"):
        StepCost.of(samples)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [1, 2]}, {"seconds": [1.0]}, {"seconds": [0.0] * len(KNOTS)}, {"seconds": [math.nan] * len(KNOTS)},
        {"seconds": ["1"] * len(KNOTS)}, {"seconds": [True] * len(KNOTS)}, {"seconds": 3}, {"measured_at": None},
        {"measured_at": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_json_that_is_no_curve_or_of_another_kind_is_refused(change):
    value = measured().to_json()
    StepCost.from_json(value)
    with pytest.raises(ValueError, match=r"valid|measure again"):
        StepCost.from_json({**value, **change})
    for other in (None, [], 3, "x", {}):
        with pytest.raises(ValueError, match="measure again"):
            StepCost.from_json(other)


def test_a_curve_owns_what_its_generations_have_learned():
    cost, other = measured(), measured()
    greedy = cost.state("greedy")
    assert greedy is cost.state("greedy")
    assert greedy is not cost.state("sampled at 1.0") and greedy is not other.state("greedy")
