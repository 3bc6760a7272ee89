import json
import math
import random

import pytest
from hulls import lower_hull
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting.controller import LARGEST_SHARED
from lade.tuning.step_cost import KNOTS, MAX_WEIGHT, StepCost

TIMES = st.floats(1e-5, 10.0)
CURVES = st.lists(TIMES, min_size=len(KNOTS), max_size=len(KNOTS))
WEIGHTS = st.lists(st.floats(0.0, 60.0), min_size=len(KNOTS), max_size=len(KNOTS))
OBSERVATIONS = st.lists(st.tuples(st.integers(1, 400), st.floats(1e-7, 1e3)), max_size=80)


def flat_then_steep(size: int) -> float:
    """A pass that is free up to 16 tokens, and compute-bound then; milliseconds."""
    return 1e-3 * max(10.0, 10.0 * size / 16)


def measured(cost=flat_then_steep, sizes=KNOTS, passes=9) -> StepCost:
    return StepCost.of({size: [cost(size)] * passes for size in sizes})


def watched(cost, observations):
    for size, seconds in observations:
        cost.observe(size, seconds)
    cost.refresh()
    return cost


@given(CURVES, WEIGHTS, OBSERVATIONS)
def test_more_tokens_never_cost_less_and_the_hull_is_convex_and_below(curve, weights, observations):
    cost = watched(StepCost(curve, weights), observations)
    assert len(cost.table) == len(cost.marginals) == LARGEST_SHARED + 1
    assert all(0 < a <= b < math.inf for a, b in zip(cost.table, cost.table[1:], strict=False))
    assert all(0 <= a <= b < math.inf for a, b in zip(cost.marginals, cost.marginals[1:], strict=False))
    hull = lower_hull(cost)
    assert all(below <= seconds * (1 + 1e-9) for below, seconds in zip(hull, cost.table, strict=True))
    assert (cost.corners[0], cost.corners[-1]) == (1, LARGEST_SHARED)
    assert all(hull[size] == pytest.approx(cost.table[size]) for size in cost.corners)
    for size in range(1, LARGEST_SHARED):
        assert hull[size + 1] - hull[size] == pytest.approx(cost.marginals[size], rel=1e-6, abs=1e-9 * hull[-1])
    assert cost.seconds(LARGEST_SHARED + 100) == pytest.approx(cost.table[-1] + 100 * cost.marginals[-1])


@given(CURVES, WEIGHTS, OBSERVATIONS)
def test_json_brings_back_the_same_curve(curve, weights, observations):
    cost = watched(StepCost(curve, weights, measured_at=12.5), observations)
    again = StepCost.from_json(json.loads(json.dumps(cost.to_json())))
    assert (again.table, again.marginals, again.corners) == (cost.table, cost.marginals, cost.corners)
    assert again.to_json() == cost.to_json()
    assert again.measured_at == 12.5


@given(st.integers(1, 400), st.floats(5.0, 1e6))
def test_one_step_that_took_ages_hardly_moves_a_measured_curve(size, factor):
    cost = measured()
    before = list(cost.table)
    watched(cost, [(size, factor * cost.seconds(size))])
    assert cost.table[1] > before[1], "it counts a little"
    assert cost.change_since(before) < 0.04
    for _ in range(60):
        cost.observe(size, flat_then_steep(size) if size <= LARGEST_SHARED else 10e-3 * size / 16)
    cost.refresh()
    assert cost.change_since(before) < 0.01


def test_one_step_that_took_no_time_hardly_moves_a_measured_curve():
    cost = measured()
    before = cost.table
    watched(cost, [(16, 1e-9)])
    assert 0.02 < cost.change_since(before) < 0.04


def test_steps_that_take_ages_now_and_then_do_not_add_up():
    cost = measured()
    before = list(cost.table)
    for i in range(2000):
        size = (1, 8, 20, 64)[i % 4]
        cost.observe(size, flat_then_steep(size) * (100.0 if i % 20 == 0 else 1.0))
    cost.refresh()
    assert cost.change_since(before) < 0.05


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_sizes_that_are_not_visited_follow_when_everything_gets_slower_or_faster(factor):
    cost = measured()
    for i in range(400):
        size = (1, 7, 16, 40)[i % 4]
        cost.observe(size, factor * flat_then_steep(size))
    cost.refresh()
    for size in (1, 7, 12, 16, 40, 128, 256):
        assert cost.seconds(size) == pytest.approx(factor * flat_then_steep(size), rel=0.2)


def test_sizes_follow_even_if_only_one_is_visited():
    cost = measured()
    for _ in range(400):
        cost.observe(24, 2.0 * flat_then_steep(24))
    cost.refresh()
    assert cost.seconds(24) == pytest.approx(2.0 * flat_then_steep(24), rel=0.02)
    assert 1.5 < cost.seconds(1) / flat_then_steep(1) < 2.0, "not all the way: it may have been that size alone"


def test_steps_show_a_shape_that_the_measurement_had_not():
    cost = measured(lambda size: 10e-3)
    for i in range(3000):
        size = (1, 5, 16, 32, 60, 128)[i % 6]
        cost.observe(size, flat_then_steep(size))
    cost.refresh()
    for size in (1, 5, 16, 32, 60, 128):
        assert cost.seconds(size) == pytest.approx(flat_then_steep(size), rel=0.1)


def test_sizes_that_were_measured_flat_do_not_hold_back_one_that_is_not():
    cost = measured(lambda size: 10e-3)
    for _ in range(300):
        cost.observe(1, 10e-3)
        cost.observe(16, 30e-3)
    cost.refresh()
    assert cost.seconds(1) == pytest.approx(10e-3, rel=0.1)
    assert cost.seconds(16) == pytest.approx(30e-3, rel=0.1) and cost.seconds(32) >= cost.seconds(16)


@pytest.mark.parametrize("factor", [0.4, 5.0])
def test_three_passes_in_a_row_are_believed_and_two_are_not(factor):
    """Of a run the least surprising pass; and passes over one token neither break it off nor take part in it."""
    cost, before = measured(), flat_then_steep(16)
    for _ in range(2):
        cost.observe(16, factor * before)
        cost.observe(1, flat_then_steep(1))
    cost.refresh()
    assert cost.seconds(16) == pytest.approx(before, rel=0.08)
    cost.observe(16, factor * before)
    cost.refresh()
    assert (cost.seconds(16) / before - 1.0) / (factor - 1.0) > 0.6, "most of the way"


def test_a_pass_as_expected_ends_a_run():
    cost, before = measured(), flat_then_steep(16)
    for _ in range(20):
        for factor in (5.0, 5.0, 1.0):
            cost.observe(16, factor * before)
    cost.refresh()
    assert cost.seconds(16) < 1.6 * before


def test_what_was_only_guessed_is_learned_within_a_few_steps():
    cost = measured(lambda size: 1.0, sizes=[1, 8])
    assert cost.seconds(64) == pytest.approx(1 + 56 / 32), "a quarter for every 8 tokens"
    for _ in range(6):
        cost.observe(64, 1.1)  # the passes are long: each one is noticed at once
    assert cost.seconds(64) == pytest.approx(1.1, rel=0.15)
    assert cost.seconds(1) == pytest.approx(1.0, rel=0.1)
    cost = measured(lambda size: 1.0, sizes=[1, 8])
    for _ in range(3):
        cost.observe(256, 40.0)  # guessed at 8.75
    assert cost.seconds(256) > 30.0
    assert cost.seconds(1) == pytest.approx(1.0, rel=0.1)


def test_between_measured_sizes_the_curve_is_straight_and_beyond_it_goes_on():
    cost = StepCost.of({1: [1.0], 16: [1.0, 9.0], 32: [2.0]})
    assert [cost.seconds(size) for size in (1, 5, 16, 24, 32)] == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0])
    assert cost.seconds(64) == pytest.approx(4.0)
    assert cost.seconds(320) == pytest.approx(20.0)
    assert [cost.marginals[size] for size in (1, 15, 16, 31, 32, 256)] == pytest.approx([0, 0] + [1 / 16] * 4)
    assert cost.corners[:2] == [1, 16]


def test_of_many_passes_one_of_the_fastest_counts():
    slow_machine = [3.0, 1.1, 1.0, 50.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert StepCost.of({1: slow_machine}).seconds(1) == 1.1
    assert StepCost.of({1: [7.0, 2.0]}).seconds(1) == 2.0


def test_a_step_of_a_size_that_costs_less_than_a_smaller_one_is_read_as_their_mean():
    cost = StepCost.of({1: [1.0], 4: [3.0], 8: [2.0]})
    assert cost.seconds(4) == cost.seconds(8)
    assert 2.0 < cost.seconds(8) < 3.0


def test_weights_are_bounded_so_that_it_never_stops_learning():
    cost = watched(measured(), [(16, 10e-3)] * 500)
    assert max(cost.to_json()["weights"]) == MAX_WEIGHT


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


def test_a_clock_that_went_mad_hardly_counts():
    cost = measured()
    before = cost.table
    watched(cost, [(4, math.inf), (4, 1e-300), (500, math.inf)])
    assert cost.change_since(before) < 0.1


def test_a_clock_that_crawls_leaves_a_curve_that_can_be_saved():
    cost = watched(measured(lambda size: 1e-8), [(size, 1e-15) for size in KNOTS] * 300)
    assert StepCost.from_json(cost.to_json()).table == cost.table


def test_sizes_below_one_are_refused():
    cost = measured()
    for call in (cost.seconds, lambda size: cost.observe(size, 1.0)):
        for size in (0, -3):
            with pytest.raises(ValueError, match=rf"size={size} is not valid"):
                call(size)


@pytest.mark.parametrize("samples", [{}, {1: []}, {1: [1.0], 5: [1.0]}])
def test_samples_are_of_known_sizes(samples):
    with pytest.raises(ValueError, match="not valid: give some"):
        StepCost.of(samples)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [1, 2]}, {"seconds": [1.0]}, {"seconds": [0.0] * len(KNOTS)}, {"seconds": [math.nan] * len(KNOTS)},
        {"seconds": ["1"] * len(KNOTS)}, {"seconds": [True] * len(KNOTS)}, {"weights": [-1.0] * len(KNOTS)},
        {"weights": None}, {"seconds": 3}, {"measured_at": None}, {"measured_at": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_json_that_is_no_curve_is_refused(change):
    value = measured().to_json()
    StepCost.from_json(value)
    with pytest.raises(ValueError, match=r"valid|measure again"):
        StepCost.from_json({**value, **change})


@pytest.mark.parametrize("value", [None, [], 3, "x", {}])
def test_json_of_another_kind_is_refused(value):
    with pytest.raises(ValueError, match="measure again"):
        StepCost.from_json(value)


@pytest.mark.parametrize("guesses", [0.0, 0.05])
def test_a_machine_whose_pace_goes_up_and_down_leaves_the_shape_as_it_was(guesses):
    """200 times: what is not visited keeps its distance, or trees of any size would come to seem free, or too dear."""
    luck, cost = random.Random(1), measured(lambda size: 4e-3 + 1e-4 * size)
    before = list(cost.table)
    for number in range(12_000):
        size = luck.choice((4, 8)) if luck.random() < guesses else 1
        pace = 1.0 if number // 60 % 2 else 1.6
        hiccup = luck.choice((0.0,) * 9 + (1.5,)) + abs(luck.gauss(0.0, 0.1))
        cost.observe(size, before[size] * pace * (1.0 + hiccup))
    cost.refresh()
    for size in (2, 4, 8, 16, 64, 256):
        assert cost.table[size] / cost.table[1] == pytest.approx(before[size] / before[1], rel=0.25)
