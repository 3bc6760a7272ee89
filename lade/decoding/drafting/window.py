"""The lookahead branch: the trajectory of a Jacobi iteration over the positions ahead.

`rows` holds N-1 rows of W columns. Cell (l, i) is a guess for position P + l + i, where P is the position of the
current token, cell (0, 0). It sees row 0 up to column i and its own column up to row l:

    row 0   c ── x ── x ── x      one iteration old for every row further down;
            │    │    │    │      the choice of the model at the last row, `new`,
    row 1   x    x    x    x      is the next row
            │    │    │    │
    new     .    .    .    .      each column then spells an n-gram of N tokens

Source: Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
ICML 2024, arXiv 2402.02057, section 3.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lade.decoding.tree import ROOT, TokenTree

NGram = tuple[int, ...]


class Window:
    """N-1 rows by W columns; while the rows fill, the columns are N-2 more and shrink by one with each row.

    Args:
        columns: W, at least 1.
        ngram: N, at least 2.
        current: id of the current token.
        vocabulary: ids from which row 0 is drawn at random, with replacement; usually the prompt.
        rng: private source of randomness.
    """

    def __init__(self, columns: int, ngram: int, current: int, vocabulary: Sequence[int], rng: random.Random) -> None:
        self.columns, self.ngram = columns, ngram
        self.rows = [[current, *rng.choices(vocabulary, k=columns + ngram - 3)]]

    @property
    def full(self) -> bool:
        """Whether all N-1 rows are there, so that each step sheds n-grams."""
        return len(self.rows) == self.ngram - 1

    def plant(self, tree: TokenTree, columns: int | None = None) -> list[int | None]:
        """Hang the cells under the root of `tree`, those of the first `columns` columns or all.

        Returns:
            The nodes of the last row, one a column; None for those that were left out or lie beyond the tree's depth.
        """
        column: list[int | None] = [ROOT]
        for i, token in enumerate(self.rows[0][1:], start=1):
            column.append(None if columns is not None and i >= columns else tree.add(column[-1], token, "window"))
        for row in self.rows[1:]:
            column = [tree.add(above, token, "window") for above, token in zip(column, row, strict=True)]
        return column

    def new_row(self, last_row_nodes: Sequence[int | None], argmax_ids: Sequence[int]) -> list[int]:
        """The model's choices at the last row.

        Args:
            last_row_nodes: as `plant` returned them. A cell that was left out keeps its token: only speed may differ.
            argmax_ids: `[S]`, the argmax at each node.
        """
        last = self.rows[-1]
        return [last[i] if node is None else argmax_ids[node] for i, node in enumerate(last_row_nodes)]

    def advance(self, current: int, new: Sequence[int]) -> list[NGram]:
        """One Jacobi iteration: take the model's choices at the last row and move by one position.

        The window moves by one however many tokens were accepted: guesses near the front would be lost otherwise.

        Args:
            current: the new current token.
            new: the choice at each node of the last row, as many as that row has columns.

        Returns:
            The n-grams (N tokens each) that the columns spelled; none while the rows fill.
        """
        if not self.full:
            self.rows = [row[1:] for row in self.rows] + [list(new[1:])]
            self.rows[0][0] = current
            return []
        shed = list(zip(*self.rows, new, strict=True))
        self.rows = [*self.rows[1:], list(new)]
        self.rows[0] = [current, *self.rows[0][1:]]
        return shed
