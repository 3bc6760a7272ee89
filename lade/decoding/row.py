"""One row of a batch that is being written: its tokens, and what it knows about the tokens to come."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence

from lade.config import LookaheadConfig
from lade.decoding.choose import Chooser
from lade.decoding.pool import NGramPool
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict
from lade.decoding.window import Window

StopRule = Callable[[Sequence[int]], bool]


class Row:
    """State of one row.

    Args:
        prompt: ids of the prompt, at least one.
        config: W, N, G.
        chooser: turns logits into tokens.
        stop: called with all tokens after each emitted one; true ends the row.
        excluded: ids that no n-gram may contain (end of sequence, padding).
    """

    def __init__(
        self,
        prompt: Sequence[int],
        config: LookaheadConfig,
        chooser: Chooser,
        stop: StopRule,
        excluded: Collection[int] = (),
    ) -> None:
        self.tokens = list(prompt)
        self.config, self.chooser, self._stop = config, chooser, stop
        self.done = False
        self.pool = NGramPool(config.ngram, config.guesses, excluded)
        self.window: Window | None = None
        self._prompt_length = len(self.tokens)
        self._tree = TokenTree(self.tokens[-1])
        self._tips: list[int | None] = []
        self._learn_text(0, "prompt")

    def emit(self, token: int) -> bool:
        """Append a token; returns whether a stop rule ends the row with it."""
        self.tokens.append(token)
        self.done = self._stop(self.tokens)
        return self.done

    def begin(self) -> None:
        """Set up the window, once prefill has emitted the first token."""
        prompt, config = self.tokens[: self._prompt_length], self.config
        if config.window:
            rng = random.Random(config.seed)
            self.window = Window(config.window, config.ngram, self.tokens[-1], prompt, rng)
        self._learn_text(self._prompt_length, "text")

    def grow(self, max_depth: int | None) -> TokenTree:
        """The tree of the next step: window and guesses, merged under the current token."""
        tree = TokenTree(self.tokens[-1], max_depth)
        self._tips = self.window.plant(tree) if self.window else []
        for guess, source in self.pool.lookup(self.tokens[-1]):
            tree.add_path(guess, source)
        self._tree = tree
        return tree

    def learn(self, picks: Sequence[int], verdict: Verdict) -> None:
        """Take in what a step showed: the window advances; its n-grams, what the model chose at every node, and the
        accepted text enter the pool.

        Args:
            picks: `[S]`, the argmax at each node of the tree that `grow` returned last.
            verdict: what the walk accepted of it.
        """
        if self.window:
            # A tip that the context's end cut off keeps its token: only the speed could differ.
            last = self.window.rows[-1]
            new = [last[i] if tip is None else picks[tip] for i, tip in enumerate(self._tips)]
            self.pool.learn(self.window.advance(self.tokens[-1], new), "pool")
        self.pool.learn(chosen_ngrams(self._tree, picks, self.config.ngram), "pool")
        self._learn_text(len(self.tokens) - len(verdict.tokens), "text")

    def _learn_text(self, start: int, source: str) -> None:
        """Enter the n-grams that end with the tokens from `start` on."""
        if self.config.prompt_ngrams:
            self.pool.learn(self._ngrams(start), source)

    def _ngrams(self, start: int) -> Iterator[list[int]]:
        ngram = self.config.ngram
        for end in range(max(start + 1, ngram), len(self.tokens) + 1):
            yield self.tokens[end - ngram : end]


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
