"""Texts that hypothesis draws for trees of drafts, functions that write texts, and the paths of these trees."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from lade.decoding.drafting.drafter import Guess
from lade.decoding.tree import ROOT, TokenTree

VOCABULARY = 8
seeds = st.integers(0, 10_000)
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
Follow = Callable[[Sequence[int]], int]
depths = st.one_of(st.none(), st.integers(0, 5))


def follow_of(order: int, salt: int, vocabulary: int = VOCABULARY) -> Follow:
    """A text function that looks back `order` tokens: the lower, the sooner it repeats itself."""

    def follow(text: Sequence[int]) -> int:
        return hash((salt, *text[-order:])) % vocabulary

    return follow


class Fixed:
    """A source that guesses the same again and again."""

    def __init__(self, *guesses: Guess) -> None:
        self._guesses = guesses

    def guesses(self, context: Sequence[int]) -> Sequence[Guess]:
        return self._guesses


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Tokens from below the root to a node."""
    path = []
    while node != ROOT:
        path.append(tree.ids[node])
        node = tree.parents[node]
    return path[::-1]
