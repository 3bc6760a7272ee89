"""One size for all rows of a batch."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting import controller as controller_module
from lade.decoding.drafting.controller import APART, BatchBudget, Controller, ControllerState, common_progress, lags
from lade.tuning.step_cost import StepCost

PLAIN_S = 1e-3


def steep_cost() -> StepCost:
    """A pass over eight tokens takes twice as long as one over one."""
    return StepCost.of({1: [PLAIN_S], 8: [2 * PLAIN_S], 128: [30 * PLAIN_S]})


SURE = [1.0, 0.95, 0.9, 0.9, 0.85, 0.8, 0.8, 0.8]
NOTHING = [1.0]


def decided(*found: Sequence[float]) -> int:
    """How many nodes a row with many could feed."""
    budget = BatchBudget(steep_cost())
    assert not budget.skip_drafting()
    budget.decide(found)
    return budget.choose(range(100))


def test_what_is_worth_it_for_one_row_alone_is_not_where_all_others_wait():
    assert decided(SURE) == len(SURE)
    assert decided(SURE, SURE, SURE) == len(SURE)
    assert decided(SURE, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING) <= 3


def test_it_is_asked_about_the_mean_row():
    alone = Controller(steep_cost())
    for many in (1, 2, 3, 5):
        mean = [1.0] + [many / 5 * score for score in SURE[1:]]
        assert decided(*[SURE] * many, *[NOTHING] * (5 - many)) == Controller(steep_cost()).choose(mean)
    assert alone.choose(SURE) > alone.choose(NOTHING)


EMITTED = st.lists(st.integers(0, 3000), min_size=1, max_size=64)


@given(EMITTED)
def test_a_call_is_about_as_far_as_its_slowest_row(emitted: list[int]):
    progress, mean = common_progress(emitted), sum(emitted) / len(emitted)
    assert min(emitted) - 1e-9 <= progress <= min(min(emitted) + APART * math.log(len(emitted)), mean) + 1e-9
    assert max(lags(emitted)) == 1.0


@given(EMITTED, st.data())
def test_a_token_of_any_row_is_progress_and_most_so_of_the_slowest(emitted: list[int], data: st.DataObject):
    place = data.draw(st.integers(0, len(emitted) - 1))
    slowest = emitted.index(min(emitted))

    def brought(row: int) -> float:
        later = [count + (number == row) for number, count in enumerate(emitted)]
        return common_progress(later) - common_progress(emitted)

    assert 0.0 <= brought(place) <= brought(slowest) + 1e-9
    assert common_progress([count + 5 for count in emitted]) == pytest.approx(common_progress(emitted) + 5)


def test_where_a_call_waits_for_all_the_slowest_row_decides():
    sizes = []
    for emitted in (None, [9, 9, 9, 9], [9, 40, 40, 40], [40, 9, 9, 9]):
        budget = BatchBudget(steep_cost())
        assert not budget.skip_drafting()
        budget.decide([SURE, NOTHING, NOTHING, NOTHING], emitted)
        sizes.append(budget.choose(range(100)))
    mean, together, slow, fast = sizes
    assert mean == together and fast < mean < slow == len(SURE)


def test_a_row_feeds_no_more_than_it_has_found():
    budget = BatchBudget(steep_cost())
    budget.skip_drafting()
    budget.decide([SURE, SURE[:3]])
    assert budget.choose(SURE) == len(SURE) and budget.choose(SURE[:3]) == 3
    assert budget.fill_to(3) >= len(SURE), "the rest is for the window: the pass is that long anyway"


def test_all_rows_rest_in_the_same_steps():
    budget, rests = BatchBudget(steep_cost()), []
    for _ in range(60):
        said = {budget.skip_drafting() for _ in range(4)}
        assert len(said) == 1
        rests += said
        budget.decide([[] if rests[-1] else NOTHING] * 4)
        budget.observe_pass(1, 1.0, 1.5 * PLAIN_S, PLAIN_S, rows=1)
    alone, expected = Controller(steep_cost()), []
    for _ in range(60):
        expected.append(alone.skip_drafting())
        if not expected[-1]:
            alone.choose(NOTHING)
        alone.observe(1, 1, 1.5 * PLAIN_S, PLAIN_S)
    assert rests == expected and any(rests) and not all(rests)


def test_a_pass_is_learned_once():
    cost = steep_cost()
    seen: list[tuple[int, float]] = []
    cost.observe = lambda size, seconds: seen.append((size, seconds))  # type: ignore[method-assign]
    budget = BatchBudget(cost)
    for _ in range(3):
        budget.observe(1, 1, 5.0, 4.0)
    assert seen == []
    budget.observe_pass(8, 2.5, 5e-3, 4e-3, rows=3)
    assert seen == [(8, 4e-3)]


@pytest.mark.parametrize("found", [[], [[], []]])
def test_nothing_is_decided_where_nobody_looked(found: list[list[float]]):
    budget = BatchBudget(steep_cost())
    budget.skip_drafting()
    budget.decide([SURE, SURE])
    budget.decide(found)
    assert budget.choose(SURE) == len(SURE)


@pytest.mark.parametrize("plain", [(), []])
def test_a_row_that_drafts_nothing_counts_the_token_that_it_gets(plain: Sequence[float]):
    """Counted as nothing, two such rows would make a pass look worthless to the row that drafts beside them."""
    for scores in (SURE, SURE[:3], NOTHING):
        assert decided(scores, plain, plain) == decided(scores, NOTHING, NOTHING)
    cheap = StepCost.of({1: [PLAIN_S], 8: [1.08 * PLAIN_S], 128: [3 * PLAIN_S]})
    found, budget = [1.0, 0.5, 0.4, 0.3, 0.2, 0.1], BatchBudget(cheap)
    for _ in range(100):
        if not budget.skip_drafting():
            budget.decide([found, plain, plain])
        size = budget.choose(found)
        budget.observe_pass(size, (sum(found[:size]) + 2) / 3, cheap.seconds(size), cheap.seconds(size), rows=3)
    assert size == len(found)


def cheap_cost() -> StepCost:
    return StepCost.of({1: [PLAIN_S], 2: [1.1 * PLAIN_S], 128: [99 * PLAIN_S]})


def dear_looks(budget: BatchBudget, steps: int, *, yields: float) -> tuple[int, float]:
    """Of so many steps of four rows those that looked, and what all took of the time of plain ones: a look costs a
    third of one, and every third finds a token that comes true so often, and that costs a tenth.
    """
    cost = cheap_cost()
    looks, tokens, seconds = 0, 0.0, 0.0
    for _ in range(steps):
        size, emitted, own_s = 1, 1.0, 0.0
        if not budget.skip_drafting():
            looks += 1
            found = [1.0, 0.6] if looks % 3 == 0 else NOTHING
            budget.decide([found] * 4)
            size, own_s = budget.choose(found), PLAIN_S / 3
            emitted += yields * (size - 1)
        budget.observe_pass(size, emitted, cost.seconds(size) + own_s, cost.seconds(size), rows=4)
        tokens, seconds = tokens + emitted, seconds + cost.seconds(size) + own_s
    return looks, seconds / (tokens * PLAIN_S)


def test_a_batch_looks_seldom_where_looks_cost_more_than_they_bring():
    """Although what was found is worth feeding; in the next call, too."""
    state = ControllerState()
    dear_looks(BatchBudget(cheap_cost(), state), 200, yields=0.6)
    looks, took = dear_looks(BatchBudget(cheap_cost(), state), 800, yields=0.6)
    assert 1 < looks < 80 and took < 1.01


def test_a_batch_that_rests_finds_out_when_looks_pay_again():
    state = ControllerState()
    dear_looks(BatchBudget(cheap_cost(), state), 400, yields=0.0)
    assert state.spent
    looks, took = dear_looks(BatchBudget(cheap_cost(), state), 4000, yields=3.0)
    assert looks > 3000 and took < 0.8


def test_prompts_are_read_unless_the_budget_of_regret_is_used_up():
    state = ControllerState()
    budget = BatchBudget(cheap_cost(), state)
    assert budget.reads_logits
    dear_looks(BatchBudget(cheap_cost(), state), 400, yields=0.0)
    assert not budget.reads_logits


def test_copies_that_are_fed_in_a_rest_say_nothing_about_the_memory():
    """What they promised and what came of it is not what its guesses are trusted by."""
    state, cost = ControllerState(), cheap_cost()
    budget = BatchBudget(cost, state)
    dear_looks(budget, 200, yields=0.0)
    state.spent, state.seconds = True, 1.0
    calibration, fed = state.calibration, 0
    for _ in range(16):
        assert budget.skip_drafting()
        budget.decide([[1.0, 0.9, 0.9, 0.9]] * 4)
        size = budget.choose(range(100))
        fed += size > 1
        budget.observe_pass(size, 1.0, cost.seconds(size), cost.seconds(size), rows=4)
    assert fed > 8 and state.calibration == calibration


def test_a_batch_that_rests_feeds_nothing_for_what_it_teaches():
    flat = StepCost.of({1: [PLAIN_S], 128: [1.01 * PLAIN_S]})
    faint = [1.0, *[1e-6] * 20]
    for resting in (False, True):
        budget = BatchBudget(flat)
        budget._skipping = resting
        budget.decide([faint] * 3)
        assert (budget.choose(faint) >= 8) is not resting


@pytest.mark.parametrize("steps", [1.0, 2.0, 4.0])
def test_many_rows_may_lose_some_plain_steps_all_the_same(monkeypatch, steps):
    """One plain step of 16 tokens would be a single attempt of 16 rows. More rows may lose more tokens."""
    monkeypatch.setattr(controller_module, "REGRET_STEPS", steps)
    state = ControllerState()
    budget, cost, lost = BatchBudget(cheap_cost(), state), cheap_cost(), 0.0
    while not state.spent:
        if not budget.skip_drafting():
            budget.decide([[1.0, 0.6]] * 32)
        size = budget.choose([1.0, 0.6])
        own_s = PLAIN_S / 3
        budget.observe_pass(size, 1.0, cost.seconds(size) + own_s, cost.seconds(size), rows=32)
        lost += (cost.seconds(size) + own_s) / PLAIN_S - 1.0
    assert lost == pytest.approx(max(16.0 / 32, steps), abs=0.5)
    left = ControllerState(tokens=100.0, seconds=0.12)
    assert left.regret_left(PLAIN_S, rows=32) == pytest.approx(max(16.0, 32 * steps) - 20.0)
