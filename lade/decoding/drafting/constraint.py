"""What must follow, and what cannot: rules about the text that drafts know of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lade.decoding.drafting.drafter import Guess

LONGEST_LEAD = 64
"""Tokens that are known to follow which are fed at a time."""
LEAD = "grammar"
"""What `Step.sources` calls their source."""


class Constraint(Protocol):
    """Rules that a row's text follows, such as a grammar's.

    They are no part of choosing tokens: whoever chooses knows them, too. Here they tell which tokens to guess.
    """

    def lead(self, context: Sequence[int]) -> Sequence[int]:
        """The tokens that must follow `context`, the row's tokens so far: none where there is a choice."""
        ...

    def fits(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first one on, may follow the context that `lead` was last asked about."""
        ...


def fitting(constraint: Constraint, paths: Sequence[Sequence[int]]) -> list[int]:
    """Which nodes of a tree may follow.

    Args:
        constraint: was asked about the tree's context.
        paths: of each node the tokens from below the root, a node's after its parent's.

    Returns:
        Their numbers, ascending.
    """
    known: dict[tuple[int, ...], bool] = {(): True}
    for path in reversed(paths):  # leaves tell about the nodes above them
        if tuple(path) not in known:
            fits = constraint.fits(path)
            for end in range(1, len(path) + 1):
                known[tuple(path[:end])] = end <= fits
    return [number for number, path in enumerate(paths) if known[tuple(path)]]


def cut(constraint: Constraint, guess: Guess) -> Guess:
    """What of a guess may follow."""
    fits = constraint.fits(guess.tokens)
    return guess._replace(tokens=guess.tokens[:fits], scores=guess.scores[:fits])
