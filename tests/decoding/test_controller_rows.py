"""One size for all rows of a batch: how the controller weighs them."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting.controller import (
    LAG_SCALE,
    Controller,
    ControllerState,
    common_progress,
    slowest_row_weights,
)
from lade.decoding.drafting.step_cost import StepCost

PLAIN_S = 1e-3


def steep_cost() -> StepCost:
    """A pass over eight tokens takes twice as long as one over one."""
    return StepCost.of({1: [PLAIN_S], 8: [2 * PLAIN_S], 128: [30 * PLAIN_S]})


SURE = [1.0, 0.95, 0.9, 0.9, 0.85, 0.8, 0.8, 0.8]
NOTHING = [1.0]


def deciding(*found: Sequence[float], emitted: Sequence[int] | None = None, cost: StepCost | None = None) -> Controller:
    """A controller that has weighed what rows have found."""
    budget = Controller(cost or steep_cost())
    assert not budget.skip_drafting()
    budget.decide(found, emitted)
    return budget


def decided(*found: Sequence[float], emitted: Sequence[int] | None = None) -> int:
    """How many nodes a row with many could feed."""
    return deciding(*found, emitted=emitted).choose(range(100))


def test_the_yield_of_the_mean_row_decides_or_of_the_slowest_where_a_call_waits_for_all():
    assert decided(SURE, SURE, SURE) == decided(SURE) > decided(SURE, *[NOTHING] * 7)
    emitted = (None, [9] * 8, [9, *[40] * 7], [40, *[9] * 7])
    mean, together, slow, fast = (decided(SURE, *[NOTHING] * 7, emitted=each) for each in emitted)
    assert mean == together and fast <= mean < slow == decided(SURE)


EMITTED = st.lists(st.integers(0, 3000), min_size=1, max_size=64)


@given(EMITTED)
def test_a_call_is_about_as_far_as_its_slowest_row(emitted: list[int]):
    progress, mean = common_progress(emitted), sum(emitted) / len(emitted)
    assert min(emitted) - 1e-9 <= progress <= min(min(emitted) + LAG_SCALE * math.log(len(emitted)), mean) + 1e-9
    assert max(slowest_row_weights(emitted)) == 1.0


@given(EMITTED, st.data())
def test_a_token_of_any_row_is_progress_and_most_so_of_the_slowest(emitted: list[int], data: st.DataObject):
    place = data.draw(st.integers(0, len(emitted) - 1))
    slowest = emitted.index(min(emitted))

    def brought(row: int) -> float:
        later = [count + (number == row) for number, count in enumerate(emitted)]
        return common_progress(later) - common_progress(emitted)

    assert 0.0 <= brought(place) <= brought(slowest) + 1e-9
    assert common_progress([count + 5 for count in emitted]) == pytest.approx(common_progress(emitted) + 5)


def test_a_row_feeds_no_more_than_it_has_found():
    budget = deciding(SURE, SURE[:3])
    size = budget.choose(SURE)
    assert size > 3 and budget.choose(SURE[:3]) == 3
    assert budget.fill_size(3) >= size, "the rest is for the window: the pass is that long anyway"


def test_a_step_without_candidates_feeds_a_window_where_that_is_cheap():
    """What it teaches comes soonest at the beginning of a text: no node is known to be unlikely."""
    flat = StepCost.of({1: [PLAIN_S] * 9, 128: [1.3 * PLAIN_S] * 9})
    unlikely = [1.0, 1e-4]
    assert deciding(NOTHING, cost=flat).fill_size(1) == deciding(NOTHING, NOTHING, cost=flat).fill_size(1) == 128
    assert deciding(unlikely, cost=flat).fill_size(1) < 8 and deciding(NOTHING, unlikely, cost=flat).fill_size(1) < 8
    assert deciding(NOTHING).fill_size(1) == 1


def test_all_rows_rest_in_the_same_steps():
    budget, rests = Controller(steep_cost()), []
    for _ in range(60):
        said = {budget.skip_drafting() for _ in range(4)}
        assert len(said) == 1
        rests += said
        budget.decide([[] if rests[-1] else SURE] * 4)
        size = budget.choose(SURE)
        budget.learn(SURE[:size], [])
        budget.observe(size, 1.0, 2 * size * PLAIN_S, size * PLAIN_S, rows=4)
    assert any(rests) and not all(rests)


def test_a_pass_is_learned_once():
    cost = steep_cost()
    seen: list[tuple[int, float]] = []
    cost.observe = lambda size, seconds, *, prepared: seen.append((size, seconds))  # type: ignore[method-assign]
    budget = Controller(cost)
    budget.observe(8, 2.5, 5e-3, 4e-3, rows=3)
    assert seen == [(8, 4e-3)]


@pytest.mark.parametrize("found", [[], [[], []]])
def test_nothing_is_decided_where_nobody_looked(found: list[list[float]]):
    budget = deciding(SURE, SURE)
    budget.decide(found)
    assert budget.choose(SURE) == len(SURE)


@pytest.mark.parametrize("plain", [(), []])
def test_a_row_that_drafts_nothing_counts_the_token_that_it_gets(plain: Sequence[float]):
    """Counted as nothing, two such rows would make a pass look worthless to the row that drafts beside them."""
    for scores in (SURE, SURE[:3], NOTHING):
        assert decided(scores, plain, plain) == decided(scores, NOTHING, NOTHING)


def cheap_cost() -> StepCost:
    return StepCost.of({1: [PLAIN_S], 2: [1.1 * PLAIN_S], 128: [99 * PLAIN_S]})


def dear_looks(budget: Controller, steps: int, *, accepted: bool) -> tuple[int, float]:
    """Of so many steps of four rows those that looked, and what all took of the time of plain ones: a look costs a
    third of one.
    """
    cost = cheap_cost()
    looks, tokens, seconds = 0, 0.0, 0.0
    for _ in range(steps):
        size, emitted, own_s = 1, 1.0, 0.0
        if not budget.skip_drafting():
            looks += 1
            found = [1.0, 0.6, 0.5]
            budget.decide([found] * 4)
            size, own_s = budget.choose(found), PLAIN_S / 3
            came = list(range(1, size)) if accepted else []
            emitted += len(came)
            for _ in range(4):
                budget.learn(found[:size], came)
        budget.observe(size, emitted, cost.seconds(size) + own_s, cost.seconds(size), rows=4)
        tokens, seconds = tokens + emitted, seconds + cost.seconds(size) + own_s
    return looks, seconds / (tokens * PLAIN_S)


def test_a_batch_looks_seldom_where_looks_cost_more_than_they_bring_and_finds_out_when_they_pay_again():
    """In the next call, too."""
    state = ControllerState()
    dear_looks(Controller(cheap_cost(), state), 200, accepted=False)
    looks, took = dear_looks(Controller(cheap_cost(), state), 800, accepted=False)
    assert 1 < looks < 80 and took < 1.03
    looks, took = dear_looks(Controller(cheap_cost(), state), 1000, accepted=True)
    assert looks > 800 and took < 0.9


def test_prompts_are_read_unless_the_text_may_lose_no_more_and_one_that_joins_has_lost_nothing_yet():
    state = ControllerState()
    budget = Controller(cheap_cost(), state)
    assert budget.reads_logits
    dear_looks(budget, 400, accepted=False)
    assert budget.exhausted and not budget.reads_logits
    budget = Controller(cheap_cost(), ControllerState())
    dear_looks(budget, 60, accepted=False)
    lost = budget._lost
    budget.begin_texts(1)
    assert budget._lost == pytest.approx(0.8 * lost)
    budget.begin_texts(10**9)
    assert budget._lost == pytest.approx(0.0, abs=1e-6)
