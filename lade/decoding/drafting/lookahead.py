"""The paper's method: guesses from the lookahead window and from the pool, at fixed sizes W, N and G."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

from lade.config import LookaheadConfig
from lade.decoding.drafting.ngram_pool import NGramPool
from lade.decoding.drafting.window import Window
from lade.decoding.kernels import Ints
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict


class LookaheadDrafter:
    """Drafts for one row; see `Drafter`.

    Args:
        config: W, N, G.
        excluded: ids that no n-gram may contain (end of sequence, padding).
    """

    reads = False

    def __init__(self, config: LookaheadConfig, excluded: Collection[int] = ()) -> None:
        self.config = config
        self.pool = NGramPool(config.ngram, config.guesses, excluded)
        self.window: Window | None = None
        self._tree = TokenTree(0)
        self._tips: list[int | None] = []

    def read_prompt(self, tokens: Sequence[int], start: int, rows: Ints) -> None:
        """Nothing: it did not ask."""

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Learn the prompt, and set up the window."""
        prompt, config = tokens[:prompt_length], self.config
        self._learn_text(prompt, 0, "prompt")
        if config.window:
            self.window = Window(config.window, config.ngram, tokens[-1], prompt, random.Random(config.seed))
        self._learn_text(tokens, prompt_length, "text")

    def look(self, tokens: Sequence[int], max_depth: int | None) -> Sequence[float]:
        """Nothing: its sizes are fixed."""
        return ()

    def grow(self, tokens: Sequence[int], max_depth: int | None) -> TokenTree:
        """Window and guesses, merged under the current token."""
        tree = TokenTree(tokens[-1], max_depth)
        self._tips = self.window.plant(tree) if self.window else []
        for guess, source in self.pool.lookup(tokens[-1]):
            tree.add_path(guess, source)
        self._tree = tree
        return tree

    def learn(self, tokens: Sequence[int], picks: Sequence[int], rows: Ints | None, verdict: Verdict) -> None:
        """The window advances; its n-grams, the model's choices at all nodes and the accepted text enter the pool."""
        if self.window:
            # A tip that the context's end cut off keeps its token: only the speed could differ.
            last = self.window.rows[-1]
            new = [last[i] if tip is None else picks[tip] for i, tip in enumerate(self._tips)]
            self.pool.learn(self.window.advance(tokens[-1], new), "pool")
        self.pool.learn(chosen_ngrams(self._tree, picks, self.config.ngram), "pool")
        self._learn_text(tokens, len(tokens) - len(verdict.tokens), "text")

    def observe(self, seconds: float, forward_s: float) -> None:
        """Nothing: its sizes are fixed."""

    def _learn_text(self, tokens: Sequence[int], start: int, source: str) -> None:
        """Enter the n-grams that end with the tokens from `start` on."""
        if self.config.prompt_ngrams:
            self.pool.learn(self._ngrams(tokens, start), source)

    def _ngrams(self, tokens: Sequence[int], start: int) -> Iterator[Sequence[int]]:
        ngram = self.config.ngram
        for end in range(max(start + 1, ngram), len(tokens) + 1):
            yield tokens[end - ngram : end]


def chosen_ngrams(tree: TokenTree, picks: Sequence[int], ngram: int) -> list[tuple[int, ...]]:
    """For each node but the root its token and what the model chose to follow it, as far as the tree shows.

    The choice at a node continues it by one token; where a child carries that token, the choice at the child goes on.
    These n-grams cost nothing, since the pass has computed every node's choice. What follows the root is the accepted
    text, which is learned as such.

    Args:
        tree: the candidates of a step.
        picks: `[S]`, the argmax at each node.
        ngram: N, the greatest length.

    Returns:
        S - 1 n-grams of 2 to N tokens, in the order of the nodes.
    """
    chosen: list[tuple[int, ...]] = [()] * len(tree)
    for node in range(len(tree) - 1, 0, -1):  # children come after their parents
        child = tree.child(node, picks[node])
        follows = (picks[node],) if child is None else chosen[child][: ngram - 1]
        chosen[node] = (tree.ids[node], *follows)
    return chosen[1:]
