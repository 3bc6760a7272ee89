"""A token tree cut into parts: every node in one at least, with its ancestors, and none larger than need be."""

from itertools import combinations_with_replacement, pairwise

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lade.backends.processes.lookahead_parallel import partition


@st.composite
def trees(draw, most=40):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(max(0, node - 6), node - 1)) for node in range(1, size))]


def leaves_in_order(parents):
    children = {node: [child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))}

    def below(node):
        return [leaf for child in children[node] for leaf in below(child)] if children[node] else [node]

    return below(0)


def ancestry(node, parents):
    return {node} | (ancestry(parents[node], parents) if node else set())


@given(trees(), st.integers(1, 8))
def test_parts_cover_the_tree_and_hold_their_ancestors(parents, parts):
    found = partition(parents, parts)
    assert len(found) == parts
    assert set().union(*found) == set(range(len(parents)))
    for nodes in found:
        assert nodes == sorted(set(nodes)) and nodes[0] == 0
        assert all(parents[node] in nodes for node in nodes[1:])


@given(trees(), st.integers(1, 8))
def test_only_paths_between_neighbours_are_fed_twice(parents, parts):
    deepest = max(len(ancestry(node, parents)) for node in range(len(parents)))
    assert sum(map(len, partition(parents, parts))) <= len(parents) + (parts - 1) * deepest


@settings(max_examples=examples(100))
@given(trees(most=14), st.integers(1, 4), st.data())
def test_no_other_runs_have_a_smaller_largest_part(parents, parts, data):
    taken = data.draw(st.lists(st.integers(0, 4), min_size=parts, max_size=parts))
    leaves = leaves_in_order(parents)

    def largest(ends):
        runs = [leaves[start:end] for start, end in pairwise((0, *ends, len(leaves)))]
        sizes = [len(set().union(*(ancestry(leaf, parents) for leaf in run))) if run else 0 for run in runs]
        return max((size + more for size, more in zip(sizes, taken, strict=True) if size), default=0)

    best = min(largest(ends) for ends in combinations_with_replacement(range(len(leaves) + 1), parts - 1))
    found = partition(parents, parts, taken)
    sizes = [len(nodes) + more for nodes, more in zip(found, taken, strict=True) if len(nodes) > 1 or len(parents) == 1]
    assert max(sizes) <= best if len(parents) > 1 else True


def test_a_chain_cannot_be_cut_and_a_star_can():
    assert partition([-1, 0, 1, 2], 2) == [[0, 1, 2, 3], [0]]
    assert partition([-1, 0, 0, 0, 0], 2) == [[0, 1, 2], [0, 3, 4]]
    assert partition([-1, 0, 0, 0, 0], 2, [0, 2]) == [[0, 1, 2, 3], [0, 4]]
