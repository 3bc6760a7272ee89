"""Best-first growth of token trees, and what trees learn: one at a time, and for many requests of an engine at once.

`propose` and `learn_requests` go through requests in their order, until one needs more room or another way: the caller
sees to that one, and calls again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.kernels.tables import Tables
from lade.decoding.kernels.work import Held
from lade.native.kernel import DOUBLE, DOUBLE_LIST, DOUBLES, INT, INTS, LONG_LIST, LONGS, STRUCT, TABLE, Struct, kernel

Longs = npt.NDArray[np.int64]


@kernel(STRUCT, LONG_LIST)
def index_text(held: Held, tokens: Sequence[int]) -> None:
    """Append tokens to the text, which has room for them, each with its previous occurrence."""


@kernel(STRUCT, INT)
def take_back(held: Held, kept: int) -> None:
    """Forget all tokens of the text but the first `kept` ones."""


@kernel(STRUCT, STRUCT, TABLE, LONG_LIST, LONG_LIST, DOUBLE, result=INT)
def learn_tree(
    held: Held, tables: Tables, entries: Ints, path: Sequence[int], chosen: Sequence[int], rate: float
) -> bool:
    """Update the mixing weights by the nodes that verification reached; note and store the logits at all nodes.

    Args:
        held: a tree that was fed.
        tables: both tables of the memory, given their limits, and its weights.
        entries: `[S, WIDTH]` entries of the logits at each node; none to store the tokens alone.
        path: `[A]` nodes that verification reached.
        chosen: `[A]` tokens that the model chose there, which are stored, too.
        rate: learning rate of the gradient steps.

    Returns:
        False if the tables have no room for all that was to be stored, and are as they were.
    """


@kernel(STRUCT, INT, DOUBLE)
def plant(held: Held, root: int, promise: float) -> None:
    """Start a new tree, whose root is the token at index `root` of the text.

    Unless the text has been read up to the root, there are no matches, and the root's context must be in place. The
    root's heap key is `promise`.
    """


@kernel(STRUCT, STRUCT, DOUBLE_LIST, LONG_LIST, INT, INT, DOUBLE, result=INT)
def grow(
    held: Held,
    tables: Tables,
    stages: Sequence[float],
    excluded: Sequence[int],
    vocabulary: int,
    max_depth: int,
    promise: float,
) -> int:
    """Add the likeliest nodes, best first.

    Args:
        held: a tree with room for the size of the last stage.
        tables: both tables of the memory, and its weights.
        stages: `[2 K]`, target sizes, each followed by the score that a node must exceed to be added up to that size;
            growth ends with the first size that is not reached.
        excluded: ids that are not added.
        vocabulary: V; ids from here on are not added.
        max_depth: maximum depth of a node.
        promise: probability assumed for the likeliest child of a node that has not been expanded yet.

    Returns:
        The number of nodes.
    """


@kernel(STRUCT, STRUCT, LONG_LIST, INT, INT, DOUBLE, DOUBLE, DOUBLE, result=INT)
def grow_chain(
    held: Held,
    tables: Tables,
    excluded: Sequence[int],
    vocabulary: int,
    most: int,
    price: float,
    news: float,
    first: float,
) -> int:
    """Add the likeliest child of the last node, again and again, while it is worth its price.

    A node's worth is the probability that it is accepted, and `news / (first + size - 1)` for what its logits teach,
    `size` being the number of nodes with it.

    Args:
        held: a tree that is its root, with room for `most` nodes.
        tables: both tables of the memory, and its weights.
        excluded: ids that are not added.
        vocabulary: V; ids from here on are not added.
        most: maximum number of nodes, root included.
        price: tokens that one more node costs.
        news: tokens that `first` divides, see above.
        first: number of nodes, see above.

    Returns:
        The number of nodes.
    """


@kernel(STRUCT, INT, LONG_LIST, LONG_LIST)
def follow(held: Held, kept: int, ids: Sequence[int], parents: Sequence[int]) -> None:
    """Keep the first `kept` nodes, and append nodes that were added elsewhere, given their tokens and parents."""


@kernel(STRUCT, STRUCT, INT, result=INT)
def candidates(held: Held, tables: Tables, node: int) -> int:
    """Expand a node; return the number of its candidates, which are not sorted."""


class Requests(Struct):
    """Trees of requests, each with the tables that it grows from."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[Held, Tables]]) -> None:
        self.pairs = pairs
        super().__init__([each.address for pair in pairs for each in pair], ())


@kernel(STRUCT, LONG_LIST, INT, DOUBLE_LIST, LONG_LIST, INT, INT, INTS, INTS, DOUBLES, LONGS, result=INT)
def propose(
    requests: Requests,
    budgets: Sequence[int],
    start: int,
    prices: Sequence[float],
    excluded: Sequence[int],
    vocabulary: int,
    trees: bool,
    ids: Ints,
    parents: Ints,
    scores: Doubles,
    ends: Longs,
) -> int:
    """Draft what may follow the texts of requests.

    Args:
        requests: B trees, whose texts have been read.
        budgets: `[B]`, the most tokens to draft for each.
        start: index of the first request to draft for.
        prices: `[4]`, tokens that one more node costs, `news` and `first` of `grow_chain`, and `promise` of `grow`.
        excluded: ids that are not added.
        vocabulary: V; ids from here on are not added.
        trees: draft trees; chains if False.
        ids: int32 `[sum of budgets]`, written: the drafts one after the other.
        parents: likewise, the index of each token's parent in its draft; -1 for the text's last token.
        scores: float64, likewise, the probability that each token is accepted.
        ends: `[B]`, written: end of each draft in these.

    Returns:
        Index of the first request whose tree has no room for its draft; B if all have.
    """


@kernel(STRUCT, LONG_LIST, INT, LONG_LIST, LONG_LIST, TABLE, LONG_LIST, DOUBLE, result=INT)
def learn_requests(
    requests: Requests,
    drafted: Sequence[int],
    start: int,
    tokens: Sequence[int],
    token_ends: Sequence[int],
    rows: Ints,
    row_ends: Sequence[int],
    rate: float,
) -> int:
    """Learn from a pass that verified drafts.

    Args:
        requests: B trees, whose tables have been given their limits.
        drafted: `[B]`, number of tokens of each draft; -1 for a tree that was not grown for this pass.
        start: index of the first request to learn from.
        tokens: the tokens that requests got, one request after the other.
        token_ends: `[B]`, end of each request's tokens.
        rows: `[F, WIDTH]` entries of the logits at the tokens that were fed, likewise.
        row_ends: `[B]`, end of each request's rows.
        rate: learning rate of the gradient steps.

    Returns:
        Index of the first request that was not learned from: its rows do not fit its draft and tokens, or a table or
        text has no room. B if all were.
    """
