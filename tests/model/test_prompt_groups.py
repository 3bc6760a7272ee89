"""Which prompts go in one pass: whatever their lengths, no other groups cost less."""

from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.model.prefill import grouped


def cost(groups, prompts, pass_tokens):
    return sum(pass_tokens + max(group) * sum(prompts[length] for length in group) for group in groups)


def all_groups(lengths):
    """Every way to cut ascending lengths into groups."""
    places = range(1, len(lengths))
    for cuts in chain.from_iterable(combinations(places, count) for count in range(len(lengths))):
        ends = [0, *cuts, len(lengths)]
        yield [set(lengths[first:end]) for first, end in pairwise(ends)]


@given(
    prompts=st.dictionaries(st.integers(1, 60), st.integers(1, 4), min_size=1, max_size=7),
    pass_tokens=st.integers(0, 80),
)
def test_no_groups_cost_less(prompts, pass_tokens):
    lengths = sorted(prompts)
    groups = grouped(prompts, pass_tokens)
    assert sorted(chain.from_iterable(groups)) == lengths
    least = min(cost(each, prompts, pass_tokens) for each in all_groups(lengths))
    assert cost(groups, prompts, pass_tokens) == least


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ({7: 3}, [{7}]),
        ({7: 1, 13: 1, 20: 2}, [{7, 13, 20}]),
        ({10: 1, 400: 1}, [{10}, {400}]),
        ({10: 1, 12: 1, 390: 2, 400: 1}, [{10, 12}, {390, 400}]),
    ],
)
def test_padding_never_costs_more_than_a_pass_of_its_own(prompts, groups):
    assert grouped(prompts, 48) == groups
