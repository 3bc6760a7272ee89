"""The adaptive method: the tree that is worth its cost, grown best first from a memory of every row of logits.

A node's score is the probability that it is accepted: the product of the calibrated probabilities along its path. The
sum of all scores, and one for the token that the model chooses itself, is what a step is expected to yield.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush, heapreplace

from lade.decoding.contexts import ORDERS, WIDTH, context_of, extended
from lade.decoding.controller import Budget
from lade.decoding.memory import Memory
from lade.decoding.mixer import Mixer, Ranked, probability
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict
from lade.decoding.window import Window

PROMISE = 0.7
"""A node waits to be expanded as if its likeliest child had this probability. With 1.0, the bound, a quarter more nodes
are expanded for nothing but 0.1 % of what trees yield."""
COLUMNS, NGRAM = 16, 5
"""Sizes of the lookahead window; each step plants as many of its columns as there is room for."""
LEAST_COLUMNS = 3
"""A smaller window finds nothing worth its cells."""


class Growth:
    """A tree while it grows, and what was known at each of its nodes.

    Args:
        tree: with nothing but its root.
        context: of the root, see `context_of`.
        memory: what follows a context.
        mixer: how likely that is.
        allowed: whether an id may be drafted.
    """

    def __init__(
        self, tree: TokenTree, context: int, memory: Memory, mixer: Mixer, allowed: Callable[[int], bool]
    ) -> None:
        self.tree, self._memory, self._mixer, self._allowed = tree, memory, mixer, allowed
        self.contexts, self.scores = [context], [1.0]
        self._ranked: dict[int, tuple[list[bytes], Ranked]] = {}
        # Entries: minus a score, a node, and which of its children is meant; for -1 the node is not expanded yet, and
        # the score is what its likeliest child may have.
        self._heap: list[tuple[float, int, int]] = [(-1.0, ROOT, -1)]

    def grow(self, size: int, least: float = 0.0) -> bool:
        """Add the likeliest nodes, until the tree has `size` or the next one has no score above `least`.

        Returns:
            Whether the tree has reached that size.
        """
        tree, heap, scores, contexts = self.tree, self._heap, self.scores, self.contexts
        while heap and len(tree) < size and -heap[0][0] > least:
            score, parent, rank = heap[0]
            ranked = self.expanded(parent)[1]
            following = rank + 1
            if following < len(ranked):
                heapreplace(heap, (-scores[parent] * probability(ranked[following][1]), parent, following))
            else:
                heappop(heap)
            if rank < 0:
                continue
            token = ranked[rank][0]
            if not self._allowed(token):
                continue
            node = tree.add(parent, token, "memory")
            if node is not None:
                scores.append(-score)
                contexts.append(extended(contexts[parent], token))
                heappush(heap, (PROMISE * score, node, -1))
        return len(tree) >= size

    def cut(self, size: int) -> None:
        """Keep only the first `size` nodes, and grow no more. Others may be given the numbers of those cut off."""
        if size < len(self.tree):
            self.tree.cut(size)
            del self.contexts[size:], self.scores[size:]
            self._ranked = {node: found for node, found in self._ranked.items() if node < size}
        self._heap.clear()

    def follow_tree(self) -> None:
        """Take notice of nodes that others have added."""
        for node in range(len(self.contexts), len(self.tree)):
            self.contexts.append(extended(self.contexts[self.tree.parents[node]], self.tree.ids[node]))

    def expanded(self, node: int) -> tuple[list[bytes], Ranked]:
        """What the memory has for a node, and how likely its children are."""
        found = self._ranked.get(node)
        if found is None:
            rows = self._memory.lookup(self.contexts[node])
            found = self._ranked[node] = rows, self._mixer.rank(rows)
        return found


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
        self._excluded, self._vocabulary = frozenset(excluded), math.inf if vocabulary is None else vocabulary
        self._rng = random.Random(seed)
        self.window: Window | None = None
        self._tips: list[int | None] = []
        self._growth: Growth | None = None
        self._fed = self._emitted = 1
        self.width = WIDTH if read_prompts else 0

    def read_prompt(self, tokens: Sequence[int], start: int, readout: Readout) -> None:
        """See `Drafter`."""
        ends = range(start + 1, start + 1 + len(readout.tokens))
        self.memory.learn([context_of(tokens[max(0, end - ORDERS[-1]) : end]) for end in ends], readout)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self.window = Window(COLUMNS, NGRAM, tokens[-1], tokens[:prompt_length], self._rng)

    def grow(self, tokens: Sequence[int], max_depth: int | None) -> TokenTree:
        """See `Drafter`."""
        tree = TokenTree(tokens[-1], max_depth)
        self._growth, self.width = None, 0
        if not self.budget.rest():
            self.width = WIDTH
            self._growth = Growth(tree, context_of(tokens), self.memory, self.memory.mixer, self._allowed)
            for size, least in self.budget.stages():
                if not self._growth.grow(size, least):
                    break
            self._growth.cut(self.budget.choose(self._growth.scores))
            self._explore(tree)
            self._growth.follow_tree()
        self._fed = len(tree)
        return tree

    def _allowed(self, token: int) -> bool:
        return token < self._vocabulary and token not in self._excluded

    def _explore(self, tree: TokenTree) -> None:
        """Fill the tree with as many columns of the window as there is room for."""
        self._tips = []
        if self.window is not None:
            columns = (self.budget.explored(len(tree)) - len(tree)) // (NGRAM - 1)
            if columns >= LEAST_COLUMNS:
                self._tips = self.window.plant(tree, columns)

    def learn(self, tokens: Sequence[int], picks: Sequence[int], readout: Readout | None, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._emitted = len(verdict.tokens)
        growth = self._growth
        if growth is None or readout is None:
            return
        for node, token in zip(verdict.path, verdict.tokens, strict=True):
            self.memory.mixer.learn(*growth.expanded(node), token)
        self.memory.learn(growth.contexts, readout[: len(growth.contexts)])
        if self.window is not None and self._tips:
            last = self.window.rows[-1]
            new = [last[i] if tip is None else picks[tip] for i, tip in enumerate(self._tips)]
            self.window.advance(tokens[-1], new)

    def observe(self, seconds: float, forward_s: float) -> None:
        """See `Drafter`."""
        self.budget.observe(self._fed, self._emitted, seconds, forward_s)
