"""How many tokens a step feeds: belief, evidence, the price, and the budget of regret."""

import copy
from collections.abc import Sequence

import pytest
from growing import grown, weighed
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting import controller as controller_module
from lade.decoding.drafting.controller import LARGEST, LARGEST_SHARED, Controller, ControllerState, most_fed
from lade.decoding.drafting.tree_size import FixedBudget
from lade.tuning.step_cost import KNOTS, StepCost

PLAIN_S = 0.01
FLAT = {1: 1.0, 256: 1.01}
STEEP = {1: 1.0, 256: 256.0}
JUMP = {1: 1.0, 2: 3.0, 256: 3.01}  # the second token costs two plain steps, the others nothing
USUAL = {1: 1.0, 2: 1.4, 16: 2.0, 256: 12.0}
NOTHING = [1.0, *[0.001] * 8]

rising = st.lists(st.floats(0.0, 3.0), min_size=len(KNOTS) - 1, max_size=len(KNOTS) - 1)
falling_scores = st.lists(st.floats(0.001, 1.0), max_size=LARGEST - 1).map(lambda s: [1.0, *sorted(s, reverse=True)])
steps = st.lists(st.tuples(falling_scores, st.floats(0.0, 1.0)), max_size=40)


class FrozenCost:
    """A curve that passes do not move; it keeps what it is told."""

    def __init__(self, heights: dict[int, float]) -> None:
        curve = StepCost.of({size: [PLAIN_S * height] for size, height in heights.items()})
        self.table, self.marginals, self.corners, self.plain_s = curve.table, curve.marginals, curve.corners, PLAIN_S
        self.passes: list[tuple[int, float]] = []

    def observe(self, size: int, seconds: float) -> None:
        self.passes.append((size, seconds))


def any_cost(increments: Sequence[float]) -> FrozenCost:
    height, heights = 1.0, {1: 1.0}
    for knot, increment in zip(KNOTS[1:], increments, strict=True):
        heights[knot] = height = height + increment
    return FrozenCost(heights)


def take(controller: Controller, size: int, emitted: float, own_s: float = 0.0) -> None:
    """A step of this size; the library itself takes `own_s` of it."""
    forward_s = controller._cost.table[size]
    controller.observe(size, emitted, forward_s + own_s, forward_s)


def step(controller: Controller, scores: Sequence[float], share: float, own_s: float = 0.0) -> int:
    """A whole step, whose guesses bring a share of what they promise; looking takes `own_s`. Returns the tokens fed."""
    if controller.skip_drafting():
        take(controller, 1, 1.0)
        return 1
    size = controller.choose(weighed(grown(scores, controller.thresholds()), controller.trust))
    take(controller, size, 1.0 + share * sum(scores[1:size]), own_s)
    return size


def after(cost: FrozenCost, history: Sequence[tuple[list[float], float]]) -> Controller:
    controller = Controller(cost)
    for scores, share in history:
        step(controller, scores, share)
    return controller


# ----------------------------------------------------------------------------------------------- a budget that is given


@given(st.integers(1, 200), falling_scores)
def test_a_fixed_budget_is_what_it_says(size, scores):
    budget = FixedBudget(size)
    assert budget.thresholds() == [(size, 0.0)]
    assert budget.choose(scores) == len(scores)
    for _ in range(100):
        budget.observe(size, 1, 1.0, 0.1)
        assert not budget.skip_drafting()
    assert budget.fill_to(1) == size


# ---------------------------------------------------------------------------------------------------------- the belief


@pytest.mark.parametrize(("size", "cold"), [(4, 1.5), (8, 1.65), (16, 2.0), (32, 2.4)])
def test_the_prior_is_that_of_cold_texts_and_a_little_optimism(size, cold):
    assert 1.05 * cold < 1.0 + controller_module._PRIOR[size] < 1.15 * cold


@pytest.mark.parametrize(("constant", "low", "high"), [("PRIOR_GAIN", 0.1, 1.0), ("PRIOR_POWER", 0.1, 0.7)])
def test_the_more_is_believed_of_large_trees_the_more_is_fed_for_what_it_teaches(monkeypatch, constant, low, high):
    sizes = []
    for value in (low, high):
        monkeypatch.setattr(controller_module, constant, value)
        monkeypatch.setattr(controller_module, "_PRIOR", controller_module._prior())
        sizes.append(Controller(FrozenCost(USUAL)).choose([1.0, *[1e-6] * 100]))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(("weight", "sizes"), [(0.0, {16}), (1.0, {1, 21})])
def test_the_weight_of_scores_decides_whether_sizes_follow_the_text(monkeypatch, weight, sizes):
    monkeypatch.setattr(controller_module, "SCORES", weight)
    cost = FrozenCost({1: 1.0, 2: 1.2, 16: 1.5, 32: 5.0} if weight == 0.0 else {1: 1.0, 2: 1.2, 256: 2.0})
    fed = {Controller(cost).choose([1.0, *[score] * 20]) for score in (0.0001, 0.3)}
    assert fed == sizes


@given(rising, steps, falling_scores)
def test_the_size_maximises_expected_yield_less_what_the_time_is_worth(increments, history, scores):
    """By brute force."""
    controller = after(any_cost(increments), history)
    state, rate, table = controller._state, controller.rate, controller._cost.table
    state.since_guesses = 0

    def worth(size: int) -> float:
        promised = sum(scores[1:size]) / 2 + controller_module._PRIOR[size] / 2
        return 1.0 + state.calibration * promised - rate * table[size] - rate * state.node_s * size

    best = max(map(worth, range(1, len(scores) + 1)))
    size = controller.choose(weighed(scores, controller.trust))
    assert worth(size) == pytest.approx(best, abs=1e-9)


def test_worthless_guesses_are_not_fed_where_tokens_cost_something():
    assert Controller(FrozenCost(STEEP)).choose([1.0] + [0.01] * 60) == 1


@pytest.mark.parametrize(("score", "pays"), [(0.001, False), (0.2, True)])
def test_a_jump_of_the_cost_is_taken_only_if_what_lies_behind_it_yields_more(score, pays):
    assert (Controller(FrozenCost(JUMP)).choose([1.0] + [score] * 30) > 1) is pays


def test_likely_guesses_are_all_fed_where_the_cost_is_flat():
    assert Controller(FrozenCost(FLAT)).choose([1.0] + [0.5] * 40) == 41


# -------------------------------------------------------------------------------------------------------- the evidence


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.2), (1.0, 0.8, 1.1), (3.0, 1.5, 3.0)])
def test_the_calibration_becomes_what_guesses_bring_of_what_is_expected(share, low, high):
    state = ControllerState()
    for _ in range(150):
        state.learn_yield(1.0, share)
    assert low <= state.calibration <= high


@pytest.mark.parametrize(("constant", "values"), [("STEPS", (10.0, 100.0)), ("EVIDENCE_TOKENS", (50.0, 1000.0))])
def test_prior_and_evidence_keep_their_weight(monkeypatch, constant, values):
    """The more the prior weighs, or what was seen before, the less thirty steps without success say."""
    found = []
    for value in values:
        monkeypatch.setattr(controller_module, constant, value)
        start = controller_module.STEPS
        state = ControllerState(expected=start, brought=start)
        for _ in range(200 if constant == "EVIDENCE_TOKENS" else 0):
            state.learn_yield(1.0, 1.0)
        for _ in range(30):
            state.learn_yield(1.0, 0.0)
        found.append(state.calibration)
    assert found[0] < found[1] - 0.2


def test_guesses_that_never_come_true_are_soon_fed_no_more():
    controller = Controller(FrozenCost(USUAL))
    sizes = [step(controller, [1.0, *[0.4] * 20], 0.0) for _ in range(100)]
    assert sizes[0] > 8 and sizes[-30:] == [1] * 30


# ----------------------------------------------------------------------------------------------- the budget of regret


def lost(controller: Controller, steps: int) -> float:
    """Plain steps lost in so many steps on a text whose guesses never come true."""
    seconds = 0.0
    for _ in range(steps):
        size = step(controller, [1.0, *[0.4] * 20], 0.0, 0.1 * PLAIN_S)
        seconds += controller._cost.table[size] + (0.1 * PLAIN_S if controller._looked else 0.0)
    return seconds / PLAIN_S - steps


@pytest.mark.parametrize("steps", [200, 2000, 6000])
def test_what_guessing_may_lose_is_bounded(steps):
    regret, earned = controller_module.REGRET, controller_module.EARNED
    assert lost(Controller(FrozenCost(USUAL)), steps) < regret + earned * steps + 3.0


@pytest.mark.parametrize(("constant", "values"), [("REGRET", (4.0, 40.0)), ("EARNED", (0.001, 0.02))])
def test_a_larger_budget_loses_more(monkeypatch, constant, values):
    found = []
    for value in values:
        monkeypatch.setattr(controller_module, constant, value)
        found.append(lost(Controller(FrozenCost(USUAL)), 2000))
    assert found[0] < 0.7 * found[1]


@pytest.mark.parametrize("resumed", [0.3, 1.2])
def test_an_attempt_is_saved_up_for(monkeypatch, resumed):
    monkeypatch.setattr(controller_module, "TRIAL_AFTER", 10**6)  # no peeks
    seconds = controller_module.REGRET * PLAIN_S
    controller = Controller(FrozenCost(USUAL), ControllerState(spent=True, seconds=seconds, saved_up=resumed))
    rest = 0
    while controller.skip_drafting():
        take(controller, 1, 1)
        rest += 1
    assert controller._state.saved_up == 2.0 * resumed, "the next one is larger, and comes later"
    assert rest == pytest.approx(resumed / controller_module.EARNED, abs=controller_module.STEPS)


@pytest.mark.parametrize(("score", "resumes"), [(0.99, True), (0.1, False)])
@pytest.mark.parametrize(("after", "promise"), [(48, 1.0), (96, 1.0), (48, 30.0)])
def test_a_peek_begins_an_attempt_if_its_guesses_promise_to_win(monkeypatch, score, resumes, after, promise):
    monkeypatch.setattr(controller_module, "TRIAL_AFTER", after)
    monkeypatch.setattr(controller_module, "RESUMED", promise)
    seconds = controller_module.REGRET * PLAIN_S
    controller = Controller(FrozenCost(USUAL), ControllerState(spent=True, seconds=seconds, expected=100, brought=30))
    rest = 0
    while controller.skip_drafting():
        take(controller, 1, 1)
        rest += 1
    assert rest == after
    controller.choose([1.0, *[score**depth for depth in range(1, 20)]])
    assert controller._state.spent is not (resumes and promise < 30.0)


def test_gains_of_one_text_license_no_larger_losses_in_the_next():
    state = ControllerState()
    controller = Controller(FrozenCost(USUAL), state)
    for _ in range(300):
        step(controller, [1.0, *[0.9**depth for depth in range(1, 20)]], 1.0)
    assert state.regret_left(PLAIN_S) <= controller_module.REGRET
    assert lost(Controller(FrozenCost(USUAL), state), 400) < controller_module.REGRET + 5.0


def test_a_text_that_has_become_easy_to_guess_is_found_out():
    state = ControllerState()
    assert lost(Controller(FrozenCost(USUAL), state), 1000) > 0.0 and state.spent
    controller = Controller(FrozenCost(USUAL), state)
    sizes = [step(controller, [1.0, *[0.9**depth for depth in range(1, 20)]], 1.0) for _ in range(600)]
    assert sum(size > 4 for size in sizes[-50:]) > 40


@pytest.mark.parametrize("regret", [4.0, 16.0])
def test_an_accident_is_charged_up_to_the_whole_budget(monkeypatch, regret):
    monkeypatch.setattr(controller_module, "REGRET", regret)
    controller = Controller(FrozenCost(FLAT))
    controller.skip_drafting()
    size = controller.choose([1.0, 0.9, 0.9])
    controller.observe(size, 1, 1.0, 1.0)
    assert controller._state.regret_left(PLAIN_S) == pytest.approx(1.0, abs=0.01)


def test_losses_are_counted_anew_when_plain_steps_turn_out_slower():
    """A machine that got slower is no loss of guesses, once a plain step has shown it."""
    state = ControllerState(tokens=10.0, seconds=25.0 * PLAIN_S)
    assert state.regret_left(PLAIN_S) == pytest.approx(controller_module.REGRET - 15.0)
    assert state.regret_left(2.5 * PLAIN_S) == pytest.approx(controller_module.REGRET)


# ----------------------------------------------------------------------------------------------------------- the price


@pytest.mark.parametrize("after_steps", [16, 64])
def test_a_plain_step_now_and_then_shows_what_plain_decoding_takes(monkeypatch, after_steps):
    monkeypatch.setattr(controller_module, "CHECK_AFTER", after_steps)
    controller = Controller(FrozenCost(FLAT))
    sizes = [step(controller, [1.0, *[0.9] * 9], 0.5) for _ in range(200)]
    assert [at for at, size in enumerate(sizes) if size == 1][:2] == [after_steps, 2 * after_steps + 1]


@pytest.mark.parametrize("trial", [2, 4])
def test_a_few_guesses_are_tried_where_none_have_been_fed_for_long(monkeypatch, trial):
    monkeypatch.setattr(controller_module, "TRIAL", trial)
    controller = Controller(FrozenCost(STEEP))
    sizes = [step(controller, NOTHING, 0.0) for _ in range(450)]
    assert set(sizes) <= {1, min(trial, len(grown(NOTHING, controller.thresholds())))} | {1}
    everything = [Controller(FrozenCost(STEEP), ControllerState(since_guesses=1000)).choose(NOTHING)]
    assert everything == [trial]


@pytest.mark.parametrize(("promises", "at_once"), [(0.15, True), (0.5, False)])
def test_a_trial_that_took_less_than_expected_is_followed_by_the_next(monkeypatch, promises, at_once):
    monkeypatch.setattr(controller_module, "SURPRISE", promises)
    cost, state = FrozenCost(STEEP), ControllerState(since_guesses=1000)
    controller = Controller(cost, state)
    size = controller.choose(NOTHING)
    controller.observe(size, 1, 0.7 * cost.table[size], 0.7 * cost.table[size])
    assert (controller.choose(NOTHING) == controller_module.TRIAL) is at_once


def test_the_rate_follows_what_steps_yield_and_belongs_to_the_model():
    state = ControllerState()
    controller = Controller(FrozenCost(FLAT), state)
    assert controller.rate == pytest.approx(1 / PLAIN_S)
    rates = []
    for _ in range(400):
        take(controller, 8, 3)
        rates.append(controller.rate)
    assert rates == sorted(rates) and rates[-1] == pytest.approx(3 / PLAIN_S, rel=1e-2)
    assert rates[0] < 1.3 / PLAIN_S, "one step is not believed at once"
    assert Controller(FrozenCost(FLAT), state).rate == rates[-1]


@pytest.mark.parametrize("averaged", [8, 96])
def test_rate_and_own_time_are_averaged(monkeypatch, averaged):
    monkeypatch.setattr(controller_module, "STEPS", averaged)
    controller = Controller(FrozenCost(FLAT), ControllerState(pace_tokens=averaged, pace_steps=averaged))
    for _ in range(averaged):
        take(controller, 8, 3)
    assert controller.rate == pytest.approx((1.0 + 2.0 * 0.64) / PLAIN_S, rel=0.06)


@given(rising, steps)
def test_the_rate_is_never_below_that_of_plain_decoding(increments, history):
    controller = after(any_cost(increments), history)
    assert controller.rate >= 0.999 / PLAIN_S


def test_the_librarys_own_time_counts_against_a_node():
    sizes = []
    for own_s in (0.0, 20.0 * PLAIN_S):
        controller = Controller(FrozenCost({1: 1.0, 256: 2.0}))
        for _ in range(60):
            take(controller, 30, 1, own_s)
        sizes.append((controller.choose([1.0] + [0.05] * 40), controller.fill_to(1)))
    (size, explored), (less, explored_less) = sizes
    assert size > less and explored > explored_less


def test_looking_without_feeding_does_not_make_nodes_dear():
    """The library's own time is mostly that of looking: 290 us, and 7 us for each node."""
    controller = Controller(FrozenCost({1: 1.0, 256: 1.2}))
    for _ in range(100):
        take(controller, 1, 1, own_s=290e-6)
    own_s = controller._state.node_s * (16 + controller_module.LOOK_NODES)
    assert own_s == pytest.approx(290e-6 + 15 * 7e-6, rel=0.1)


@pytest.mark.parametrize("outlier", [2.0, 6.0])
def test_a_step_that_compiled_something_is_not_held_against_guesses(monkeypatch, outlier):
    monkeypatch.setattr(controller_module, "OUTLIER", outlier)
    controller = Controller(FrozenCost(FLAT))
    controller.skip_drafting()
    size = controller.choose([1.0, *[0.9] * 5])
    controller.observe(size, 3.0, 8.0 + controller._cost.table[size], controller._cost.table[size])
    assert controller._state.node_s == pytest.approx(outlier * PLAIN_S / (size + 40) / 24)
    assert controller.choose([1.0, *[0.9] * 5]) == size


def test_the_cost_is_told_of_the_models_time_alone():
    cost = FrozenCost(FLAT)
    Controller(cost).observe(7, 2, 0.5, 0.3)
    assert cost.passes == [(7, 0.3)]


def test_passes_that_cannot_be_timed_alone_are_learned_as_whole_steps():
    """As of an engine that reports steps only: the curve begins as a guess, and no trial pass is made."""
    cost = StepCost([PLAIN_S] * len(KNOTS), [0.0] * len(KNOTS))
    controller = Controller(cost)
    for _ in range(200):
        size = 1
        if not controller.skip_drafting():
            size = controller.choose([1.0, *[0.5 / depth for depth in range(1, 30)]])
        seconds = PLAIN_S * (1.0 + 0.2 * (size - 1))
        controller.observe(size, 1.0 + 0.3 * (size > 1), seconds, seconds)
    assert cost.table[8] > 1.5 * cost.table[1]
    assert controller.choose([1.0, *[0.5 / depth for depth in range(1, 30)]]) < 8


def test_a_draft_that_costs_time_of_its_own_is_charged_to_the_budget():
    """Such as passes of a model's own draft layers: they are part of a step's seconds, and not of its pass."""
    ledgers = []
    for draft_s in (0.0, 0.5 * PLAIN_S):
        controller = Controller(FrozenCost(FLAT))
        for _ in range(20):
            controller.skip_drafting()
            take(controller, controller.choose([1.0, 0.3]), 1.3, own_s=draft_s)
        ledgers.append(controller._state.regret_left(PLAIN_S))
    assert ledgers[0] > ledgers[1] + 3.0


# --------------------------------------------------------------------------------------------------- growing in stages


@given(rising, steps)
def test_stages_ascend_and_ask_ever_more_of_a_node(increments, history):
    controller = after(any_cost(increments), history)
    sizes, least = map(list, zip(*controller.thresholds(), strict=True))
    assert sizes == sorted(sizes) and sizes[-1] <= LARGEST and min(least) >= 0.0


@given(rising, steps, falling_scores)
def test_growing_in_stages_comes_to_the_tree_that_growing_to_the_end_would_come_to(slopes, history, scores):
    """On a convex curve. Elsewhere a stage may end between corners, where the marginals promise too much."""
    height, heights = 1.0, {1: 1.0}
    for left, right, slope in zip(KNOTS, KNOTS[1:], sorted(slopes), strict=False):
        heights[right] = height = height + 0.2 * slope * (right - left)
    controller = after(FrozenCost(heights), history)
    controller._state.since_guesses = 0
    patient, staged = copy.deepcopy(controller), grown(scores, controller.thresholds())
    assert controller.choose(weighed(staged, controller.trust)) == pytest.approx(
        patient.choose(weighed(scores, patient.trust)), abs=1
    )


def test_growing_in_stages_spares_what_cannot_pay():
    scores = [1.0] + [0.9] * 10 + [0.001] * 100
    assert len(grown(scores, Controller(FrozenCost({1: 1.0, 256: 60.0})).thresholds())) == 11


@given(rising, steps, st.integers(1, LARGEST))
def test_what_is_explored_is_bounded_and_no_less_than_the_tree(increments, history, size):
    assert size <= after(any_cost(increments), history).fill_to(size) <= LARGEST


def test_exploring_stops_where_tokens_cost_more_than_they_teach():
    assert Controller(FrozenCost(FLAT)).fill_to(1) == LARGEST
    assert Controller(FrozenCost(STEEP)).fill_to(1) == 1
    assert Controller(FrozenCost({1: 1.0, 32: 1.001, 256: 100.0})).fill_to(1) == 32


@pytest.mark.parametrize(("processes", "most"), [(1, LARGEST), (2, 256), (4, LARGEST_SHARED), (8, LARGEST_SHARED)])
def test_several_processes_feed_about_as_many_each_as_one_alone(processes, most):
    assert most_fed(processes) == most
    assert Controller(FrozenCost(FLAT), most=most).fill_to(1) == most


# ------------------------------------------------------------------------------------------- guesses from other texts


def test_a_chain_pays_where_it_would_be_fed_if_there_was_nothing_else():
    controller = Controller(FrozenCost(USUAL))
    for scores in ([], [0.01], [0.3] * 3, [0.9, 0.8, 0.7], [0.99] * 20):
        assert controller.pays(scores) is (copy.deepcopy(controller).choose([1.0, *scores], []) > 1)
    assert not controller.pays([0.3]) and controller.pays([0.99] * 20)


def test_a_plain_step_that_is_due_is_taken_whatever_chain_there_is():
    controller = Controller(FrozenCost(FLAT))
    while not controller.skip_drafting():
        assert controller.pays([0.9] * 9)
        take(controller, controller.choose([1.0, *[0.9] * 3]), 2)
    assert not controller.pays([0.9] * 9)
    take(controller, 1, 1)
    assert not controller.skip_drafting() and controller.pays([0.9] * 9)


@pytest.mark.parametrize("brought", [1, 60])
def test_chains_of_other_texts_teach_nothing_about_the_memory(brought):
    """Neither that it finds much, when they come true, nor that it is a loss, when they do not."""
    controller = Controller(FrozenCost(FLAT))
    before = copy.deepcopy(controller._state)
    for _ in range(30):
        take(controller, controller.choose([1.0] + [0.95] * 60, []), brought)
    state = controller._state
    assert (state.calibration, state.tokens, state.spent) == (before.calibration, before.tokens, False)
