"""The token tree: a trie with the ancestor closure as its mask."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.tree import ROOT, TokenTree

additions = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=40)


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
def test_the_mask_is_the_brute_force_ancestor_closure(pairs):
    tree = grown(pairs)
    expected = np.zeros((len(tree), len(tree)), dtype=bool)
    for node in range(len(tree)):
        expected[node, sorted(ancestors(tree, node))] = True
    assert np.array_equal(tree.closure(), expected)


@given(additions)
def test_a_depth_is_the_number_of_ancestors_above(pairs):
    tree = grown(pairs)
    assert tree.depths == [len(ancestors(tree, node)) - 1 for node in range(len(tree))]


@given(additions)
def test_children_of_a_node_carry_different_tokens(pairs):
    tree = grown(pairs)
    pairs_seen = [(tree.parents[n], tree.ids[n]) for n in range(1, len(tree))]
    assert len(set(pairs_seen)) == len(pairs_seen)
    assert all(tree.child(parent, token) == n for n, (parent, token) in enumerate(pairs_seen, start=1))


@given(additions, st.integers(0, 4))
def test_no_node_lies_deeper_than_allowed(pairs, max_depth):
    assert max(grown(pairs, max_depth).depths) <= max_depth


def test_guesses_with_a_common_prefix_share_its_nodes():
    tree = TokenTree(1)
    tree.add_path([2, 3, 4], "pool")
    tree.add_path([2, 3, 5], "prompt")
    assert tree.ids == [1, 2, 3, 4, 5]
    assert tree.parents == [-1, 0, 1, 2, 2]
    assert tree.sources[1:] == ["pool", "pool", "pool", "prompt"]


def test_what_is_too_deep_is_left_out():
    tree = TokenTree(1, max_depth=1)
    tree.add_path([2, 3, 4], "pool")
    assert tree.ids == [1, 2]
    assert tree.add(None, 5, "pool") is None
    assert tree.child(ROOT, 3) is None


def test_the_mask_can_be_read():
    tree = TokenTree(7)
    tree.add_path([1, 2], "pool")
    tree.add_path([3], "pool")
    drawn = "\n".join("".join("#" if seen else "." for seen in row) for row in tree.closure())
    assert drawn == "#...\n##..\n###.\n#..#"


@given(additions, st.integers(1, 45))
def test_what_is_cut_off_is_gone_and_the_rest_is_as_it_was(pairs, size):
    tree, whole = grown(pairs), grown(pairs)
    tree.cut(size)
    kept = min(size, len(whole))
    assert len(tree) == kept
    for column in ("ids", "parents", "depths", "sources"):
        assert getattr(tree, column) == getattr(whole, column)[:kept]
    for node in range(1, len(whole)):
        parent, token = whole.parents[node], whole.ids[node]
        assert tree.child(parent, token) == (node if node < kept else None)
    assert np.array_equal(tree.closure(), whole.closure()[:kept, :kept])


@given(additions, st.integers(1, 45), additions)
def test_a_cut_tree_grows_as_one_that_never_had_more(pairs, size, more):
    """A node that was cut off and comes again gets the next free number, not the one that it had."""
    tree = grown(pairs)
    tree.cut(size)
    small = TokenTree(9)
    for node in range(1, len(tree)):
        small.add(tree.parents[node], tree.ids[node], "pool")
    for each in (tree, small):
        for parent, token in more:
            each.add(parent % len(each), token, "window")
    assert (tree.ids, tree.parents, tree.depths, tree.sources) == (
        small.ids,
        small.parents,
        small.depths,
        small.sources,
    )
    pairs_seen = [(small.parents[n], small.ids[n]) for n in range(1, len(small))]
    assert [tree.child(*pair) for pair in pairs_seen] == list(range(1, len(small)))
