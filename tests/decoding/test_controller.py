"""The size of a tree: a learned yield curve against the seconds of passes, and bounded losses."""

import copy
import random

import numpy as np
import pytest
from growing import begun, grown, sized
from hypothesis import given
from hypothesis import strategies as st

import lade.decoding.drafting.controller as module
from lade.decoding.drafting.controller import (
    ALLOWANCE,
    ALLOWED_SHARE,
    RECENT,
    Controller,
    ControllerState,
    YieldCurve,
    max_tree_size,
)
from lade.decoding.drafting.step_cost import StepCost

PLAIN_S = 0.01
FLAT = {1: 1.0, 8: 1.08, 64: 1.18, 128: 1.31}
USUAL = {1: 1.0, 2: 1.2, 8: 1.5, 16: 1.8, 32: 2.4, 64: 4.0, 128: 7.0}
STEEP = {1: 1.0, 2: 1.8, 8: 4.0, 128: 60.0}
SCORES = [1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.1, *[0.05] * 20, *[0.01] * 101]


def cost_of(heights):
    return StepCost.of({size: [PLAIN_S * height] * 9 for size, height in heights.items()})


def run(controller, cost, steps, accept, *, own_s=0.0, noise=lambda size: (1.0, False), scores=SCORES):
    """Decode so many steps; return the sizes fed, and the plain steps that were lost."""
    luck, sizes, lost = random.Random(0), [], 0.0
    truth = list(cost.table)
    for _ in range(steps):
        size, accepted = 1, []
        if not controller.skip_drafting():
            found = grown(scores, controller.stages())
            size = sized(controller, found)
            accepted = accept(size, luck)
            controller.learn(found[:size], accepted)
        factor, prepared = noise(size)
        seconds = factor * truth[size]
        controller.observe(size, 1 + len(accepted), seconds + own_s, seconds, prepared=prepared)
        sizes.append(size)
        lost += (truth[size] + own_s) / (truth[1] + own_s) - 1 - len(accepted)
    return sizes, lost


def chain(share):
    """The likeliest node of each doubling comes true so often, if the one before did."""

    def accept(size, luck):
        accepted, rank = [], 1
        while rank < size and luck.random() < share:
            accepted.append(rank)
            rank *= 2
        return accepted

    return accept


NOTHING = chain(0.0)


def test_where_passes_are_flat_it_feeds_many_and_where_they_are_steep_few():
    fed = {}
    for name, heights in (("flat", FLAT), ("usual", USUAL), ("steep", STEEP)):
        cost = cost_of(heights)
        sizes, _ = run(begun(cost), cost, 200, chain(0.6))
        fed[name] = sum(sizes[50:]) / 150
    assert fed["flat"] > 60 > 2 * fed["usual"] > 4 * fed["steep"]


def test_a_step_that_feeds_many_tells_about_fewer():
    """The curve at small sizes is learned from large trees alone."""
    state, cost = ControllerState(), cost_of(FLAT)
    run(begun(cost, state), cost, 400, chain(0.7))
    assert state.curve.gains[:5] == pytest.approx([0.7**n for n in range(1, 6)], abs=0.1)
    small = Controller(cost_of(STEEP), state)
    few, _ = run(small, cost_of(STEEP), 1, NOTHING)
    assert 1 <= few[0] <= 8


@pytest.mark.parametrize("length", [32, 128, 512])
@pytest.mark.parametrize("heights", [FLAT, USUAL, STEEP])
def test_a_text_loses_no_more_than_its_allowance(heights, length):
    """In plain steps; the library's own time is not known at first."""
    cost = cost_of(heights)
    _, lost = run(begun(cost), cost, length, NOTHING, own_s=0.2 * PLAIN_S)
    assert lost < ALLOWANCE + ALLOWED_SHARE * length + 0.2 * RECENT


def test_trees_get_smaller_before_drafting_rests():
    """While the share grows, what can be lost pays for small trees."""
    cost = cost_of(USUAL)
    sizes, _ = run(begun(cost), cost, 200, NOTHING)
    fed = [size for size in sizes if size > 1]
    assert fed[0] > 4 and set(fed[10:]) <= {2, 3} and sizes[100:].count(1) > 80


def test_a_bad_text_does_not_silence_the_next_and_a_good_one_licenses_nothing():
    state, cost = ControllerState(), cost_of(USUAL)
    for length in (128, 512):
        bad = begun(cost, state)
        _, lost = run(bad, cost, length, NOTHING)
        assert lost > ALLOWANCE + 0.01 * length
        good = begun(cost, state)
        assert not good.exhausted
        sizes, lost = run(good, cost, 128, chain(0.8))
        assert lost < -60 and sum(size > 1 for size in sizes) > 60
    cost, state = cost_of(USUAL), ControllerState()
    run(begun(cost, state), cost, 500, chain(0.8))
    spoilt = begun(cost, state)
    run(spoilt, cost, 60, chain(0.8))
    _, lost = run(spoilt, cost, 60, NOTHING)
    assert lost < ALLOWANCE + ALLOWED_SHARE * 400 + 3


@pytest.mark.parametrize("heights", [FLAT, USUAL])
def test_what_is_done_once_for_a_shape_changes_nothing(heights):
    """The first pass of each shape takes 50 plain passes more."""
    fed = []
    for extra in (0.0, 50.0):
        cost, seen, state = cost_of(heights), set(), ControllerState()

        def first_of_its_shape(size, seen=seen, extra=extra):
            new = size not in seen
            seen.add(size)
            return (1.0 + extra if new else 1.0), new

        fed.append([run(begun(cost, state), cost, 100, chain(0.6), noise=first_of_its_shape)[0] for _ in range(3)])
    assert fed[0] == fed[1]


def test_a_burst_of_another_process_costs_its_own_time_alone():
    """Four passes take 40 times as long: what is fed afterwards yields as much as without."""
    lost = []
    for burst in (range(0), range(60, 64)):
        cost, number = cost_of(FLAT), iter(range(10**6))
        noise = lambda size, burst=burst, number=number: (40.0 if next(number) in burst else 1.0, False)  # noqa: E731
        lost.append(run(begun(cost), cost, 300, chain(0.6), noise=noise)[1])
    assert lost[1] == pytest.approx(lost[0], rel=0.1)


def test_own_time_is_a_median_and_stands_garbage_collection():
    sizes = []
    for collection_s in (1.0, 1e-3):
        cost = cost_of(USUAL)
        controller = Controller(cost)
        for number in range(60):
            assert not controller.skip_drafting() or cost.wants_baseline
            own_s = collection_s if number % 7 == 0 else 1e-3
            controller.observe(8, 3, cost.table[8] + own_s, cost.table[8])
        sizes.append(sized(controller, SCORES))
    assert sizes[0] == sizes[1] > 1


def test_own_time_of_plain_steps_counts_from_the_second_on_and_what_grows_with_the_tree_keeps_it_small():
    """Passes on a GPU are seldom plain, and what they are compared with must not look faster than it is."""
    cost = cost_of({1: 1.0, 2: 2.0, 128: 128.0})  # so the rate is that of plain decoding
    controller = Controller(cost)
    for _ in range(2):
        cost.wants_baseline = True
        assert controller.skip_drafting()
        controller.observe(1, 1, 2 * PLAIN_S, PLAIN_S)
    assert controller.rate == pytest.approx(1 / (2 * PLAIN_S), rel=0.01)
    sizes = []
    for own_s in (0.0, PLAIN_S):
        cost = cost_of(FLAT)
        sizes.append(sum(run(begun(cost), cost, 200, chain(0.5), own_s=own_s)[0]))
    assert sizes[1] < sizes[0]


def test_forced_tokens_count_in_full_whatever_the_curve_says():
    controller = Controller(cost_of(USUAL))
    assert controller.expected([1.0, 1.0, 1.0, 0.1], [1e-6] * 9).tolist() == [1.0, 2.0, 3.0, 3.0]
    assert not controller.skip_drafting()
    assert sized(controller, [1.0] * 40) > 30 > sized(controller, [1.0, *[0.02] * 39])
    steep = Controller(cost_of({1: 1.0, 8: 1.7, 128: 20.0}))
    assert not steep.skip_drafting()
    assert sized(steep, [1.0] * 100) == 100
    assert sized(steep, [1.0, *[0.9] * 99]) < 20  # which are not sure to come


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=128), st.lists(st.floats(1.0, 8.0), min_size=4, max_size=4))
def test_stages_ascend_and_a_size_is_one_of_those_offered(scores, increments):
    heights, height = {}, 1.0
    for size, more in zip((1, 8, 32, 128), increments, strict=True):
        height *= more
        heights[size] = height
    cost = cost_of(heights)
    controller = Controller(cost)
    for _ in range(3):
        controller.skip_drafting()
        ends, least = zip(*controller.stages(), strict=True)
        assert list(ends) == sorted(ends) and ends[-1] == controller.most and min(least) >= 0.0
        found = grown([1.0, *sorted(scores, reverse=True)], controller.stages())
        size = sized(controller, found)
        assert 1 <= size <= len(found)
        assert controller.worth_verifying(found[1:]) in (True, False)
        controller.observe(size, 1, cost.table[size], cost.table[size])


def test_a_curve_learns_the_doublings_that_were_fed_alone_and_is_straight_in_the_logarithm_of_the_size():
    curve = YieldCurve()
    before = copy.deepcopy(curve)
    for _ in range(400):
        curve.learn([1.0, 1.0], [0.5, 0.4], [1.0, 0.25])
    assert curve.gains[:2] == pytest.approx([1.0, 0.25], abs=0.05)
    assert curve.predicted[:2] == pytest.approx([0.5, 0.4], abs=0.02)
    assert curve.gains[2:] == before.gains[2:]
    state, sizes = ControllerState(), np.arange(1, 513)
    state.curve.gains = [0.9 / number for number in range(1, 10)]
    sums = np.concatenate(([0.0], np.cumsum(state.curve.gains)))
    straight = np.interp(np.log2(sizes), np.arange(10), sums)
    found = Controller(cost_of(USUAL), state, 512).expected([1.0, *[0.0] * 511], [1.0] * 9)
    assert found == pytest.approx(1.0 + (1.0 - module.SCORES) * straight + module._LEARNING_TOKENS)


def test_what_was_fed_in_part_counts_in_part():
    """Twelve nodes hold more than half of the fourth doubling; else only what few larger trees yield would count."""
    state, cost = ControllerState(), cost_of({**USUAL, 12: 1.55, 16: 6.0})
    for _ in range(100):
        controller = Controller(cost, state)
        controller.learn([1.0, *[0.3] * 11], [1, 2, 4, 8])
    share = np.log2(12) - 3
    assert state.curve.gains[:4] == pytest.approx([1.0, 1.0, 1.0, 1.0 / share], rel=0.25)
    for _ in range(100):
        controller.learn([1.0, *[0.3] * 11], [])
    assert max(state.curve.gains[:4]) < 0.75 / share and state.curve.gains[4] == module.PRIOR_GAIN


def test_a_text_has_ratios_of_its_own_by_doubling():
    """Two texts that accept as many nodes as the curve says, one of the first ranks and one of the last."""

    def learned(accepted):
        state = ControllerState()
        state.curve.gains, state.curve.steps = [0.5] * 9, [module.CURVE_STEPS] * 9
        controller = Controller(cost_of(USUAL), state)
        controller.begin_texts(1)
        for _ in range(60):
            controller.learn(SCORES[:64], accepted)
        ratios, _ = controller._ratios, controller.skip_drafting()
        assert ratios[6] == pytest.approx(1.0, abs=0.1), "a doubling that was not fed goes by all others"
        size = sized(controller, grown(SCORES, controller.stages()))
        controller.begin_texts(1, alone=True)
        assert controller._ratios == [1.0] * 9
        return ratios[:3], ratios[3:6], size

    first, last, size = learned([1, 2, 4])
    assert min(first) > 1.5 and max(last) < 0.4
    first, last, larger = learned([8, 16, 32])
    assert max(first) < 0.4 and min(last) > 1.5 and size < larger


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_a_controller_grows_and_fills_up_to_its_limit(processes):
    """Trees that several processes feed are larger than those whose passes a curve knows."""
    most = max_tree_size(processes)
    controller, scores = Controller(StepCost.of({1: [1.0], 256: [1.001]}), most=most), [1.0] * most
    assert controller.most == controller.fill_size(1) == most
    for _ in range(3):
        ends = [size for size, _ in controller.stages()]
        assert ends == sorted(ends) and ends[-1] <= most
        size = sized(controller, scores[: ends[-1]])
        controller.observe(size, size, 1.0, 1.0)
    assert size == most
