"""The adaptive method: the tree that is worth its cost, grown best first from a memory of every row of logits.

A node's score is the probability that it is accepted: the product of the calibrated probabilities along its path. The
sum of all scores, and one for the token that the model chooses itself, is what a step is expected to yield.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from lade.decoding.contexts import WIDTH, context_of, extended
from lade.decoding.memory import Memory
from lade.decoding.mixer import Mixer, Ranked, probability
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict
from lade.decoding.window import Window


class Growth:
    """A tree while it grows, and what was known at each of its nodes.

    Args:
        tree: with nothing but its root.
        context: of the root, see `context_of`.
        memory: what follows a context.
        mixer: how likely that is.
        excluded: ids that are not drafted, since nothing follows them.
    """

    def __init__(self, tree: TokenTree, context: int, memory: Memory, mixer: Mixer, excluded: Collection[int]) -> None:
        self.tree, self._memory, self._mixer, self._excluded = tree, memory, mixer, excluded
        self.contexts, self.scores = [context], [1.0]
        self._ranked: dict[int, tuple[list[bytes], Ranked]] = {}
        # Entries: minus a score, a node, and which of its children is meant; for -1 the node is not expanded yet, and
        # the score is its own, which bounds those of its children.
        self._heap: list[tuple[float, int, int]] = [(-1.0, ROOT, -1)]

    def grow(self, size: int, least: float = 0.0) -> None:
        """Add the likeliest nodes, until the tree has `size` or the next one has a score below `least`."""
        tree, heap, scores, contexts = self.tree, self._heap, self.scores, self.contexts
        while heap and len(tree) < size and -heap[0][0] > least:
            score, parent, rank = heappop(heap)
            _, ranked = self.expanded(parent)
            if rank + 1 < len(ranked):
                heappush(heap, (-scores[parent] * probability(ranked[rank + 1][1]), parent, rank + 1))
            if rank < 0:
                continue
            token = ranked[rank][0]
            if token in self._excluded:
                continue
            node = tree.add(parent, token, "memory")
            if node is not None:
                scores.append(-score)
                contexts.append(extended(contexts[parent], token))
                heappush(heap, (score, node, -1))

    def expanded(self, node: int) -> tuple[list[bytes], Ranked]:
        """What the memory has for a node, and how likely its children are."""
        found = self._ranked.get(node)
        if found is None:
            rows = self._memory.lookup(self.contexts[node])
            found = self._ranked[node] = rows, self._mixer.rank(rows)
        return found


class AdaptiveDrafter:
    """Drafts for one row; see `Drafter`."""

    width = WIDTH

    def __init__(self, memory, budget, excluded=(), seed=0, window=None, mixer=None) -> None:
        self.memory, self.budget, self._excluded = memory, budget, frozenset(excluded)
        self.mixer = memory.mixer
        self._rng = random.Random(seed)
        self.window=None; self.wn=window
        self._growth = None

    def read_prompt(self, tokens, start, readout):
        self.memory.learn([context_of(tokens[: n + 1][-5:]) for n in range(start, start + len(readout.tokens))], readout)

    def begin(self, tokens, prompt_length):
        if self.wn:
            self.window = Window(self.wn[0], self.wn[1], tokens[-1], tokens[:prompt_length], self._rng)

    def grow(self, tokens, max_depth):
        tree = TokenTree(tokens[-1], max_depth)
        g = self._growth = Growth(tree, context_of(tokens), self.memory, self.mixer, self._excluded)
        g.grow(self.budget)
        if self.window:
            cols = max(0, (self.budget - len(tree) + len(self.window.rows)-1) // len(self.window.rows)) if self.wn[2] else self.wn[0]
            self._tips = self.window.plant(tree, cols)
        for n in range(len(g.contexts), len(tree)):
            g.contexts.append(extended(g.contexts[tree.parents[n]], tree.ids[n]))
        return tree

    def learn(self, tokens, picks, readout, verdict):
        g = self._growth
        for node, token in zip(verdict.path, verdict.tokens):
            self.mixer.learn(*g.expanded(node), token)
        self.memory.learn(g.contexts, readout[: len(g.contexts)])
        if self.window:
            last = self.window.rows[-1]
            self.window.advance(tokens[-1], [last[i] if tip is None else picks[tip] for i, tip in enumerate(self._tips)])

    def observe(self, seconds, forward_s): pass
