"""Best-first tree growth from the context memory, ranked together with scored guesses.

Besides the memory's rows two features belong to one text. Notes: logits computed for a position, at rejected nodes
too, are reused for the same position whatever the tokens before it. That is the idea of Jacobi decoding (arXiv
2305.10427), with whole rows of logits in place of single tokens. Matches: where the text's suffix occurred before, the
token after it is a candidate, as in SuffixDecoding (arXiv 2411.04975). Matches are mixed with the memory's rows, so a
short match counts for something where both agree, and for little where they do not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from lade.decoding.drafting.copy_drafting import TAKEN_BACK, same_beginning
from lade.decoding.drafting.drafter import Guess
from lade.decoding.drafting.memory import ContextMemory, context_of
from lade.decoding.kernels import growth
from lade.decoding.kernels.layout import NODES, PREDICTED, PROMPT, READ, Doubles, Ints
from lade.decoding.kernels.work import PER_NODE, Held, Work, empty_text
from lade.decoding.tree import TokenTree

Tokens = tuple[int, ...]


class Ranking(NamedTuple):
    """The order in which nodes are added to a tree, each after its parent.

    Attributes:
        scores: `[C]`, the probability of each node, the root's 1.0 first.
        paths: `[C]`, the tokens from below the root to each node.
        grown: `[C]`, number of the memory's nodes in a tree of each size.
        guessed: `[C]`, number of tokens of each guess in it.
        guesses: the guesses with scores.
    """

    scores: list[float]
    paths: list[Tokens]
    grown: list[int]
    guessed: list[tuple[int, ...]]
    guesses: Sequence[Guess]

    def hang(self, tree: TokenTree, size: int) -> None:
        """Add the guesses to a tree that has the memory's nodes already; `size` is the total number of nodes."""
        for guess, length in zip(self.guesses, self.guessed[size - 1], strict=True):
            for node in tree.add_path(guess.tokens[:length], guess.source):
                tree.sources[node] = guess.source  # also where the memory proposes the same node


def ranked(
    scores: Sequence[float], paths: Sequence[Tokens], guesses: Sequence[Guess], *, most: int, max_depth: int | None
) -> Ranking:
    """Merge the memory's nodes and those of guesses into one order; a node that several propose counts once.

    Args:
        scores: `[M]`, scores of the memory's nodes, the root's 1.0 first.
        paths: `[M]`, the tokens from below the root to each node; a node comes after its parent.
        guesses: guesses with scores.
        most: maximum number of nodes, the root included.
        max_depth: maximum number of tokens of a guess; None for no limit.
    """
    columns = [list(zip(scores, paths, strict=True))]
    for guess in guesses:
        columns.append([(score, tuple(guess.tokens[:end])) for end, score in enumerate(guess.scores[:max_depth], 1)])
    taken, used = set[Tokens](), [0] * len(columns)
    ranking = Ranking([], [], [], [], guesses)
    while len(taken) < most:
        heads = [column[place][0] if place < len(column) else -1.0 for column, place in zip(columns, used, strict=True)]
        best = heads.index(max(heads))  # on ties the memory's
        if heads[best] < 0:
            break
        score, path = columns[best][used[best]]
        used[best] += 1
        if path not in taken:
            taken.add(path)
            ranking.scores.append(score)
            ranking.paths.append(path)
            ranking.grown.append(used[0])
            ranking.guessed.append(tuple(used[1:]))
    return ranking


OPTIMISM = 0.7
"""Probability assumed for the likeliest child of a node that has not been expanded. With the upper bound, 1.0, a
quarter more nodes are expanded for a gain of 0.1 % in accepted tokens."""

MTP = "mtp"
"""Source name of nodes to which an MTP layer gives higher odds than the memory does."""
_ROOM = 160  # initial capacity in nodes
_NO_LIMIT = 2**31 - 1


class TreeGrower:
    """Grows one tree after the other for one text.

    Args:
        excluded: ids that are never drafted.
        vocabulary: ids below it can be fed; None for no limit.
        room: nodes that there is room for at first.

    Attributes:
        work: arrays of the tree being grown.
        held: the same as compiled code takes them.
    """

    def __init__(self, excluded: Collection[int] = (), vocabulary: int | None = None, room: int = _ROOM) -> None:
        self._excluded = sorted(excluded)
        self._vocabulary = _NO_LIMIT if vocabulary is None else vocabulary
        self.work = Work.of(room)
        self.held = Held(self.work)
        self._read: Sequence[int] = ()
        self._removed = 0

    def use_mtp(self, weights: Doubles, trust: Doubles) -> None:
        """Mix predictions of an MTP layer with these weights, which are shared and updated; see `Work`."""
        self._use(self.work._replace(mtp_weights=weights, mtp_trust=trust))

    def drop_predictions(self) -> None:
        """Discard the predictions of an MTP layer, which belong to one step."""
        self.work.used[PREDICTED] = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Index a text, so that the tree that begins after it gets matches.

        It equals the last one but for some tokens at the end of that; a list passed before is assumed to have only
        grown since, and is not compared again.
        """
        if tokens is not self._read:
            self._take_back(tokens)
            self._read = tokens
        if len(tokens) > len(self.work.text):
            self._read_anew(2 * len(tokens))
        if new := tokens[int(self.work.used[READ]) :]:
            growth.index_text(self.held, new)

    def _take_back(self, tokens: Sequence[int]) -> None:
        """Forget the tokens of the text from the first one on that differs from a new text's."""
        length = int(self.work.used[READ])
        late = max(0, min(length, len(tokens)) - TAKEN_BACK)
        kept = late + same_beginning(self.work.text[late:length].tolist(), tokens[late:])
        self._removed += length - kept
        if self._removed >= len(self.work.text):  # tokens that occur no more still take slots of `latest`
            self._read_anew(len(self.work.text))
        else:
            growth.take_back(self.held, kept)

    def _read_anew(self, room: int) -> None:
        """Forget the text, and get room for so many tokens."""
        self._use(self.work._replace(**empty_text(room)))
        self.work.used[READ] = self._removed = 0

    def reserve(self, nodes: int) -> None:
        """Grow the capacity to at least that many nodes; present nodes stay."""
        room = len(self.work.ids)
        if nodes > room:
            self._use(self.work.widened(2 * nodes))

    def set_prompt(self, length: int) -> None:
        """Set the length of the prompt, which is copied more often than the answer is."""
        self.work.used[PROMPT] = length

    def begin(self, tokens: Sequence[int], lead: Sequence[int] = ()) -> None:
        """Start a tree whose root is the last of `tokens`, followed by a chain of forced tokens."""
        self.reserve(1 + len(lead))
        work = self.work
        if work.used[READ] != len(tokens):
            work.tails[0] = context_of(tokens)
        growth.plant(self.held, len(tokens) - 1, OPTIMISM)
        if lead:
            growth.follow(self.held, 1, lead, range(len(lead)))
            work.scores[: 1 + len(lead)] = 1.0
            work.nodes[0] = len(lead)  # the tree grows from its end

    def grow(
        self, memory: ContextMemory, thresholds: Sequence[tuple[int, float]], max_depth: int | None = None
    ) -> list[float]:
        """Add the likeliest nodes.

        Args:
            memory: the context memory.
            thresholds: target sizes, each with the score that a node must exceed to be added up to that size; growth
                ends with the first size that is not reached.
            max_depth: maximum depth of a node; None for no limit.

        Returns:
            Scores of all nodes, the root's 1.0 first.
        """
        self.reserve(max(thresholds)[0])
        count = growth.grow(
            self.held,
            memory.bound,
            [*chain.from_iterable(thresholds)],
            self._excluded,
            self._vocabulary,
            _NO_LIMIT if max_depth is None else max_depth,
            OPTIMISM,
        )
        scores: list[float] = self.work.scores[:count].tolist()
        return scores

    def grow_chain(self, memory: ContextMemory, most: int, price: float, news: float, first: float) -> int:
        """Add the likeliest child of the last node while it is worth its price; return the number of nodes.

        Args:
            memory: the memory that is searched.
            most: maximum number of nodes, root included.
            price: tokens that one more node costs.
            news: tokens saved later by the logits of a second node, times `first + 1`; see `growth.grow_chain`.
            first: nodes at which that has fallen to a half.
        """
        self.reserve(most)
        limits = self._excluded, self._vocabulary, most
        return growth.grow_chain(self.held, memory.bound, *limits, price, news, first)

    def paths(self, count: int) -> list[tuple[int, ...]]:
        """Return the tokens from below the root to each of the first `count` nodes."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.work.ids[1:count].tolist(), self.work.parents[1:count].tolist(), strict=True):
            paths.append((*paths[parent], token))
        return paths

    def keep(self, nodes: Sequence[int]) -> None:
        """Drop all nodes but these, given in ascending order and with all their ancestors."""
        work, count = self.work, len(nodes)
        parents = np.searchsorted(nodes, work.parents[nodes[1:]])
        for column in (getattr(work, name) for name in PER_NODE):
            column[:count] = column[nodes]
        work.parents[1:count], work.used[NODES] = parents, count

    def hang(self, tree: TokenTree, count: int) -> None:
        """Copy the first `count` nodes into a tree that has only its root."""
        if count == 1:
            return
        work = self.work
        ids, parents, depths = (column[1:count].tolist() for column in (work.ids, work.parents, work.depths))
        tree.extend(ids, parents, depths, "memory")
        if work.used[PREDICTED]:
            for node in np.flatnonzero(work.by_mtp[1:count]).tolist():
                tree.sources[1 + node] = MTP

    def follow(self, tree: TokenTree, count: int) -> None:
        """Take over the nodes that were added to a tree after the `count` nodes of `hang`."""
        if len(tree) == count:
            return
        self.reserve(len(tree))
        growth.follow(self.held, count, tree.ids[count:], tree.parents[count:])

    def learn(self, memory: ContextMemory, path: Sequence[int], chosen: Sequence[int], entries: Ints) -> None:
        """Learn from a step.

        Args:
            memory: the memory that the tree grew from.
            path: `[A]` nodes that verification reached.
            chosen: `[A]` tokens that the model chose there.
            entries: `[S, WIDTH]` entries of the logits at all nodes, see `readout.read`.
        """
        memory.learn_tree(self.held, entries, path, chosen)

    def _use(self, work: Work) -> None:
        """Switch to these arrays, here and in compiled code."""
        self.work = work
        self.held.use(work)
