"""A growing token tree with its text, owned by compiled code: `NativeTree`; and batches of them: `Requests`.

Besides the memory's rows two features belong to one text. Notes: logits computed for a position, at rejected nodes
too, are reused for the same position whatever the tokens before it. That is the idea of Jacobi decoding (arXiv
2305.10427), with whole rows of logits in place of single tokens. Matches: where the text's suffix occurred before, the
token after it is a candidate, as in SuffixDecoding (arXiv 2411.04975). Matches are mixed with the memory's rows, so a
short match counts for something where both agree, and for little where they do not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple, NoReturn
from weakref import finalize

import numpy as np
import numpy.typing as npt

from lade.decoding.kernels.layout import LONGEST, MOST_CANDIDATES, MTP_DEPTHS, MTP_WIDTH, Doubles, Ints
from lade.decoding.kernels.tables import Tables
from lade.decoding.tree import TokenTree
from lade.native.kernel import (
    DOUBLE,
    DOUBLE_LIST,
    DOUBLES,
    INT,
    INTS,
    LONG_LIST,
    LONGS,
    MATRIX,
    STRUCT,
    TABLE,
    Struct,
    kernel,
)

Longs = npt.NDArray[np.int64]

OPTIMISM = 0.7
"""Probability assumed for the likeliest child of a node that has not been expanded. With the upper bound, 1.0, a
quarter more nodes are expanded for a gain of 0.1 % in accepted tokens."""
MTP = "mtp"
"""Source name of nodes to which an MTP layer gives higher odds than the memory does."""
FRONTIER = 8
"""Maximum number of nodes per row that a pass of an MTP layer feeds."""
TAKEN_BACK = 128
"""Maximum number of tokens at the end of a row that may change between two calls."""
_PREDICTIONS = FRONTIER * MTP_DEPTHS  # of one step at most
_NO_LIMIT: int = np.iinfo(np.int32).max


class Frontier(NamedTuple):
    """Nodes of a tree, `[E]`, that an MTP layer can be run on: they have no prediction, and their parents have one.

    Attributes:
        nodes: their indices in the tree.
        parents: indices of their parents' predictions, by the order in which these were added; 0 for the root.
        tokens: their tokens.
        depths: their depths, 0 for the root.
        scores: the probability that each is accepted, likeliest first.
        expected: expected number of tokens of a step that feeds the whole tree.
    """

    nodes: list[int]
    parents: list[int]
    tokens: list[int]
    depths: list[int]
    scores: list[float]
    expected: float


class NativeTree:
    """Grows one tree after the other for one text; it learns from each how its notes and matches are to be weighed.

    Excluded ids are never drafted, nor those beyond the vocabulary; None for no limit.
    """

    def __init__(self, excluded: Collection[int] = (), vocabulary: int | None = None) -> None:
        self.address: int = _new_tree(sorted(excluded), _NO_LIMIT if vocabulary is None else vocabulary)
        self._as_parameter_ = self.address  # of the C++ object, as ctypes looks it up
        finalize(self, _free_tree, self.address).atexit = False
        self._text: Sequence[int] = ()
        self._known = 0  # tokens of it that were read
        self._mtp: tuple[Doubles, Doubles] | None = None  # keeps the arrays alive
        self._predictions, self._predicted = _NO_PREDICTIONS, 0
        self._columns = Columns(0)

    def __reduce__(self) -> NoReturn:
        """Refuse copying and pickling: a copy would outlive the C++ object."""
        raise TypeError(f"{type(self).__name__} cannot be copied")

    def use_mtp(self, weights: Doubles, trust: Doubles) -> None:
        """Mix predictions of an MTP layer with these weights, which are shared and updated; see `MtpWeights`."""
        self._mtp, self._predictions = (weights, trust), PredictionRows(_PREDICTIONS)
        _use_mtp(self, weights, trust)

    def set_prompt(self, length: int) -> None:
        """Set the length of the prompt, which is copied more often than the answer is."""
        _set_prompt(self, length)

    def read(self, tokens: Sequence[int]) -> None:
        """Index a text, so that the tree that grows after it gets matches.

        It equals the last one but for the last `TAKEN_BACK` tokens of that; a list passed before is assumed to have
        only grown since, and is not compared again.
        """
        if tokens is not self._text:
            self._known = max(0, min(self._known, len(tokens)) - TAKEN_BACK)
            self._text = tokens
        elif self._known == len(tokens):
            return
        _read(self, self._known, tokens[self._known :])
        self._known = len(tokens)

    def start(self, tokens: Sequence[int]) -> None:
        """Start a tree that grows by `extend` alone; its root is the last of `tokens`."""
        _start(self, len(tokens) - 1, tokens[-LONGEST:])

    def grow(
        self,
        tables: Tables,
        tokens: Sequence[int],
        stages: Sequence[tuple[int, float]],
        max_depth: int | None = None,
        lead: Sequence[int] = (),
    ) -> list[float]:
        """Grow a new tree by the likeliest nodes, best first; return the scores of all nodes, the root's 1.0 first.

        Args:
            tables: both tables of the memory, and its weights.
            tokens: the text, whose last token is the root. Unless this very text has been read, there are no matches.
            stages: target sizes, each with the score that a node must exceed to be added up to that size; growth ends
                with the first size that is not reached.
            max_depth: maximum depth of a node; None for no limit.
            lead: forced tokens, a chain below the root, with scores of 1.0.
        """
        room = max(max(stages)[0], 1 + len(lead))
        if room > len(self._columns.scores):
            self._columns = Columns(2 * room)
        last, sizes = [*tokens[-LONGEST:], *lead], [*chain.from_iterable(stages)]
        limits = _NO_LIMIT if max_depth is None else max_depth, OPTIMISM
        start = len(tokens) - 1, last, len(lead), self._predictions, self._predicted
        count = _grow(self, tables, *start, sizes, *limits, self._columns)
        scores: list[float] = self._columns.scores[:count].tolist()
        return scores

    def paths(self, count: int) -> list[tuple[int, ...]]:
        """Return the tokens from below the root to each of the first `count` nodes, as of the last growth."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(*self._columns.numbers[:2, 1:count].tolist(), strict=True):
            paths.append((*paths[parent], token))
        return paths

    def keep(self, nodes: Sequence[int]) -> None:
        """Drop all nodes but these, given in ascending order and with all their ancestors."""
        _keep(self, nodes, self._columns)

    def copy_to(self, tree: TokenTree, count: int) -> None:
        """Copy the first `count` nodes, as of the last growth, into a tree that has only its root."""
        if count == 1:
            return
        ids, parents, depths, _, by_mtp = self._columns.numbers[:, 1:count].tolist()
        tree.extend(ids, parents, depths, "memory")
        if self._predicted:
            for node, is_led in enumerate(by_mtp, start=1):
                if is_led:
                    tree.sources[node] = MTP

    def extend(self, tree: TokenTree, count: int) -> None:
        """Take over the nodes that were added to a tree after the `count` nodes of `copy_to`."""
        if len(tree.ids) > count:
            _extend(self, count, tree.ids[count:], tree.parents[count:])

    def contexts(self, nodes: Sequence[int]) -> Ints:
        """Return the contexts `[M, LONGEST]` of nodes, see `layout`."""
        tails = np.empty((len(nodes), LONGEST), np.int32)
        _contexts(self, nodes, tails)
        return tails

    def candidates(self, tables: Tables, nodes: Sequence[int]) -> list[int]:
        """Return the tokens that may follow these nodes, unordered; a token is repeated for each node it may follow."""
        tokens = np.empty(len(nodes) * MOST_CANDIDATES, np.int32)
        found: list[int] = tokens[: _candidates(self, tables, nodes, tokens)].tolist()
        return found

    def drop_predictions(self) -> None:
        """Discard the predictions of an MTP layer, which belong to one step."""
        self._predicted = 0

    def add_predictions(self, frontier: Frontier, tokens: Ints, odds: Doubles) -> None:
        """Add predictions of an MTP layer, for trees that grow after this.

        A prediction belongs to a path of tokens from the root, not to a node, as a tree that grows anew may have other
        nodes. So a node finds its prediction by that of its parent and by its token.

        After the E nodes of the frontier, the predicted tokens are int32 `[E, MTP_WIDTH]`, -1 for none; their log-odds
        float64 `[E, MTP_WIDTH]`.
        """
        given, first, end = self._predictions, self._predicted, self._predicted + len(tokens)
        given.places[:, first:end] = frontier.parents, frontier.tokens, frontier.depths
        given.tokens[first:end], given.odds[first:end] = tokens, odds
        self._predicted = end

    def frontier(self, scores: Sequence[float]) -> Frontier:
        """Return the likeliest nodes that an MTP layer can be run on, by the scores of the last growth."""
        ids, parents, depths, predictions, _ = self._columns.numbers[:, : len(scores)]
        before, found = predictions[parents], self._columns.scores
        before[0] = 0  # the root's parent is no node
        nodes = np.flatnonzero((predictions < 0) & (before >= 0))
        best = nodes[np.argsort(-found[nodes], kind="stable")[:FRONTIER]]
        numbers, before, ids, depths = np.stack([best, before[best], ids[best], depths[best]]).tolist()
        return Frontier(numbers, before, ids, depths, found[best].tolist(), sum(scores))

    def learn(self, tables: Tables, entries: Ints, path: Sequence[int], chosen: Sequence[int], rate: float) -> bool:
        """Update the mixing weights by the nodes that verification reached; note and store the logits at all nodes.

        Args:
            tables: both tables of the memory, given their limits, and its weights.
            entries: `[S, WIDTH]` entries of the logits at each node; none to store the tokens alone.
            path: `[A]` nodes that verification reached.
            chosen: `[A]` tokens that the model chose there, which are stored, too.
            rate: learning rate of the gradient steps.

        Returns:
            False if the tables have no room for all that was to be stored, and are as they were.

        Raises:
            ValueError: there are more entries than nodes, or there is no such node.
        """
        stored = _learn_tree(self, tables, entries, path, chosen, rate)
        if stored < 0:
            raise ValueError(f"entries of shape {entries.shape}, nodes {[*path]} and this tree do not belong together")
        return stored > 0


class Columns(Struct):
    """Arrays for what is read of a tree of at most N = `room` nodes after each growth.

    Attributes:
        numbers: int32 `[5, N]`, ids, parents and depths as in `TokenTree`, the index of the MTP layer's prediction
            after each or -1, and 1 where the layer gives a node higher odds than the memory does.
        scores: float64 `[N]`, the probability that each is accepted.
    """

    __slots__ = ("numbers", "scores")

    def __init__(self, room: int) -> None:
        self.numbers, self.scores = np.empty((5, room), np.int32), np.empty(room)
        sizes = self.numbers.ctypes.data, 5, room, self.scores.ctypes.data, room, 0
        super().__init__(sizes, (self.numbers, self.scores))


class PredictionRows(Struct):
    """Arrays for at most `room` predictions of an MTP layer, see `NativeTree.add_predictions`.

    `places` are the parents, tokens and depths of the nodes that they follow, int32 `[3, N]`, as in `Frontier`.
    """

    __slots__ = ("odds", "places", "tokens")

    def __init__(self, room: int) -> None:
        self.places, self.tokens = np.empty((3, room), np.int32), np.empty((room, MTP_WIDTH), np.int32)
        self.odds = np.empty((room, MTP_WIDTH))
        arrays = self.places, self.tokens, self.odds
        super().__init__([field for array in arrays for field in (array.ctypes.data, *array.shape)], arrays)


_NO_PREDICTIONS = PredictionRows(0)


class Requests(Struct):
    """Trees of B requests whose texts have been read, each with the tables that it grows from."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[NativeTree, Tables]]) -> None:
        self.pairs = pairs
        super().__init__([each.address for pair in pairs for each in pair], ())

    def propose(
        self, budgets: Sequence[int], prices: Sequence[float], *, trees: bool
    ) -> tuple[list[int], list[int], list[float], list[int]]:
        """Draft what may follow the texts.

        Args:
            budgets: `[B]`, the most tokens to draft for each.
            prices: tokens that one more node costs, and `news` and `first`: a node is worth the probability that it is
                accepted, and `news / (first + size - 1)` for what its logits teach, `size` being the nodes with it.
            trees: draft trees; chains if False.

        Returns:
            The drafts one after the other: ids; parents within each draft, -1 for the text's last token; scores; and,
            `[B]`, the end of each draft in these.
        """
        most, ends = sum(budgets), np.zeros(len(budgets), np.int64)
        ids, parents, scores = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most)
        _propose(self, budgets, (*prices, OPTIMISM), trees, ids, parents, scores, ends)
        drafted = slice(int(ends[-1]))
        return ids[drafted].tolist(), parents[drafted].tolist(), scores[drafted].tolist(), ends.tolist()


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
    """Learn from a pass that verified drafts, one request after the other.

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
        Index of the first request that was not learned from: its rows do not fit its draft and tokens, or a table has
        no room. The caller sees to that one, and calls again. B if all were.
    """


@kernel(LONG_LIST, INT, result=STRUCT)
def _new_tree(excluded: Sequence[int], vocabulary: int) -> int: ...


@kernel(STRUCT)
def _free_tree(tree: int) -> None: ...


@kernel(STRUCT, MATRIX, DOUBLES)
def _use_mtp(tree: NativeTree, weights: Doubles, trust: Doubles) -> None: ...


@kernel(STRUCT, INT)
def _set_prompt(tree: NativeTree, length: int) -> None: ...


@kernel(STRUCT, INT, LONG_LIST)
def _read(tree: NativeTree, start: int, tokens: Sequence[int]) -> None: ...


@kernel(STRUCT, INT, LONG_LIST)
def _start(tree: NativeTree, root: int, last: Sequence[int]) -> None: ...


@kernel(STRUCT, STRUCT, INT, LONG_LIST, INT, STRUCT, INT, DOUBLE_LIST, INT, DOUBLE, STRUCT, result=INT)
def _grow(
    tree: NativeTree,
    tables: Tables,
    root: int,
    last: Sequence[int],
    lead: int,
    predictions: PredictionRows,
    predicted: int,
    stages: Sequence[float],
    max_depth: int,
    promise: float,
    columns: Columns,
) -> int: ...


@kernel(STRUCT, LONG_LIST, STRUCT, result=INT)
def _keep(tree: NativeTree, nodes: Sequence[int], columns: Columns) -> int: ...


@kernel(STRUCT, INT, LONG_LIST, LONG_LIST)
def _extend(tree: NativeTree, kept: int, ids: Sequence[int], parents: Sequence[int]) -> None: ...


@kernel(STRUCT, LONG_LIST, TABLE)
def _contexts(tree: NativeTree, nodes: Sequence[int], tails: Ints) -> None: ...


@kernel(STRUCT, STRUCT, LONG_LIST, INTS, result=INT)
def _candidates(tree: NativeTree, tables: Tables, nodes: Sequence[int], tokens: Ints) -> int: ...


@kernel(STRUCT, STRUCT, TABLE, LONG_LIST, LONG_LIST, DOUBLE, result=INT)
def _learn_tree(
    tree: NativeTree, tables: Tables, entries: Ints, path: Sequence[int], chosen: Sequence[int], rate: float
) -> int: ...


@kernel(STRUCT, LONG_LIST, DOUBLE_LIST, INT, INTS, INTS, DOUBLES, LONGS)
def _propose(
    requests: Requests,
    budgets: Sequence[int],
    prices: Sequence[float],
    trees: bool,
    ids: Ints,
    parents: Ints,
    scores: Doubles,
    ends: Longs,
) -> None: ...
