"""Texts that hypothesis draws for trees of drafts, and the paths of these trees."""

from hypothesis import strategies as st

from lade.decoding.tree import ROOT, TokenTree

VOCABULARY = 8
seeds = st.integers(0, 10_000)
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
depths = st.one_of(st.none(), st.integers(0, 5))


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Tokens from below the root to a node."""
    path = []
    while node != ROOT:
        path.append(tree.ids[node])
        node = tree.parents[node]
    return path[::-1]
