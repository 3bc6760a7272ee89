"""The token tree: a trie with the ancestor closure as its mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.tree import ROOT, TokenTree

additions = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=140)


def grown(pairs: list[tuple[int, int]], max_depth: int | None = None) -> TokenTree:
    tree = TokenTree(9, max_depth)
    for parent, token in pairs:
        tree.add(parent % len(tree), token, "pool")
    return tree


def ancestors(tree: TokenTree, node: int) -> set[int]:
    """By brute force: follow the parents."""
    seen = {node}
    while tree.parents[node] >= 0:
        node = tree.parents[node]
        seen.add(node)
    return seen


@given(additions)
def test_the_mask_is_the_brute_force_ancestor_closure_depths_count_it_and_siblings_differ(pairs):
    tree = grown(pairs)
    expected = np.zeros((len(tree), len(tree)), dtype=bool)
    for node in range(len(tree)):
        expected[node, sorted(ancestors(tree, node))] = True
    assert np.array_equal(tree.closure(), expected)
    assert tree.depths == [len(ancestors(tree, node)) - 1 for node in range(len(tree))]
    pairs_seen = [(tree.parents[n], tree.ids[n]) for n in range(1, len(tree))]
    assert len(set(pairs_seen)) == len(pairs_seen)
    assert all(tree.child(parent, token) == n for n, (parent, token) in enumerate(pairs_seen, start=1))


@given(additions, st.integers(0, 4))
def test_no_node_lies_deeper_than_allowed(pairs, max_depth):
    assert max(grown(pairs, max_depth).depths) <= max_depth


def test_guesses_with_a_common_prefix_share_its_nodes_what_is_too_deep_is_left_out_and_masks_can_be_read():
    tree = TokenTree(1)
    tree.add_path([2, 3, 4], "pool")
    tree.add_path([2, 3, 5], "prompt")
    assert tree.ids == [1, 2, 3, 4, 5]
    assert tree.parents == [-1, 0, 1, 2, 2]
    assert tree.sources[1:] == ["pool", "pool", "pool", "prompt"]
    tree = TokenTree(1, max_depth=1)
    tree.add_path([2, 3, 4], "pool")
    assert tree.ids == [1, 2]
    assert tree.add(None, 5, "pool") is None
    assert tree.child(ROOT, 3) is None
    tree = TokenTree(7)
    tree.add_path([1, 2], "pool")
    tree.add_path([3], "pool")
    drawn = "\n".join("".join("#" if seen else "." for seen in row) for row in tree.closure())
    assert drawn == "#...\n##..\n###.\n#..#"


@given(additions, st.integers(1, 45), additions)
def test_nodes_added_at_once_are_as_if_added_one_by_one(pairs, size, more):
    """To a tree that may have others already, and more of which may come."""
    whole = grown(pairs)
    first = min(size, len(whole))
    tree = TokenTree(9)
    for node in range(1, first):
        tree.add(whole.parents[node], whole.ids[node], "pool")
    tree.extend(whole.ids[first:], whole.parents[first:], whole.depths[first:], "memory")
    assert (tree.ids, tree.parents, tree.depths) == (whole.ids, whole.parents, whole.depths)
    assert tree.sources == whole.sources[:first] + ["memory"] * (len(whole) - first)
    assert all(tree.child(whole.parents[node], whole.ids[node]) == node for node in range(1, len(whole)))
    assert np.array_equal(tree.closure(), whole.closure())
    for each in (tree, whole):
        for parent, token in more:
            each.add(parent % len(each), token, "window")
    assert (tree.ids, tree.parents, tree.depths) == (whole.ids, whole.parents, whole.depths)
    assert tree.sources[first:] == ["memory" if source == "pool" else source for source in whole.sources[first:]]


@pytest.mark.parametrize("columns", [([1, 2], [0]), ([1], [0, 1])])
def test_columns_of_different_length_are_refused(columns):
    with pytest.raises(ValueError):
        TokenTree(1).extend(*columns, [1, 1], "memory")
