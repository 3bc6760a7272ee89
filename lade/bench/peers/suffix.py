"""SuffixDecoding: a tree of what followed the ends of the text where they stood before, as likely as it was often.

A trie holds all parts of prompt and output up to a length, and how often each occurs. The ends of the text so far are
nodes of it; below each of them hangs what followed. Of all lengths of the end the one is taken whose tree promises
most.

Source: Oliaro, Jia, Campos, Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS
2025, arXiv 2411.04975, section 4; here with the text of the request itself, which the paper calls its local tree, and
trees as large as the budget however short the match.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict

LONGEST = 24
"""Tokens of a part of the text, at most: of its end and of what followed together."""


@dataclass
class Part:
    """A part of the text: how often it occurs, and by what it is followed."""

    occurrences: int = 0
    followed: dict[int, Part] = field(default_factory=dict)


class SuffixDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        budget: tokens fed in a step, the root included.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._ends = [Part()]  # of the text so far, by their length

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self._read(tokens)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """The tree that promises most tokens; of equal ones that of the longest end."""
        found = [self._likeliest(end) for end in reversed(self._ends[1:])]
        _, guesses = max(found, key=lambda each: each[0], default=(0.0, []))
        tree, nodes = TokenTree(context[-1], max_depth), list[int | None]([ROOT])
        for parent, token in guesses:
            nodes.append(tree.add(nodes[parent], token, "suffix"))
        return Draft(tree)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._read(verdict.tokens)

    def _read(self, tokens: Iterable[int]) -> None:
        """Count all parts that end with each of these tokens."""
        for token in tokens:
            longer = [end.followed.setdefault(token, Part()) for end in self._ends[: LONGEST - 1]]
            for part in longer:
                part.occurrences += 1
            self._ends = [self._ends[0], *longer]

    def _likeliest(self, end: Part) -> tuple[float, list[tuple[int, int]]]:
        """The likeliest continuations: their probabilities' sum, and each one's parent (0 for the root) and token."""
        order, promise, guesses = count(), 0.0, list[tuple[int, int]]()
        open_parts = [(-1.0, next(order), end, 0)]
        waiting: list[tuple[float, int, int, int, Part]] = []
        while len(guesses) < self._budget - 1 and (open_parts or waiting):
            if open_parts:
                chance, _, part, node = open_parts.pop()
                total = sum(next_part.occurrences for next_part in part.followed.values())
                for token, next_part in part.followed.items():
                    share = chance * next_part.occurrences / total
                    heapq.heappush(waiting, (share, next(order), node, token, next_part))
                continue
            chance, _, parent, token, part = heapq.heappop(waiting)
            promise -= chance
            guesses.append((parent, token))
            open_parts.append((chance, next(order), part, len(guesses)))
        return promise, guesses
