"""Best-first tree growth from the context memory, ranked together with scored guesses.

Beside the memory's rows there are notes, for one text: what the model said at the places ahead, at rejected nodes too,
is a guess for the same place again, whatever comes to stand before it. That is the idea of Jacobi decoding (arXiv
2305.10427), with whole rows in place of single tokens. And where the end of a text stood before, what followed there is
a guess, too, as SuffixDecoding (arXiv 2411.04975) makes them; here it is weighed together with what the memory says, so
that a short end counts for something where both agree, and for little where they do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np

from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.memory import RATE, ContextMemory
from lade.decoding.drafting.news import FIRST
from lade.decoding.drafting.suffix_index import EarlierText
from lade.decoding.kernels import growth
from lade.decoding.kernels.layout import LONGEST, NODES, PREDICTED, PROMPT, READ, Doubles, Ints
from lade.decoding.kernels.work import Held, Work, hold
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


OPTIMISM = 0.7
"""A node waits to be expanded as if its likeliest child had this probability. With 1.0, the bound, a quarter more nodes
are expanded for nothing but 0.1 % of what trees yield."""

MTP = "mtp"
"""The source of nodes that an MTP layer finds likelier than all else does."""
_ROOM = 160  # nodes, at first
_NO_LIMIT = 2**31 - 1


def _per_node() -> itemgetter[Any]:
    """Picks the arrays of a `Work` that have an entry for each node: those that get one longer with room for one more.

    The heap's get two longer, the text's and the weights' are as long as ever.
    """
    few, more = (cast(Iterable[Any], Work.of(room)) for room in (1, 2))
    pairs = enumerate(zip(few, more, strict=True))
    return itemgetter(*(place for place, (less, wider) in pairs if len(wider) - len(less) == 1))


_columns = _per_node()


class TreeGrower:
    """Grows one tree after the other, behind one text; knows at each node what the memory has for its context.

    Args:
        excluded: ids that are not to be drafted.
        vocabulary: ids below it can be fed; None for no limit.
        room: nodes that there is room for at first.
    """

    def __init__(self, excluded: Collection[int] = (), vocabulary: int | None = None, room: int = _ROOM) -> None:
        self._excluded = np.array(sorted(excluded), dtype=np.int64)
        self._vocabulary = _NO_LIMIT if vocabulary is None else vocabulary
        self._use(Work.of(room))
        self._earlier = EarlierText()

    @property
    def work(self) -> Work:
        """The tree that is being grown, in arrays."""
        return self._work

    @property
    def held(self) -> Held:
        """The same as compiled code takes it."""
        return self._held

    def use_mtp(self, weights: Doubles, trust: Doubles) -> None:
        """Mix predictions of an MTP layer by these weights, which are shared and learned; see `Work`."""
        self._use(self._work._replace(mtp_weights=weights, mtp_trust=trust))

    def drop_predictions(self) -> None:
        """Forget the predictions of an MTP layer: they belong to one step."""
        self._work.used[PREDICTED] = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Look for the end of this text earlier in it, in the tree that begins behind it."""
        self._earlier.read(tokens)
        if self._work.text is not self._earlier.text:
            self._use(self._work._replace(text=self._earlier.text, links=self._earlier.links))
        self._work.used[READ] = len(tokens)

    def set_prompt(self, length: int) -> None:
        """So many tokens of the text are the prompt's, which is more often copied than the answer is."""
        self._work.used[PROMPT] = length

    def begin(self, tokens: Sequence[int], lead: Sequence[int] = ()) -> None:
        """A new tree, whose root is the last of `tokens`; behind it a chain of tokens that are known to follow."""
        self._reserve(1 + len(lead))
        work = self._work
        growth.plant(self._held, len(tokens) - 1, np.array(tokens[-LONGEST:], dtype=np.int64), OPTIMISM)
        if lead:
            growth.follow(self._held, 1, np.array(lead, dtype=np.int64), np.arange(len(lead)))
            work.scores[: 1 + len(lead)] = 1.0
            work.nodes[0] = len(lead)  # the tree grows from its end

    def grow(
        self, memory: ContextMemory, thresholds: Sequence[tuple[int, float]], max_depth: int | None = None
    ) -> list[float]:
        """Add the likeliest nodes.

        Args:
            memory: what follows a context.
            thresholds: sizes up to which to grow, each with the score that a node must exceed to be added on the way
                there; growth ends with the first size that is not reached.
            max_depth: no node lies deeper; None for no limit.

        Returns:
            The scores of all nodes, the root's 1.0 first.
        """
        self._reserve(max(thresholds)[0])
        count = growth.grow(
            self._held,
            *memory.tables,
            memory.weights,
            np.array(thresholds, dtype=np.float64),
            self._excluded,
            self._vocabulary,
            _NO_LIMIT if max_depth is None else max_depth,
            OPTIMISM,
        )
        scores: list[float] = self._work.scores[:count].tolist()
        return scores

    def grow_chain(self, memory: ContextMemory, most: int, price: float, news: float) -> int:
        """Add the likeliest child of the last node while it is worth its price; return the number of nodes.

        Args:
            memory: the rows by context.
            most: nodes, the root included.
            price: tokens that one more node costs.
            news: tokens that the logits of nodes teach, see `drafting.news`.
        """
        self._reserve(most)
        (young, old), weights, excluded = memory.tables, memory.weights, self._excluded
        return growth.grow_chain(self._held, young, old, weights, excluded, self._vocabulary, most, price, news, FIRST)

    def paths(self, count: int) -> list[tuple[int, ...]]:
        """The tokens from below the root to each of the first `count` nodes."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self._work.ids[1:count].tolist(), self._work.parents[1:count].tolist(), strict=True):
            paths.append((*paths[parent], token))
        return paths

    def keep(self, nodes: Sequence[int]) -> None:
        """Drop all nodes of a tree that has grown but these, ascending; no parent of one is dropped."""
        work, count = self._work, len(nodes)
        parents = np.searchsorted(nodes, work.parents[nodes[1:]])
        for column in _columns(work):
            column[:count] = column[nodes]
        work.parents[1:count], work.used[NODES] = parents, count

    def hang(self, tree: TokenTree, count: int) -> None:
        """Hang the first `count` nodes under the root of a tree that has no other node."""
        if count == 1:
            return
        work = self._work
        ids, parents, depths = (column[1:count].tolist() for column in (work.ids, work.parents, work.depths))
        tree.extend(ids, parents, depths, "memory")
        if work.used[PREDICTED]:
            for node in np.flatnonzero(work.by_mtp[1:count]).tolist():
                tree.sources[1 + node] = MTP

    def follow(self, tree: TokenTree, count: int) -> None:
        """Take over the nodes of a tree that others have added after the `count` nodes that `hang` hung."""
        if len(tree) == count:
            return
        self._reserve(len(tree))
        others = tree.ids[count:], tree.parents[count:]
        growth.follow(self._held, count, *(np.array(column, dtype=np.int64) for column in others))

    def learn(self, memory: ContextMemory, path: Sequence[int], chosen: Sequence[int], entries: Ints) -> None:
        """Learn from a step.

        Args:
            memory: the one that the tree grew from.
            path: `[A]`, nodes that verification reached.
            chosen: `[A]`, what the model chose there.
            entries: `[S, WIDTH]`, of the logits at all nodes, see `readout.read`.
        """
        nodes, tokens = np.array(path, dtype=np.int64), np.array(chosen, dtype=np.int64)
        growth.learn_tree(self._held, *memory.tables, memory.weights, entries, nodes, tokens, RATE)
        memory.learn_step(self._work.tails[: len(entries)], entries, nodes, tokens)

    def _reserve(self, nodes: int) -> None:
        """Make room for that many nodes; those that are there stay."""
        room = len(self._work.ids)
        if nodes <= room:
            return
        self._use(self._work.widened(2 * nodes))

    def _use(self, work: Work) -> None:
        """Work with these arrays, and have compiled code do so."""
        self._work, self._held = work, hold(work)
