"""Trunk and tree of a beam search, and the table of recycled logits."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lade import LookaheadConfig
from lade.decoding.beams.logits import BeamGuesser, BeamRow, Recycler
from lade.decoding.beams.tree import Branches


def text(branches, node):
    return [*branches.trunk, *(branches.tree.ids[node] for node in branches.path(node))]


@st.composite
def grown(draw):
    """Branches whose first nodes have been seen by a pass, and some nodes of one depth as the ends of beams."""
    branches = Branches.of(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 25))):
        branches.tree.add(draw(st.integers(0, len(branches.tree) - 1)), draw(st.integers(0, 3)), "any")
    depth = draw(st.sampled_from(sorted(set(branches.tree.depths))))
    level = [node for node, at in enumerate(branches.tree.depths) if at == depth]
    beams = draw(st.lists(st.sampled_from(level), min_size=1, max_size=4))
    seen = draw(st.integers(min(beams), len(branches.tree)))
    branches.learn(torch.arange(seen)[:, None], [[(node, 0.0)] for node in range(seen)])
    return branches, beams


@given(grown())
def test_pruning_keeps_what_the_beams_come_from_and_can_get_to(drawn):
    branches, beams = drawn
    seen, size = len(branches.follows), len(branches.tree)
    paths = {node: branches.path(node) for node in range(size)}
    texts = {node: text(branches, node) for node in range(size)}
    trunk = list(branches.trunk)
    reachable = {node for node in range(size) if set(paths[node]) & set(beams)}
    origins = {above for beam in beams for above in paths[beam]}

    kept, numbers = branches.prune(beams)

    assert kept == sorted(node for node in reachable | origins if node < seen)
    assert reachable | set(beams) <= set(numbers) <= reachable | origins
    assert sorted(numbers.values()) == list(range(len(branches.tree)))
    for node, number in numbers.items():
        assert text(branches, number) == texts[node]
        if number < len(branches.follows):
            assert branches.follows[number] == ([(node, 0.0)] if node in reachable else ())
    logits = {number: int(row) for number, row in branches.logits.items()}
    assert logits == {numbers[node]: node for node in reachable if node < seen}
    # The cache holds, in this order, what joined the trunk and the first nodes of the tree.
    joined = len(branches.trunk) - len(trunk)
    assert [numbers.get(node) for node in kept] == [None] * joined + list(range(len(branches.follows)))
    root_children = branches.tree.parents.count(0)
    assert 0 in {numbers[beam] for beam in beams} or root_children > 1, "more could have joined the trunk"


@given(grown(), st.integers(1, 6))
def test_the_ending_of_a_text_goes_back_into_the_trunk(drawn, length):
    branches, beams = drawn
    assert branches.ending(beams[0], length) == text(branches, beams[0])[-length:]


def test_the_recycler_answers_for_the_longest_context_it_knows():
    recycler = Recycler(orders=3)
    recycler.learn([1, 2, 3], [(7, -0.1)])
    recycler.learn([9, 2, 3], [(8, -0.2)])
    assert recycler.lookup([1, 2, 3]) == recycler.lookup([5, 1, 2, 3]) == [(7, -0.1)]
    assert recycler.lookup([4, 2, 3]) == recycler.lookup([3]) == [(8, -0.2)], "the last one that ended so"
    assert recycler.lookup([2]) == recycler.lookup([]) == ()


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), max_size=40), st.integers(1, 4))
def test_the_recycler_keeps_the_last_contexts_of_each_length(texts, bound):
    recycler = Recycler(orders=2, max_contexts=bound)
    for number, learned in enumerate(texts):
        recycler.learn(learned, [(number, 0.0)])
    recent: dict[int, int] = {}
    for number, learned in reversed(list(enumerate(texts))):
        recent.setdefault(learned[-1], number)
    for token in range(6):
        known = list(recent)[:bound]
        assert recycler.lookup([token]) == ([(recent[token], 0.0)] if token in known else ())


def row_of(prompt, source=()):
    """A search with one beam that drafts n-grams alone."""
    config = LookaheadConfig(0, 3, 2)
    return BeamRow(prompt, 1, BeamGuesser(config, 1, (), Recycler(2), source))


def drafts(row, *tokens):
    """Whether a text ends so after the next pass; the model itself expects token 0."""
    row.learn(torch.eye(10)[[0]])
    row.grow(None)
    return any(tuple(text(row.branches, node)[-len(tokens) :]) == tokens for node in range(len(row.tree)))


def test_what_followed_in_the_prompt_the_encoders_input_or_the_text_that_all_beams_share_is_drafted():
    assert drafts(row_of([1, 2, 3, 1]), 3, 1, 2, 3)
    assert drafts(row_of([1], source=[1, 2, 3]), 1, 2, 3)
    assert not drafts(row_of([1]), 1, 2, 3)
    row = row_of([9])
    for token in (1, 2, 3, 1):
        assert not drafts(row, 3, 1, 2, 3)
        row.lengthen([token])
        row.prune()
    assert drafts(row, 3, 1, 2, 3)
