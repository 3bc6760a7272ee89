"""`lade.peers`: each drafts what its paper says."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade import ConfigError
from lade.decoding.drafting.controller import LARGEST
from lade.peers import Jacobi, PromptLookup, Suffix, TokenRecycling, template


def drafted(drafter, text, request=0):
    """The tokens from the root to each node of what a drafter proposes behind a prompt."""
    drafter.begin(request, text)
    found = nodes(drafter, text, request)
    drafter.end(request)
    return found


def nodes(drafter, text, request=0):
    proposed = drafter.propose(request, tuple(text), 100)
    assert len(proposed) <= drafter.continuations
    paths = [tuple(getattr(each, "tokens", each)) for each in proposed]
    return {path[:length] for path in paths for length in range(1, len(path) + 1)}


def test_prompt_lookup_takes_the_longest_match_and_the_latest_place_first():
    text = [1, 2, 3, 7, 0, 2, 3, 8, 0, 9, 3, 6, 0, 1, 2, 3]
    assert drafted(PromptLookup(2), text) == {(7,)}, "three tokens agree there"
    assert drafted(PromptLookup(3), text) == {(7,), (7, 0)}
    wide = drafted(PromptLookup(40), text)
    assert {(7,), (8,), (6,)} <= wide and (7, 0, 2, 3, 8) in wide
    assert drafted(PromptLookup(2), [2, 8, 2, 6, 2]) == {(6,)}, "the latest of two places"


def test_suffix_drafts_what_followed_most_often_by_the_surest_end_also_behind_what_a_grammar_forces():
    often = [5, 1, 0, 5, 2, 0, 5, 2, 0, 5, 2, 0, 5]
    assert drafted(Suffix(3), often) == {(2,), (2, 0)}
    assert (1,) in drafted(Suffix(20), often)
    assert drafted(Suffix(2), [8, 5, 1, 9, 5, 2, 9, 5, 2, 8, 5]) == {(1,)}, "2 is commoner, but not after 8, 5"
    drafter = Suffix(3)
    drafter.begin(0, [1, 2, 3, 4, 9])
    assert nodes(drafter, [1, 2, 3, 4, 9]) == set()
    assert nodes(drafter, [1, 2, 3, 4, 9, 1, 2]) == {(3,), (3, 4)}
    drafter.learn(0, [1])
    assert nodes(drafter, [1, 2, 3, 4, 9, 1]) == {(2,), (2, 3)}, "forced tokens were not counted"


@pytest.mark.parametrize(("budget", "sure"), [(2, {2: 1.0}), (20, {1: 1 / 3, 2: 2 / 3})])
def test_suffix_is_as_sure_as_the_counts_of_the_end_say(budget, sure):
    """Of 0, 5, which 2 alone followed, where one token is drafted; of 5, where a tree is."""
    text, drafter = (5, 1, 0, 5, 2, 0, 5, 2, 0, 5), Suffix(budget)
    drafter.begin(0, text)
    assert {each.tokens[0]: each.probabilities[0] for each in drafter.propose(0, text, 99)} == sure


def answered(drafter, answer):
    drafter.begin(0, [0])
    drafter.learn(0, answer)
    drafter.end(0)


def test_suffix_keeps_answers_if_asked_to_and_forgets_the_oldest():
    kept, not_kept = Suffix(3, keep_tokens=6), Suffix(3)
    for drafter in (kept, not_kept):
        answered(drafter, [7, 8, 9])
    assert drafted(not_kept, [1, 7]) == set()
    assert drafted(kept, [1, 7]) == {(8,), (8, 9)}
    answered(kept, [4, 5, 6])
    assert drafted(kept, [1, 7]) == {(8,), (8, 9)}
    answered(kept, [3])
    assert drafted(kept, [1, 7]) == set(), "7, 8, 9 was the oldest"
    assert drafted(kept, [1, 4]) == {(5,), (5, 6)}
    answered(kept, [*range(20, 40)])
    assert drafted(kept, [1, 34]) == {(35,), (35, 36)}, "the last six of a longer answer"
    assert drafted(kept, [1, 33]) == set()


@given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=5))
def test_what_suffix_forgets_leaves_nothing_behind(answers):
    drafter = Suffix(8, keep_tokens=8)
    for answer in answers:
        answered(drafter, answer)
    answered(drafter, [9] * 8)
    assert set(drafter._earlier.followed) == {9}


def test_token_recycling_remembers_the_last_row_of_each_token_of_the_tree_and_keeps_all_if_asked_to():
    drafter = TokenRecycling(4)
    drafter.begin(0, [0, 1])
    drafter.observe_prompt(0, [0, 1], [[7, 8], [3, 4]])
    assert nodes(drafter, [0, 1]) == {(3,), (4,)}, "nothing is known of 3"
    drafter.observe(0, [1, 3], [-1, 0], [[3, 4], [7, 8]])
    assert nodes(drafter, [1, 3]) == {(7,), (8,)}, "3 was rejected, and is known"
    assert nodes(drafter, [0, 1]) == {(3,), (3, 7), (4,)}
    drafter.begin(1, [0, 1])
    assert nodes(drafter, [0, 1], 1) == set(), "another text has a matrix of its own"
    drafter = TokenRecycling(2, keep=True)
    drafter.begin(0, [1])
    drafter.observe_prompt(0, [1], [[3]])
    drafter.end(0)
    assert drafted(drafter, [5, 1]) == {(3,)}


@given(st.integers(0, 80))
def test_the_template_is_a_tree_of_the_likeliest_paths(size):
    paths = template(size)
    assert len(set(paths)) == len(paths) == size
    assert all(path[:-1] in paths[:place] or len(path) == 1 for place, path in enumerate(paths))
    assert all((*path[:-1], path[-1] - 1) in paths[:place] for place, path in enumerate(paths) if path[-1])


def test_jacobis_choices_after_the_accepted_tokens_and_forced_ones_are_the_next_guesses_and_others_stay():
    drafter = Jacobi(3)
    drafter.begin(0, [5, 6])
    drafter.learn(0, [1])
    (chain,) = drafter.propose(0, (5, 6, 1), 9)
    assert len(chain) == 3 and set(chain) <= {5, 6}, "drawn from the prompt"
    drafter.learn(0, [chain[0], 9])
    # The chain among other nodes; the second of its guesses was wrong.
    drafter.observe(0, [1, 8, *chain], [-1, 0, 0, 2, 3], [[chain[0]], [7], [9], [10], [11]])
    (found,) = drafter.propose(0, (5, 6, 1, chain[0], 9), 9)
    assert found[:2] == [10, 11]
    assert len(found) == 3 and found[2] in {5, 6}
    drafter = Jacobi(5, seed=3)
    drafter.begin(0, [*range(20, 40)])
    (chain,) = drafter.propose(0, tuple(range(20, 40)), 9)
    drafter.learn(0, [1])
    drafter.observe(0, [39, chain[0]], [-1, 0], [[1], [2]])
    (found,) = drafter.propose(0, (*range(20, 40), 1), 9)
    assert found[:4] == [2, *chain[2:]]
    drafter = Jacobi(4)
    drafter.begin(0, [3, 4])
    (behind,) = drafter.propose(0, (3, 4, 7, 8), 9)
    assert len(behind) == 2
    drafter.learn(0, [7])
    drafter.observe(0, [4, 7, 8, *behind], [-1, 0, 1, 2, 3], [[7], [30], [31], [32], [33]])
    assert drafter.propose(0, (3, 4, 7), 9)[0] == [30, 31, 32, 33]


def test_the_same_seed_draws_the_same_guesses():
    before = random.getstate()
    chains = []
    for seed in (0, 0, 1):
        drafter = Jacobi(20, seed=seed)
        drafter.begin(0, [*range(12)])
        chains += drafter.propose(0, tuple(range(12)), 99)
    assert chains[0] == chains[1] != chains[2]
    assert random.getstate() == before


@pytest.mark.parametrize("kind", [Suffix, TokenRecycling, PromptLookup])
@pytest.mark.parametrize("budget", [0, -1, True, 2.0, "8", None, LARGEST + 1])
def test_a_budget_out_of_range_is_refused(kind, budget):
    with pytest.raises(ConfigError, match=f"^budget={budget!r} .*whole number >= 1 and <= {LARGEST}"):
        kind(budget)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Jacobi(0), "guesses"),
        (lambda: Jacobi(True), "guesses"),
        (lambda: Jacobi(LARGEST), "guesses"),
        (lambda: Jacobi(seed=-1), "seed"),
        (lambda: Suffix(keep_tokens=-1), "keep_tokens"),
        (lambda: Suffix(keep_tokens=None), "keep_tokens"),
        (lambda: TokenRecycling(keep=1), "keep"),
    ],
)
def test_other_values_out_of_range_are_refused(make, named):
    with pytest.raises(ConfigError, match=f"^{named}="):
        make()
