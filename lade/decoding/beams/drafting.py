"""Drafts for beam search: a beam search on the logits that the model is expected to return.

Every row of logits of a pass is paid for. Its best tokens are kept under the last tokens of the node's text, and looked
up where these tokens come up again. Source of the idea: Token Recycling, arXiv 2408.08696.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest

import torch

from lade.config import LookaheadConfig
from lade.decoding.beams.tree import Branches, Follow
from lade.decoding.drafting.lookahead import NGramPool, chosen_ngrams


class Recycler:
    """Maps the last 1 to `orders` tokens of a text to the likeliest next tokens seen last after them.

    Args:
        orders: length of the longest context.
        max_contexts: contexts of each length, the least recently learned goes first. It bounds the memory.
    """

    def __init__(self, orders: int = 3, max_contexts: int = 65_536) -> None:
        self.orders, self._max_contexts = orders, max_contexts
        self._tables: list[dict[tuple[int, ...], Sequence[Follow]]] = [{} for _ in range(orders)]

    def learn(self, text: Sequence[int], follows: Sequence[Follow]) -> None:
        """Enter what follows `text` (of which the last `orders` tokens count), the likeliest first."""
        for order, table in enumerate(self._tables[: len(text)], start=1):
            context = tuple(text[-order:])
            table.pop(context, None)  # taken out and put in again, an entry of a dictionary is the most recent
            table[context] = follows
            if len(table) > self._max_contexts:
                del table[next(iter(table))]

    def lookup(self, text: Sequence[int]) -> Sequence[Follow]:
        """What followed the longest known end of `text`; empty if even its last token is new."""
        for order in range(min(self.orders, len(text)), 0, -1):
            follows = self._tables[order - 1].get(tuple(text[-order:]))
            if follows is not None:
                return follows
        return ()


FOLLOWS = 8
"""Next tokens kept of a row of logits; with more beams than these, one a beam."""


class BeamGuesser:
    """Grows the tree of a beam search by the tokens that its next steps are expected to take.

    The next beam steps are played ahead, with a few beams more than there are. After a node that has been fed, the
    next tokens and their log-probabilities are known; after others those are taken that the model last gave after the
    same tokens. This takes the place of the Jacobi window, which guesses one text where k of them are wanted: under the
    best beam a window of 7 columns saved fewer passes than as many nodes of this play do.

    Args:
        config: N - 1 is the number of steps played ahead; W, how many beams more than k are played (0 plays none); G,
            how many n-grams of the pool are tried after each beam.
        num_beams: k.
        excluded: ids after which nothing is guessed.
        recycler: the likeliest next tokens by context; may be shared with other prompts.
        source: text whose tokens may come again: what an encoder has read.
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
        self._known_text = 0  # tokens of the trunk whose n-grams the pool has

    def learn(self, branches: Branches, first: int) -> None:
        """Learn from a forward pass over the nodes from number `first` on."""
        for node in range(first, len(branches.follows)):
            self._recycler.learn(branches.ending(node, self._recycler.orders), branches.follows[node])
        argmax_ids = [follows[0][0] if follows else -1 for follows in branches.follows]
        self._pool.learn(chosen_ngrams(branches.tree, argmax_ids, self._config.ngram)[max(first - 1, 0) :], "pool")

    def learn_text(self, text: Sequence[int]) -> None:
        """Enter the n-grams of the trunk that are not known yet."""
        self._learn_ngrams(text, self._known_text)
        self._known_text = len(text)

    def _learn_ngrams(self, text: Sequence[int], known: int) -> None:
        ngram = self._config.ngram
        if self._config.prompt_ngrams:
            ends = range(max(ngram, known + 1), len(text) + 1)
            self._pool.learn((text[end - ngram : end] for end in ends), "prompt")

    def grow(self, branches: Branches, beams: Mapping[int, float], room: int | None) -> None:
        """Add guesses after the beams.

        Args:
            branches: the texts of the search; its tree grows.
            beams: the nodes that the beams end with, and the beams' log-probabilities.
            room: how many levels there may be at most; None for no limit.
        """
        steps = self._config.ngram - 1 if room is None else min(self._config.ngram - 1, room)
        self._play(branches, beams, steps)
        for node in beams:
            for guess, source in self._pool.lookup(branches.tree.ids[node]):
                place: int | None = node
                for token in guess[:steps]:
                    place = branches.tree.add(place, token, source)

    def _play(self, branches: Branches, beams: Mapping[int, float], steps: int) -> None:
        ends = list(beams.items())
        for _ in range(steps):
            candidates = [
                (score + gain, node, token)
                for node, score in ends
                for token, gain in self._expected(branches, node)
                if token not in self._excluded
            ]
            best = nlargest(self._width, candidates)
            grown = [(branches.tree.add(node, token, "memory"), score) for score, node, token in best]
            ends = [(child, score) for child, score in grown if child is not None]

    def _expected(self, branches: Branches, node: int) -> Sequence[Follow]:
        if node < len(branches.follows):
            return branches.follows[node]
        return self._recycler.lookup(branches.ending(node, self._recycler.orders))


def top_follows(logits: torch.Tensor, count: int) -> list[list[Follow]]:
    """The likeliest next tokens of each row of logits `[S, V]` and their log-probabilities, the likeliest first."""
    logits = logits.float()
    values, ids = logits.topk(min(count, logits.shape[-1]))
    values -= logits.logsumexp(-1, keepdim=True)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
