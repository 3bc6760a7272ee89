"""The adaptive method: the tree that is worth its cost, grown best first from a memory of every row of logits.

A node's score is the probability that it is accepted. The sum of all scores, with the root's 1.0 for the token that
the model chooses itself, is what a step is expected to yield.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import numpy as np

from lade.decoding import kernels
from lade.decoding.drafting.best_first import Growth
from lade.decoding.drafting.memory import Memory
from lade.decoding.drafting.tree_size import Budget
from lade.decoding.drafting.window import Window
from lade.decoding.kernels import Ints
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict

COLUMNS, NGRAM = 16, 5
"""Sizes of the lookahead window; each step plants as many of its columns as there is room for."""
LEAST_COLUMNS = 3
"""A smaller window finds nothing worth its cells."""


class AdaptiveDrafter:
    """Drafts for one row; see `Drafter`.

    What the memory offers comes first; where that is less than the budget, the lookahead window takes the rest, so that
    its share grows when guesses are missing.

    Args:
        memory: what follows a context; it is added to.
        budget: how large trees are.
        excluded: ids behind which nothing is to be guessed (end of sequence, padding).
        vocabulary: ids below it can be fed; a memory may know others, of another model.
        read_prompts: whether to learn from the logits of the prompt.
        seed: of the window's first tokens.
    """

    def __init__(
        self,
        memory: Memory,
        budget: Budget,
        excluded: Collection[int] = (),
        *,
        vocabulary: int | None = None,
        read_prompts: bool = True,
        seed: int = 0,
    ) -> None:
        self.memory, self.budget = memory, budget
        self.reads = self._read_prompts = read_prompts
        self.window: Window | None = None
        self._growth = Growth(excluded, vocabulary)
        self._rng = random.Random(seed)
        self._tips: list[int | None] = []
        self._found: Sequence[float] | None = None  # scores of the nodes that the next tree can have
        self._fed = self._emitted = 1

    def read_prompt(self, tokens: Sequence[int], start: int, rows: Ints) -> None:
        """See `Drafter`."""
        self.memory.learn(kernels.tails_of(np.array(tokens, dtype=np.int64), start, len(rows)), rows)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self.window = Window(COLUMNS, NGRAM, tokens[-1], tokens[:prompt_length], self._rng)
        if self._read_prompts:
            self.memory.learn_text(kernels.tails_of(np.array(tokens, dtype=np.int64), 0, len(tokens) - 1), tokens[1:])

    def look(self, tokens: Sequence[int], max_depth: int | None) -> Sequence[float]:
        """See `Drafter`; `grow` does it by itself where nobody else wants to know."""
        self.reads = not self.budget.rest()
        self._found = []
        if self.reads:
            self._growth.begin(tokens)
            self._found = self._growth.grow(self.memory, self.budget.stages(), max_depth)
        return self._found

    def grow(self, tokens: Sequence[int], max_depth: int | None) -> TokenTree:
        """See `Drafter`."""
        tree = TokenTree(tokens[-1], max_depth)
        if self._found is None:
            self.look(tokens, max_depth)
        if self._found:
            size = self.budget.choose(self._found)
            self._growth.hang(tree, size)
            self._explore(tree)
            self._growth.follow(tree, size)
        self._fed, self._found = len(tree), None
        return tree

    def _explore(self, tree: TokenTree) -> None:
        """Fill the tree with as many columns of the window as there is room for."""
        self._tips = []
        if self.window is not None:
            columns = (self.budget.explored(len(tree)) - len(tree)) // (NGRAM - 1)
            if columns >= LEAST_COLUMNS:
                self._tips = self.window.plant(tree, columns)

    def learn(self, tokens: Sequence[int], picks: Sequence[int], rows: Ints | None, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._emitted = len(verdict.tokens)
        if not self.reads or rows is None:
            return
        self._growth.learn(self.memory, verdict.path, verdict.tokens, rows[: self._fed])
        if self.window is not None and self._tips:
            last = self.window.rows[-1]
            new = [last[i] if tip is None else picks[tip] for i, tip in enumerate(self._tips)]
            self.window.advance(tokens[-1], new)

    def observe(self, seconds: float, forward_s: float) -> None:
        """See `Drafter`."""
        self.budget.observe(self._fed, self._emitted, seconds, forward_s)
