"""Prompt lookup with trees: what followed the last few tokens where they stood before, the latest place first.

Source: Saxena, "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding: the first place that is
found, for the longest n-gram that is found at all. Here all places are merged into one tree, until it is full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.readout import Readout
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict

LENGTHS = (4, 3, 2, 1)
"""Of the n-grams that are looked up, in this order."""
GUESSED = 16
"""Tokens taken from one place, at most."""
PLACES = 64
"""Of an n-gram, at most: the latest."""


class PromptLookupDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        budget: tokens fed in a step, the root included.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._read = budget, 0
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # where what follows begins

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self._note(tokens)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """What followed, until the tree is full."""
        tree = TokenTree(context[-1], max_depth)
        for length in LENGTHS:
            places = self._places.get(tuple(context[-length:]), ()) if length <= len(context) else ()
            for place in reversed(places[-PLACES:]):
                room = min(GUESSED, self._budget - len(tree))
                if room <= 0:
                    return Draft(tree)
                tree.add_path(context[place : place + room], "lookup")
        return Draft(tree)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._note(context)

    def _note(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends that some token follows."""
        for end in range(max(1, self._read), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._places[tuple(tokens[end - length : end])].append(end)
        self._read = len(tokens)
