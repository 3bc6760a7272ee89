"""The candidates of a step, the likeliest first: the nodes grown from the memory, and guesses that come with scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lade.decoding.drafting.drafter import Guess
from lade.decoding.tree import TokenTree

Tokens = tuple[int, ...]


class Ranking(NamedTuple):
    """An order in which nodes may be added to a tree, each after its parent.

    Attributes:
        scores: `[C]`, the probability of each node, the root's 1.0 first.
        grown: `[C]`, how many of the memory's nodes a tree of each size has.
        guessed: `[C]`, and how many tokens of each guess.
        guesses: those that have scores.
    """

    scores: list[float]
    grown: list[int]
    guessed: list[tuple[int, ...]]
    guesses: Sequence[Guess]

    def hang(self, tree: TokenTree, size: int) -> None:
        """Add the guesses to a tree of that size in all, which has the memory's nodes already."""
        for guess, length in zip(self.guesses, self.guessed[size - 1], strict=True):
            for node in tree.add_path(guess.tokens[:length], guess.source):
                tree.sources[node] = guess.source  # of a node that the memory proposes, too


def ranked(
    scores: Sequence[float], paths: Sequence[Tokens], guesses: Sequence[Guess], *, most: int, max_depth: int | None
) -> Ranking:
    """The memory's nodes and those of guesses in one order; a node that several propose counts once.

    Args:
        scores: `[M]`, of the memory's nodes, the root's 1.0 first.
        paths: `[M]`, the tokens from below the root to each; a node comes after its parent.
        guesses: with scores.
        most: nodes, the root included.
        max_depth: tokens of a guess that are taken; None for no limit.
    """
    columns = [list(zip(scores, paths, strict=True))]
    for guess in guesses:
        columns.append([(score, tuple(guess.tokens[:end])) for end, score in enumerate(guess.scores[:max_depth], 1)])
    taken, used = set[Tokens](), [0] * len(columns)
    ranking = Ranking([], [], [], guesses)
    while len(taken) < most:
        heads = [column[place][0] if place < len(column) else -1.0 for column, place in zip(columns, used, strict=True)]
        best = heads.index(max(heads))  # the memory's among equal ones
        if heads[best] < 0:
            break
        score, path = columns[best][used[best]]
        used[best] += 1
        if path not in taken:
            taken.add(path)
            ranking.scores.append(score)
            ranking.grown.append(used[0])
            ranking.guessed.append(tuple(used[1:]))
    return ranking
