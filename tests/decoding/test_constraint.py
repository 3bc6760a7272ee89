"""What must follow is fed first, what cannot is not fed; by every method."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import filled_memory
from random_texts import Fixed, path_to

from lade.config import LookaheadConfig
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.drafter import Guess, fitting
from lade.decoding.drafting.lookahead import LookaheadDrafter


class Rules:
    """A lead, and behind it tokens that are allowed."""

    def __init__(self, lead, allowed):
        self._lead, self._allowed = lead, allowed

    def lead(self, context):
        return self._lead

    def fits(self, tokens):
        for at, token in enumerate(tokens):
            if token not in (self._lead[at : at + 1] or self._allowed):
                return at
        return len(tokens)


def paths_of(tree):
    return [tuple(path_to(tree, node)) for node in range(len(tree))]


@given(st.lists(st.integers(0, 9), max_size=20), st.sets(st.integers(0, 9)), st.integers(2, 24), st.integers(0, 3))
def test_the_adaptive_tree_begins_with_the_lead_and_has_nothing_that_cannot_follow(lead, allowed, budget, seed):
    rules, memory = Rules(lead, allowed), filled_memory(seed)
    sources = [Fixed(Guess([1, 2, 3], "prediction", [0.9, 0.8, 0.7]), Guess([4, 5], "text"))]
    drafter = AdaptiveDrafter(LookaheadConfig(memory=memory, budget=budget), sources=sources, constraint=rules)
    drafter.begin([3, 1, 4], 2)
    tree = drafter.draft([3, 1, 4], None).tree
    fed = min(len(lead), budget - 1)
    assert tree.ids[1 : 1 + fed] == lead[:fed] and tree.parents[1 : 1 + fed] == list(range(fed))
    assert tree.sources[1 : 1 + fed] == ["grammar"] * fed and len(tree) <= budget
    assert all(rules.fits(path) == len(path) for path in paths_of(tree))
    if len(lead) < budget - 1 and 1 in allowed:
        assert (*lead, 1) in paths_of(tree)


def test_nodes_that_stay_keep_their_contexts():
    allowed = {2, 3, 5, 7}
    memory = filled_memory(1)
    drafter = AdaptiveDrafter(LookaheadConfig(memory=memory, budget=24), constraint=Rules([], allowed))
    free = AdaptiveDrafter(LookaheadConfig(memory=filled_memory(1), budget=24))
    context = [3, 1, 4]
    assert len(paths_of(free.draft(context, None).tree)) > len(paths_of(drafter.draft(context, None).tree)) > 1
    grower = drafter._tree
    tree = drafter.draft(context, None).tree
    tails = [[*context, *path][::-1] for path in paths_of(tree)]
    for node, tail in enumerate(tails):
        known = grower.contexts([node])[0].tolist()
        assert known[: len(tail)] == tail[: len(known)]


@pytest.mark.parametrize("lead", [[], [7], [7, 8, 9, 1, 2, 3]])
def test_the_papers_method_keeps_its_sizes(lead):
    config = LookaheadConfig(0, 4, 3)
    guesses = Fixed(Guess([1, 2, 3, 4], "x"), Guess([9, 9], "x"), Guess([1, 1, 9], "x"), Guess([2, 2, 2], "x"))
    drafter = LookaheadDrafter(config, (), [guesses], Rules(lead, {1, 2, 3}))
    tree = drafter.draft([5], None).tree
    if lead:
        assert paths_of(tree) == [tuple(lead[:length]) for length in range(min(len(lead), 3) + 1)]
        assert set(tree.sources[1:]) == {"grammar"}
    else:
        assert {(1, 2, 3), (1, 1), (2, 2, 2)} <= set(paths_of(tree))


def test_fitting_asks_about_whole_paths_only():
    asked = []

    class Counting(Rules):
        def fits(self, tokens):
            asked.append(tuple(tokens))
            return super().fits(tokens)

    paths = [(), (1,), (1, 2), (1, 2, 3), (1, 9), (4,)]
    assert fitting(Counting([], {1, 2, 3, 4}), paths) == [0, 1, 2, 3, 5]
    assert asked == [(4,), (1, 9), (1, 2, 3)]
