"""Drafts for beam search: the search is played ahead on predicted logits.

Each row of logits of a pass is reused: its top tokens are stored under the last tokens of the node's text, and
replayed where these tokens recur. Idea from Token Recycling, arXiv 2408.08696.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest

import torch

from lade.config import LookaheadConfig
from lade.decoding.beams.tree import Branches, Follow
from lade.decoding.drafting.lookahead import NGramPool, chosen_ngrams


class Recycler:
    """Maps the last 1 to `orders` tokens of a text to the top next tokens last seen after them.

    Args:
        orders: length of the longest context.
        max_contexts: maximum number of contexts of each length; the least recently learned is evicted first.
    """

    def __init__(self, orders: int = 3, max_contexts: int = 65_536) -> None:
        self.orders, self._max_contexts = orders, max_contexts
        self._tables: list[dict[tuple[int, ...], Sequence[Follow]]] = [{} for _ in range(orders)]

    def learn(self, text: Sequence[int], follows: Sequence[Follow]) -> None:
        """Store the tokens that follow `text`, likeliest first; its last `orders` tokens are the context."""
        for order, table in enumerate(self._tables[: len(text)], start=1):
            context = tuple(text[-order:])
            table.pop(context, None)  # reinserting moves a key to the end of the dictionary: eviction is LRU
            table[context] = follows
            if len(table) > self._max_contexts:
                del table[next(iter(table))]

    def lookup(self, text: Sequence[int]) -> Sequence[Follow]:
        """Return the tokens that followed the longest known suffix of `text`; empty if even its last token is new."""
        for order in range(min(self.orders, len(text)), 0, -1):
            follows = self._tables[order - 1].get(tuple(text[-order:]))
            if follows is not None:
                return follows
        return ()


FOLLOWS = 8
"""Next tokens stored per row of logits; with more beams than that, one per beam."""


class BeamGuesser:
    """Adds to the tree of a beam search the tokens that its next steps are expected to select.

    The next beam steps are simulated, with a few more beams than the search has. At a node that has been fed, the next
    tokens and their log-probabilities are known; elsewhere those are used that the model last gave after the same
    context. This replaces the Jacobi window, which predicts one text where k are needed: under the best beam a window
    of 7 columns saved fewer passes than as many nodes of this simulation.

    Args:
        config: N - 1 is the number of steps simulated; W, how many beams beyond k are simulated (0 disables it); G, how
            many n-grams of the pool are tried after each beam.
        num_beams: k, the number of beams per prompt.
        excluded: ids after which nothing is drafted.
        recycler: top next tokens by context; may be shared with other prompts.
        source: ids of a text whose tokens may recur: the encoder's input.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        num_beams: int,
        excluded: Collection[int],
        recycler: Recycler,
        source: Sequence[int] = (),
    ) -> None:
        self.kept = max(FOLLOWS, num_beams)
        self._config, self._excluded = config, frozenset(excluded)
        self._width = num_beams + config.window if config.window else 0
        self._recycler = recycler
        self._pool = NGramPool(config.ngram, config.guesses, excluded)
        self._learn_ngrams(source, 0)
        self._known_text = 0  # length of the trunk whose n-grams are in the pool

    def learn(self, branches: Branches, first: int) -> None:
        """Learn from a forward pass over the nodes from index `first` on."""
        for node in range(first, len(branches.follows)):
            self._recycler.learn(branches.ending(node, self._recycler.orders), branches.follows[node])
        argmax_ids = [follows[0][0] if follows else -1 for follows in branches.follows]
        self._pool.learn(chosen_ngrams(branches.tree, argmax_ids, self._config.ngram)[max(first - 1, 0) :], "pool")

    def learn_text(self, text: Sequence[int]) -> None:
        """Add the n-grams of the trunk that are not in the pool yet."""
        self._learn_ngrams(text, self._known_text)
        self._known_text = len(text)

    def _learn_ngrams(self, text: Sequence[int], known: int) -> None:
        ngram = self._config.ngram
        if self._config.prompt_ngrams:
            ends = range(max(ngram, known + 1), len(text) + 1)
            self._pool.learn((text[end - ngram : end] for end in ends), "prompt")

    def grow(self, branches: Branches, beams: Mapping[int, float], room: int | None) -> None:
        """Add guesses after the beams to the tree.

        Args:
            branches: the texts of the search, whose tree grows.
            beams: the last node of each beam, with the beam's log-probability.
            room: maximum number of levels to add; None for no limit.
        """
        steps = self._config.ngram - 1 if room is None else min(self._config.ngram - 1, room)
        self._simulate(branches, beams, steps)
        for node in beams:
            for guess, source in self._pool.lookup(branches.tree.ids[node]):
                place: int | None = node
                for token in guess[:steps]:
                    place = branches.tree.add(place, token, source)

    def _simulate(self, branches: Branches, beams: Mapping[int, float], steps: int) -> None:
        ends = list(beams.items())
        for _ in range(steps):
            candidates = [
                (score + gain, node, token)
                for node, score in ends
                for token, gain in self._next_tokens(branches, node)
                if token not in self._excluded
            ]
            best = nlargest(self._width, candidates)
            grown = [(branches.tree.add(node, token, "memory"), score) for score, node, token in best]
            ends = [(child, score) for child, score in grown if child is not None]

    def _next_tokens(self, branches: Branches, node: int) -> Sequence[Follow]:
        if node < len(branches.follows):
            return branches.follows[node]
        return self._recycler.lookup(branches.ending(node, self._recycler.orders))


def top_follows(logits: torch.Tensor, count: int) -> list[list[Follow]]:
    """Return the top next tokens of each row of logits `[S, V]` with their log-probabilities, in descending order."""
    logits = logits.float()
    values, ids = logits.topk(min(count, logits.shape[-1]))
    values -= logits.logsumexp(-1, keepdim=True)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
