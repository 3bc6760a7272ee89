"""How large trees are: the size that pays best, what it is held to besides, and when looking for guesses rests."""

import copy
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

import pytest
from growing import grown, weighed
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting import controller as controller_module
from lade.decoding.drafting import news as news_module
from lade.decoding.drafting.controller import LARGEST, TUITION, Controller
from lade.decoding.drafting.habits import Habits
from lade.decoding.drafting.tree_size import FixedBudget
from lade.tuning.step_cost import KNOTS, StepCost

PLAIN_S = 0.01


class FrozenCost:
    """A curve that passes do not move; it keeps what it is told."""

    def __init__(self, curve: StepCost) -> None:
        self.table, self.marginals, self.corners = curve.table, curve.marginals, curve.corners
        self.passes: list[tuple[int, float]] = []

    def observe(self, size: int, seconds: float) -> None:
        self.passes.append((size, seconds))


def cost_of(heights: dict[int, float]) -> FrozenCost:
    """Heights are relative to a plain step."""
    return FrozenCost(StepCost.of({size: [PLAIN_S * height] for size, height in heights.items()}))


FLAT = {1: 1.0, 256: 1.01}
STEEP = {1: 1.0, 256: 256.0}
JUMP = {1: 1.0, 2: 3.0, 256: 3.01}  # the second token costs two plain steps, the others nothing
TIMID = {1: 1.0, 256: 60.0}  # a node must be accepted every fourth time or so

rising = st.lists(st.floats(0.0, 3.0), min_size=len(KNOTS) - 1, max_size=len(KNOTS) - 1)
falling_scores = st.lists(st.floats(0.001, 1.0), max_size=LARGEST - 1).map(lambda s: [1.0, *sorted(s, reverse=True)])
steps = st.lists(st.tuples(falling_scores, st.floats(0.0, 1.0), st.floats(0.0, 0.5)), max_size=40)


def any_cost(increments: Sequence[float]) -> FrozenCost:
    return cost_of(dict(zip(KNOTS, accumulate([1.0, *increments]), strict=True)))


def convex_cost(slopes: Sequence[float]) -> FrozenCost:
    """Straight between corners and ever steeper, so that the curve is its own hull."""
    widths = [right - left for left, right in pairwise(KNOTS)]
    return any_cost([0.2 * slope * width for slope, width in zip(sorted(slopes), widths, strict=True)])


def take(controller: Controller, cost: FrozenCost, size: int, emitted: int, own_s: float = 0.0) -> None:
    """A step of this size; the library itself takes `own_s` of it."""
    controller.observe(size, emitted, cost.table[size] + own_s, cost.table[size])


def after(cost: FrozenCost, history: Sequence[tuple[list[float], float, float]]) -> Controller:
    """A controller that has been through steps: scores, which share of the tree was accepted, own time."""
    controller = Controller(cost)
    for scores, accepted, own in history:
        if not controller.skip_drafting():
            size = controller.choose(weighed(scores, controller.trust))
            take(controller, cost, size, 1 + int(accepted * (size - 1)), own * PLAIN_S)
    return controller


def usual_size(controller: Controller) -> int:
    return controller.thresholds()[0][0]


def looks(controller: Controller, cost: FrozenCost, steps: int, scores: Sequence[float], own_s: float) -> list[bool]:
    """For each of some steps that nothing comes of: whether the controller looked for guesses."""
    looked = []
    for _ in range(steps):
        looked.append(not controller.skip_drafting())
        size = controller.choose(scores) if looked[-1] else 1
        take(controller, cost, size, 1, own_s if looked[-1] else 0.0)
    return looked


def rests(looked: Sequence[bool]) -> list[int]:
    """Lengths of all rests that were over before the end."""
    runs = [(look, len(list(run))) for look, run in groupby(looked)]
    return [length for look, length in runs[:-1] if not look]


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


# --------------------------------------------------------------------------------------------------------- what pays


def test_worthless_guesses_are_not_fed_where_tokens_cost_something():
    assert Controller(cost_of(STEEP)).choose([1.0] + [0.01] * 60) == 1


@pytest.mark.parametrize(("score", "pays"), [(0.02, False), (0.2, True)])
def test_a_jump_of_the_cost_is_taken_only_if_what_lies_behind_it_yields_more(score, pays):
    """The jump costs two tokens; thirty nodes yield 0.6 or 6."""
    assert (Controller(cost_of(JUMP)).choose([1.0] + [score] * 30) > 1) is pays


def test_likely_guesses_are_all_fed_where_the_cost_is_flat():
    assert Controller(cost_of(FLAT)).choose([1.0] + [0.5] * 40) == 41


@given(rising, falling_scores, st.sampled_from([1.0, 1.1, 1.5, 3.0]))
def test_better_scores_never_mean_a_smaller_tree(increments, scores, factor):
    """All of them better by the same factor: then so is each node next to what it costs."""
    better = [1.0, *(factor * score for score in scores[1:])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_module, "TUITION", 0.0)
        patch.setattr(news_module, "NEWS", 0.0)
        ours = [Controller(any_cost(increments)).choose(each) for each in (scores, better)]
    assert ours[0] <= ours[1]


def test_the_faster_decoding_has_been_the_more_a_step_must_yield(monkeypatch):
    monkeypatch.setattr(news_module, "NEWS", 0.0)  # counts the more, the more guesses bring
    scores, sizes = [1.0] + [0.9**n for n in range(1, 40)], []
    for emitted in (1, 2, 4, 8):
        cost = cost_of(TIMID)
        controller = Controller(cost)
        for _ in range(200):
            take(controller, cost, 1, emitted)
        sizes.append(controller.choose(scores))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@given(rising, steps, falling_scores)
def test_the_size_maximises_what_a_step_yields_less_what_its_time_is_worth(increments, history, scores):
    """E(S) - r t(S), by brute force; apart from what is learned, and with no time of the library's own.

    What scores promise beyond the first token counts as far as earlier ones kept their promise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_module, "TUITION", 0.0)
        patch.setattr(news_module, "NEWS", 0.0)
        cost = any_cost(increments)
        controller = after(cost, [(seen, accepted, 0.0) for seen, accepted, _ in history])
        rate = controller.rate
        trust = controller._habits.trust
        sizes = range(1, len(scores) + 1)
        worth = {size: 1.0 + trust * sum(scores[1:size]) - rate * cost.table[size] for size in sizes}
        assert worth[controller.choose(weighed(scores, trust))] == pytest.approx(max(worth.values()), abs=1e-9)


@given(rising, steps, falling_scores)
def test_the_usual_size_is_fed_where_that_costs_less_than_the_tuition(increments, history, scores):
    """Everything counts: a node's news, the library's own time, and the tuition."""
    cost = any_cost(increments)
    controller = after(cost, history)
    rate, use, habits = controller.rate, controller._use_of_news, controller._habits
    worth = {
        size: 1.0
        + habits.trust * sum(scores[1:size])
        + use * news_module.taught(size)
        - rate * (cost.table[size] + ((size + controller_module._LEAST_NODES) * habits.node_s if size > 1 else 0.0))
        for size in range(1, len(scores) + 1)
    }
    best = max(worth.values())
    size = controller.choose(weighed(scores, habits.trust))
    usual = min(usual_size(controller), len(scores))
    if worth[size] < best - 1e-9:
        assert size == usual and worth[size] > best - TUITION - 1e-9
    elif size < usual:
        assert worth[usual] <= best - TUITION + 1e-9


@pytest.mark.parametrize(("news", "size"), [(0.01, 1), (0.22, 7), (2.0, 51)])
def test_what_a_node_teaches_counts_for_it(monkeypatch, news, size):
    """A node costs a hundredth of a plain step, and is never accepted."""
    monkeypatch.setattr(news_module, "NEWS", news)
    monkeypatch.setattr(controller_module, "TUITION", 0.0)
    assert Controller(cost_of({1: 1.0, 256: 3.55})).choose([1.0] + [1e-9] * 50) == size


def test_each_node_teaches_less_than_the_one_before():
    gains = [news_module.taught(size) - news_module.taught(size - 1) for size in range(2, LARGEST)]
    assert news_module.taught(1) == 0.0 and gains == sorted(gains, reverse=True)
    assert gains[20:] == pytest.approx([news_module.taught_by_last(size) for size in range(22, LARGEST)], rel=0.03)


@pytest.mark.parametrize("cost", [0.001, 0.01, 0.1])
def test_the_most_that_is_worth_it_teaches_as_much_as_it_costs(cost):
    size = news_module.most_worth(cost, 0.5)
    teaches = [0.5 * news_module.taught_by_last(each) for each in (max(2, size), size + 1)]
    assert teaches[1] < cost and (teaches[0] >= cost or size <= 1)
    assert news_module.most_worth(cost, 0.0) <= 1 < LARGEST < news_module.most_worth(0.0, 0.5)


def test_looking_without_feeding_does_not_make_nodes_dear():
    """The library's own time is mostly that of looking: 290 us, and 7 us for each node."""
    cost, habits = cost_of({1: 1.0, 256: 1.2}), Habits()
    controller = Controller(cost, habits)
    for _ in range(200):
        take(controller, cost, 1, 1, own_s=290e-6)
    own_s = habits.node_s * (16 + controller_module._LEAST_NODES)
    assert own_s == pytest.approx(290e-6 + 15 * 7e-6, rel=0.1)


def test_a_plain_step_is_weighed_with_its_own_time_too(monkeypatch):
    """It takes 1.2 of its pass, one with guesses 1.25: they are fed if they bring a tenth, and not if a hundredth."""
    monkeypatch.setattr(controller_module, "TUITION", 0.0)
    cost, habits = cost_of({1: 1.0, 8: 1.0, 256: 100.0}), Habits(gain=0.0)
    habits.plain_own_s, habits.node_s = 0.2 * PLAIN_S, 0.25 * PLAIN_S / (8 + controller_module._LEAST_NODES)
    assert Controller(cost, habits).choose([1.0, *[0.0143] * 7]) == 8
    assert Controller(cost, habits).choose([1.0, *[0.0014] * 7]) == 1


def test_what_was_usual_is_fed_for_a_while_and_not_for_ever(monkeypatch):
    """Forty nodes cost some 0.1 tokens, less than the tuition; four times as much is too dear."""
    monkeypatch.setattr(news_module, "NEWS", 0.0)
    monkeypatch.setattr(controller_module, "TUITION", 0.15)
    poor = [1.0] + [1e-6] * 60
    first, last = [], []
    for height in (1.36, 2.44):
        cost = cost_of({1: 1.0, 256: height})
        controller = Controller(cost)
        for _ in range(300):
            take(controller, cost, controller.choose([1.0] + [0.3] * 40), 2)
        assert 35 < usual_size(controller) <= 41
        sizes = [controller.choose(poor) for _ in range(300)]
        assert sizes[-1] == 1
        first.append(sizes[0])
        last.append(sizes.index(1))
    assert first[0] > 30 and last[0] > 10
    assert first[1] == 1


# -------------------------------------------------------------------------------------------------- growing in stages


@given(rising, steps)
def test_stages_ascend_from_the_usual_size_and_ask_ever_more_of_a_node(increments, history):
    controller = after(any_cost(increments), history)
    sizes, least = map(list, zip(*controller.thresholds(), strict=True))
    assert sizes == sorted(sizes) and sizes[0] >= 1 and sizes[-1] <= LARGEST
    assert least[0] == 0.0 and least == sorted(least)


@given(rising, steps, falling_scores)
def test_growing_in_stages_comes_to_the_tree_that_growing_to_the_end_would_come_to(slopes, history, scores):
    """On a convex curve. Elsewhere a stage may end between corners, where the marginals promise too much."""
    controller = after(convex_cost(slopes), history)
    stages = controller.thresholds()
    everything = scores[: stages[-1][0]]
    patient, staged = copy.deepcopy(controller), grown(scores, stages)
    sizes = [each.choose(weighed(some, each.trust)) for each, some in ((patient, everything), (controller, staged))]
    rate = patient.rate

    def worth(size: int) -> float:
        own = patient._use_of_news * news_module.taught(size) - rate * patient._habits.node_s * size
        return 1.0 + patient._habits.trust * sum(scores[1:size]) + own - rate * patient._cost.table[size]

    assert sizes[0] == sizes[1] or worth(sizes[0]) == pytest.approx(worth(sizes[1]), abs=1e-6)


def test_growing_in_stages_spares_what_cannot_pay():
    cost = cost_of(TIMID)
    scores = [1.0] + [0.9] * 10 + [0.01] * 100
    stages = Controller(cost).thresholds()
    assert usual_size(Controller(cost)) < 11 < stages[-1][0], "or else this shows nothing"
    assert len(grown(scores, stages)) == 11


def test_a_stage_asks_what_the_nodes_before_its_corner_cost_and_not_those_behind():
    controller = Controller(cost_of({1: 1.0, 8: 1.05, 256: 250.0}))
    assert usual_size(controller) < 8 < controller.thresholds()[-1][0], "or else this shows nothing"
    assert len(grown([1.0] + [0.3] * 30, controller.thresholds())) == 8


# -------------------------------------------------------------------------------------------------------- exploring


@given(rising, steps, st.integers(1, LARGEST))
def test_what_is_explored_is_bounded_and_no_less_than_the_tree_and_the_usual_size(increments, history, size):
    controller = after(any_cost(increments), history)
    assert max(size, usual_size(controller)) <= controller.fill_to(size) <= LARGEST


@pytest.mark.parametrize("flat", [{1: 1.0, 256: 1.01}, {1: 1.0, 128: 1.005, 192: 50.0}, {1: 1.0, 96: 1.0, 256: 1.01}])
def test_exploring_stops_where_tokens_cost_more_than_they_teach(flat):
    """Whether or not the largest tree lies at a corner of the curve."""
    assert Controller(cost_of(flat)).fill_to(1) == LARGEST
    steep = Controller(cost_of(STEEP))
    assert steep.fill_to(1) == usual_size(steep)


def test_exploring_goes_as_far_as_the_curve_is_flat():
    assert Controller(cost_of({1: 1.0, 32: 1.001, 256: 100.0})).fill_to(1) == 32


def test_nothing_is_explored_where_what_is_learned_never_helps():
    """A step that yields three tokens in the time of three plain ones leaves the rate as it is."""
    cost = cost_of({1: 1.0, 256: 1.15})
    controller = Controller(cost)
    assert controller.fill_to(1) == LARGEST
    for _ in range(400):
        take(controller, cost, controller.choose([1.0]), 1)
    assert controller.fill_to(1) == 1
    for _ in range(20):
        controller.observe(1, 3, 3 * PLAIN_S, 3 * PLAIN_S)
    assert controller.fill_to(1) == LARGEST


# ---------------------------------------------------------------------------------------------------------- resting

POOR = [1.0, *[0.001] * 8]


def test_idle_looks_are_followed_by_ever_longer_rests_up_to_a_bound():
    cost = cost_of(STEEP)
    looked = looks(Controller(cost), cost, 2000, POOR, PLAIN_S)
    lengths = rests(looked)
    assert looked[0] and looked[1], "not before it has tried"
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert lengths[-1] == lengths[-5] < 100
    assert looked[-500:].count(True) > 1, "it always looks again"
    runs = [len(list(run)) for look, run in groupby(looked[200:]) if look]
    assert set(runs) == {1}, "one look wakes it, or none"


@pytest.mark.parametrize("own_s", [0.0, 1e-5 * PLAIN_S])
def test_where_looking_is_cheap_it_never_rests(own_s):
    cost = cost_of(STEEP)
    assert all(looks(Controller(cost), cost, 500, POOR, own_s))


def test_what_looking_costs_is_not_forgotten_in_rests():
    """Rests have no such cost. Were they averaged in, looking would seem cheap after each of them."""
    cost = cost_of(STEEP)
    looked = looks(Controller(cost), cost, 3000, POOR, 0.05 * PLAIN_S)
    assert {len(list(run)) for look, run in groupby(looked[200:]) if look} == {1}


def test_the_first_choice_that_is_not_plain_ends_the_resting():
    cost = cost_of(STEEP)
    controller = Controller(cost)
    assert looks(controller, cost, 1000, POOR, PLAIN_S).count(False) > 500
    while controller.skip_drafting():
        take(controller, cost, 1, 1)
    assert controller.choose([1.0] + [0.99999] * 3) == 1, "two tokens cost as much as two steps"
    sharp = cost_of({1: 1.0, 256: 2.0})
    controller._cost = sharp
    while controller.skip_drafting():
        take(controller, sharp, 1, 1)
    assert controller.choose([1.0] + [0.9] * 9) > 1
    assert looks(controller, sharp, 3, [1.0], PLAIN_S) == [True] * 3
    assert not all(looks(controller, sharp, 500, [1.0], PLAIN_S)), "until it has been in vain for a while again"


# --------------------------------------------------------------------------------------------------------- learning


def test_the_rate_follows_what_steps_yield():
    cost = cost_of(FLAT)
    controller = Controller(cost)
    assert controller.rate == pytest.approx(1 / PLAIN_S)
    rates = []
    for _ in range(400):
        controller.observe(8, 3, 2 * PLAIN_S, PLAIN_S)
        rates.append(controller.rate)
    assert rates == sorted(rates) and rates[-1] == pytest.approx(1.5 / PLAIN_S, rel=1e-3)
    assert rates[0] < 1.1 / PLAIN_S, "one step is not believed at once"


@given(rising, steps, st.integers(1, 8), st.floats(0.1, 100.0))
def test_the_rate_is_never_below_that_of_plain_decoding(increments, history, emitted, slower):
    cost = any_cost(increments)
    controller = after(cost, history)
    for _ in range(20):
        controller.observe(4, emitted, slower * PLAIN_S, PLAIN_S)
        assert controller.rate >= 1 / cost.table[1]


def test_the_librarys_own_time_counts_against_a_node():
    scores, sizes = [1.0] + [0.3] * 40, []
    for own_s in (0.0, 20.0 * PLAIN_S):
        cost = cost_of({1: 1.0, 256: 2.0})
        controller = Controller(cost)
        for _ in range(100):
            take(controller, cost, 30, 1, own_s)
        sizes.append((controller.choose(scores), controller.thresholds()[-1][1], -controller.fill_to(1)))
    (free, least_free, explored_free), (dear, least_dear, explored_dear) = sizes
    assert free == 41 and dear < free
    assert least_free < least_dear and explored_free < explored_dear


def test_the_cost_is_told_of_the_models_time_alone():
    cost = cost_of(FLAT)
    Controller(cost).observe(7, 2, 0.5, 0.3)
    assert cost.passes == [(7, 0.3)]


# ------------------------------------------------------------------------------------------- guesses from other texts


USUAL = {1: 1.0, 2: 1.4, 16: 2.0, 256: 12.0}


def test_a_chain_pays_where_it_would_be_fed_if_there_was_nothing_else():
    controller = Controller(cost_of(USUAL))
    for scores in ([], [0.01], [0.3] * 3, [0.9, 0.8, 0.7], [0.99] * 20):
        assert controller.pays(scores) is (copy.deepcopy(controller).choose([1.0, *scores]) > 1)
    assert not controller.pays([0.3]) and controller.pays([0.99] * 20)


def test_a_plain_step_that_is_due_is_taken_whatever_chain_there_is():
    cost = cost_of(FLAT)
    controller = Controller(cost)
    for _ in range(1000):
        if controller.skip_drafting():
            break
        assert controller.pays([0.9] * 9)
        take(controller, cost, 4, 2)
    assert not controller.pays([0.9] * 9)
    take(controller, cost, 1, 1)
    assert not controller.skip_drafting() and controller.pays([0.9] * 9)


def test_chains_of_other_texts_teach_nothing_about_the_memory():
    """Neither that it finds much, when they come true, nor that it deserves no trust, when they do not."""
    cost = cost_of(FLAT)
    alone, beside = Controller(cost), Controller(cost)
    for brought in (60, 1):
        for _ in range(30):
            for controller in (alone, beside):
                take(controller, cost, controller.choose([1.0, 0.1]), 1)
            take(beside, cost, beside.choose([1.0] + [0.95] * 60, [1.0, 0.1]), brought)
            take(beside, cost, beside.choose([1.0] + [0.95] * 60, []), brought)  # while no search is made
    habits = beside._habits
    assert (habits.trust, habits.gain) == (alone._habits.trust, alone._habits.gain)
    assert habits.usual < 2.0 + 1e-9


def test_rests_of_the_search_grow_although_chains_are_fed():
    cost = cost_of(USUAL)
    controller, searched = Controller(cost), []
    for step in range(200):
        searched.append(not controller.skip_drafting())
        chain, own = step % 2, [1.0] if searched[-1] else []
        size = controller.choose([1.0] + [0.95] * 12, own) if chain else controller.choose(own) if own else 1
        take(controller, cost, size, 1 + 9 * chain, 0.2 * PLAIN_S)
    assert sum(searched[100:]) < 20
