"""NativeTree: trees that have the likeliest nodes of all, and what the memory knows at each of them."""

import copy
import pickle
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from memories import (
    downhill,
    filled_memory,
    is_undecided,
    known,
    learns_slowly,
    likeliest,
    mixed,
    probability,
    rows_of,
    said_of,
)
from random_texts import VOCABULARY, depths, path_to, seeds, texts
from reference.tree import NODE, Tree

from lade.decoding.kernels import native_tree as module
from lade.decoding.kernels.layout import ORDERS
from lade.decoding.kernels.native_tree import OPTIMISM, NativeTree
from lade.decoding.tree import TokenTree
from lade.memory import Memory

Allowed = Callable[[int], bool]
thresholds = st.sampled_from([0.0, 0.01, 0.1, 0.5])


def anything(token: int) -> bool:
    return True


def offers(memory: Memory, text: Sequence[int], allowed: Allowed) -> list[tuple[float, int]]:
    """What may follow a text, with its probability."""
    odds = mixed(memory.weights, said_of(memory, text))
    return [(probability(log_odds), token) for token, log_odds in odds.items() if allowed(token)]


def naive_scores(
    memory: Memory, text: list[int], stages: list[tuple[int, float]], max_depth: int | None, allowed: Allowed
) -> list[float]:
    """Scores of the likeliest nodes: of all continuations that hang from nodes taken already, the best, ever again."""
    taken = [1.0]
    open_ends = [(p, [token]) for p, token in offers(memory, text, allowed) if max_depth != 0]
    for size, least in stages:
        while open_ends and len(taken) < size:
            best = max(open_ends)
            score, path = best
            if score <= least:
                break
            open_ends.remove(best)
            taken.append(score)
            if max_depth is None or len(path) < max_depth:
                open_ends += [(score * p, [*path, token]) for p, token in offers(memory, text + path, allowed)]
        if len(taken) < size:
            break
    return taken


def grown(growth: NativeTree, text: Sequence[int], count: int) -> TokenTree:
    tree = TokenTree(text[-1])
    growth.copy_to(tree, count)
    return tree


@given(
    seeds,
    texts,
    st.lists(st.tuples(st.integers(1, 40), thresholds), min_size=1, max_size=3),
    depths,
    st.sets(st.integers(-1, VOCABULARY)),
    st.none() | st.integers(1, VOCABULARY),
)
def test_a_tree_has_the_likeliest_nodes_of_all(seed, text, stages, max_depth, excluded, vocabulary):
    """Against a naive search. With a promise of 1.0 the order is exact."""
    memory = filled_memory(seed)

    def allowed(token: int) -> bool:
        return token not in excluded and (vocabulary is None or token < vocabulary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "OPTIMISM", 1.0)
        growth = NativeTree(excluded, vocabulary)
        for _ in range(2):  # the second tree of a growth is as good as the first
            scores = growth.grow(memory.bound, text, stages, max_depth)
            assert scores == pytest.approx(naive_scores(memory, text, stages, max_depth, allowed), rel=1e-9)
    assert all(map(allowed, grown(growth, text, len(scores)).ids[1:]))


@given(seeds, texts, st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 0.3)), min_size=1, max_size=4), depths)
def test_nodes_come_in_falling_order_with_their_probabilities(seed, text, stages, max_depth):
    """In any number of stages. A node may come too late by as much as the promise was too low."""
    memory, growth = filled_memory(seed), NativeTree()
    scores, before = growth.grow(memory.bound, text, stages, max_depth), 1
    tree = grown(growth, text, len(scores))
    for size, least in stages:
        assert all(score > least for score in scores[before:size])
        before = max(size, before)
        if len(scores) < size:
            break
    assert len(scores) <= before
    for node in range(1, len(tree)):
        path = path_to(tree, node)
        offered = [offers(memory, text + path[:i], anything) for i in range(len(path))]
        chances = [{token: chance for chance, token in each} for each in offered]
        assert scores[node] == pytest.approx(prod(chance[token] for chance, token in zip(chances, path, strict=True)))
        assert tree.parents[node] < node
        assert OPTIMISM * scores[node] <= min(scores[:node]) + 1e-12
    pairs = list(zip(tree.parents, tree.ids, strict=True))
    assert len(set(pairs)) == len(pairs), "nothing is there twice"
    assert tree.depths == [len(path_to(tree, node)) for node in range(len(tree))]
    assert max(tree.depths) <= (max_depth if max_depth is not None else len(tree))
    assert set(tree.sources[1:]) <= {"memory"}


def test_a_size_that_is_not_reached_ends_growth_and_nothing_grows_where_nothing_is_known():
    """What a later stage would take is not taken then: what is too unlikely now stays so."""
    memory, growth = filled_memory(0, texts=100), NativeTree()
    few = len(growth.grow(memory.bound, [1, 2, 3], [(30, 0.3)]))
    assert 1 < few == len(growth.grow(memory.bound, [1, 2, 3], [(30, 0.3), (31, 0.0)])) < 30
    assert len(growth.grow(memory.bound, [1, 2, 3], [(few, 0.3), (few + 5, 0.0)])) == few + 5
    growth = NativeTree()
    assert growth.grow(Memory().bound, [1, 2, 3], [(5, 0.0)]) == [1.0]
    assert growth.grow(Memory().bound, [1, 2, 3], [(1, 0.0), (9, 0.5)]) == [1.0]
    assert grown(growth, [3], 1).ids == [3]


@pytest.mark.parametrize("promise", (0.3, 0.7, 1.0))
def test_a_low_promise_changes_the_order_and_not_the_scores(promise, monkeypatch):
    memory, growth = filled_memory(1, texts=100), NativeTree()
    usual = growth.grow(memory.bound, [1, 2, 3], [(40, 0.0)])
    monkeypatch.setattr(module, "OPTIMISM", promise)
    scores = growth.grow(memory.bound, [1, 2, 3], [(40, 0.0)])
    assert sum(scores) >= (0.8 if promise < 0.7 else 1.0) * sum(usual) - 1e-9


def test_trees_may_be_large():
    """Larger than there is room for at first, and none the worse for it."""
    memory = filled_memory(2, texts=2000)
    small, large = NativeTree(), NativeTree()
    for growth, sizes in ((small, [100, 100]), (large, [1500])):
        for size in sizes:
            scores = growth.grow(memory.bound, [1, 2, 3], [(size, 0.0)])
        assert len(scores) == sizes[-1]
    naive = naive_scores(memory, [1, 2, 3], [(100, 0.0)], None, anything)
    assert sum(large.grow(memory.bound, [1, 2, 3], [(1500, 0.0)])[:100]) > 0.95 * sum(naive)
    assert grown(large, [1, 2, 3], 100).ids == grown(small, [1, 2, 3], 100).ids


@given(seeds, texts, st.integers(2, 30), st.integers(1, 30), st.lists(texts, max_size=4), st.data())
def test_the_nodes_of_the_tree_are_known_after_cutting_and_planting_too(seed, text, size, kept, planted, data):
    """A node that was cut off and one that was planted later may have the same number."""
    memory, fresh, growth = filled_memory(seed), Memory(), NativeTree()
    kept = min(kept, len(growth.grow(memory.bound, text, [(size, 0.0)])))
    tree = grown(growth, text, kept)
    for path in planted:
        tree.add_path(path, "window")
    growth.extend(tree, kept)

    paths = [path_to(tree, node) for node in range(len(tree))]
    reached = data.draw(st.lists(st.sampled_from(range(len(tree))), max_size=5, unique=True))
    chosen = data.draw(st.lists(st.integers(0, VOCABULARY), min_size=len(reached), max_size=len(reached)))
    weights = memory.weights
    said = [said_of(memory, text + paths[node]) for node in reached]
    assume(not any(is_undecided(weights, each) for each in said))
    pairs = zip(said, chosen, strict=True)
    expected = sum((downhill(weights, each, token) for each, token in pairs), np.zeros_like(weights))
    with pytest.MonkeyPatch.context() as patch:
        rate = learns_slowly(patch)
        memory.weights = weights.copy()
        memory.learn_tree(growth, rows_of([{}] * len(tree)), reached, chosen)
    assert (memory.weights - weights) / rate == pytest.approx(expected, abs=1e-3)

    fresh.learn_tree(growth, rows_of([{100 + node: 255} for node in range(len(tree))]), [], [])
    ends: dict[tuple[int, ...], list[int]] = {}
    for node, path in enumerate(paths):
        ends.setdefault(tuple((text + path)[-max(ORDERS) :]), []).append(node)
    for nodes in ends.values():
        of_logits, of_text = known(fresh, text + paths[nodes[0]])
        assert len(of_logits) == len(ORDERS) and of_text == []
        assert likeliest(rows_of([of_logits[-1]])[0]) - 100 in nodes
        assert of_logits[-1] == {100 + nodes[0]: 255} or len(nodes) > 1


@pytest.mark.parametrize("copied", (copy.copy, copy.deepcopy, pickle.dumps))
def test_a_tree_is_not_copied(copied):
    """A copy would use what C++ has freed."""
    with pytest.raises(TypeError, match="NativeTree cannot be copied"):
        copied(NativeTree())


def test_planted_trees_may_be_large():
    growth, tree, text = NativeTree(), TokenTree(3), [1, 2, 3]
    growth.start(text)
    for start in range(40):
        tree.add_path(range(100 * start, 100 * start + 30), "window")
    growth.extend(tree, 1)
    memory = Memory()
    memory.learn_tree(growth, rows_of([{node % 1000: 255} for node in range(len(tree))]), [], [])
    for node in (0, 1, 200, len(tree) - 1):
        assert node % 1000 in known(memory, text + path_to(tree, node))[0][-1]


def test_what_is_known_at_a_node_stays_with_it_when_others_are_dropped():
    """In every column."""
    growth, memory, text = NativeTree(), filled_memory(3, texts=100), [1, 2, 3]
    tree = grown(growth, text, len(growth.grow(memory.bound, text, [(12, 0.0)])))
    kept = [node for node, on_path in enumerate(tree.closure()) if not on_path[1]]
    before = Tree(growth)
    growth.keep(kept)
    after = Tree(growth)
    assert 3 < after.count == len(kept) < len(tree)
    assert after.parent[1 : after.count].tolist() == [kept.index(tree.parents[node]) for node in kept[1:]]
    for name in NODE.names:
        if name != "parent":
            assert after.nodes[name][: after.count].tobytes() == before.nodes[name][kept].tobytes(), name
    assert growth.paths(after.count) == [tuple(path_to(tree, node)) for node in kept]
