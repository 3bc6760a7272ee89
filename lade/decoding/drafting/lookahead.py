"""The paper's method: the lookahead window, the n-gram pool, and the drafter that uses both.

`rows` holds N-1 rows of W columns. Cell (l, i) is a guess for position P + l + i, where P is the position of the
current token, cell (0, 0). It sees row 0 up to column i and its own column up to row l:

    row 0   c ── x ── x ── x      one iteration old for every row further down;
            │    │    │    │      the choice of the model at the last row, `new`,
    row 1   x    x    x    x      is the next row
            │    │    │    │
    new     .    .    .    .      each column then spells an n-gram of N tokens

Source: Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
ICML 2024, arXiv 2402.02057, sections 3 and 3.2; n-grams of the prompt: the authors' library, POOL_FROM_PROMPT.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

from lade.config import LookaheadConfig
from lade.decoding.drafting.drafter import LEAD, Constraint, Draft, Drafter, Source
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict


class Window:
    """N-1 rows by W columns; while the rows fill, the columns are N-2 more and shrink by one with each row.

    Row 0 begins with the current token; its others are drawn at random, with replacement, from a vocabulary, usually
    the prompt, by a private source of randomness.
    """

    def __init__(self, columns: int, ngram: int, current: int, vocabulary: Sequence[int], rng: random.Random) -> None:
        self.columns, self.ngram = columns, ngram
        self.rows = [[current, *rng.choices(vocabulary, k=columns + ngram - 3)]]

    @property
    def full(self) -> bool:
        """True once all N-1 rows exist, so that each step yields n-grams."""
        return len(self.rows) == self.ngram - 1

    def plant(self, tree: TokenTree, columns: int | None = None) -> list[int | None]:
        """Add the cells of the first `columns` columns, or of all, below the root of `tree`.

        Returns:
            The nodes of the last row, one per column; None for cells left out or deeper than the tree may be.
        """
        column: list[int | None] = [ROOT]
        for i, token in enumerate(self.rows[0][1:], start=1):
            column.append(None if columns is not None and i >= columns else tree.add(column[-1], token, "window"))
        for row in self.rows[1:]:
            column = [tree.add(above, token, "window") for above, token in zip(column, row, strict=True)]
        return column

    def new_row(self, last_row_nodes: Sequence[int | None], argmax_ids: Sequence[int]) -> list[int]:
        """Return the model's choices at the last row, given the argmax at each node, `[S]`.

        A cell that was left out keeps its token, which affects speed alone.
        """
        last = self.rows[-1]
        return [last[i] if node is None else argmax_ids[node] for i, node in enumerate(last_row_nodes)]

    def advance(self, current: int, new: Sequence[int]) -> list[tuple[int, ...]]:
        """One Jacobi iteration: take the model's choices at the last row, one per column, and move by one position.

        The window moves by one however many tokens were accepted: guesses near the front would be lost otherwise.

        Returns:
            The n-grams (N tokens each) in the columns; none while the rows fill.
        """
        if not self.full:
            self.rows = [row[1:] for row in self.rows] + [list(new[1:])]
            self.rows[0][0] = current
            return []
        shed = list(zip(*self.rows, new, strict=True))
        self.rows = [*self.rows[1:], list(new)]
        self.rows[0] = [current, *self.rows[0][1:]]
        return shed


class NGramPool:
    """Maps a token to its G most recently seen continuations of up to N-1 tokens each; if G is 0, to none.

    A continuation that is a prefix of another one is redundant, so only the longer one is kept. No n-gram contains an
    excluded id (EOS, padding). The memory is bounded to `max_keys * G * N` ids: of more than `max_keys` tokens with
    continuations, the least recently extended is evicted.
    """

    def __init__(self, ngram: int, guesses: int, excluded: Collection[int] = (), max_keys: int = 65_536) -> None:
        self.ngram, self.guesses, self.max_keys = ngram, guesses, max_keys
        self._excluded = frozenset(excluded)
        self._table: dict[int, dict[tuple[int, ...], str]] = {}

    def __len__(self) -> int:
        """Return the number of continuations."""
        return sum(map(len, self._table.values()))

    def learn(self, ngrams: Iterable[Sequence[int]], source: str) -> None:
        """Add n-grams (2 to N ids each), the last one as the most recent; `source` is their source name."""
        if not self.guesses:
            return
        for key, *rest in ngrams:
            continuation = tuple(rest[: self.ngram - 1])
            if key in self._excluded or not self._excluded.isdisjoint(continuation):
                continue
            # Dictionaries keep insertion order: popping and reinserting makes an entry the most recent.
            entry = self._table.pop(key, {})
            self._table[key] = entry
            _enter(entry, continuation, source)
            if len(entry) > self.guesses:
                del entry[next(iter(entry))]
            if len(self._table) > self.max_keys:
                del self._table[next(iter(self._table))]

    def learn_text(self, tokens: Sequence[int], start: int, source: str) -> None:
        """Add the n-grams of a text that end with its tokens from index `start` on."""
        ends = range(max(start + 1, self.ngram), len(tokens) + 1)
        self.learn((tokens[end - self.ngram : end] for end in ends), source)

    def lookup(self, token: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the continuations of `token`, at most G, most recent first, each with its source."""
        return list(reversed(self._table.get(token, {}).items()))


def _enter(entry: dict[tuple[int, ...], str], continuation: tuple[int, ...], source: str) -> None:
    first = continuation[0]
    for other in entry:
        if other[0] != first:
            continue
        shared = min(len(other), len(continuation))
        if other[:shared] == continuation[:shared]:  # at most one matches, as no entry is a prefix of another
            known_as = entry.pop(other)
            if len(other) > len(continuation):
                continuation, source = other, known_as
            break
    entry[continuation] = source


class LookaheadDrafter(Drafter):
    """Drafts for one row by sizes W, N and G; see `Drafter`.

    Guesses of the sources come before those of the pool; G guesses of up to N - 1 tokens in all. No n-gram may contain
    an excluded id (EOS, padding). Tokens that a constraint forces come before all guesses, forbidden ones are cut off.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        excluded: Collection[int] = (),
        sources: Sequence[Source] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.config, self._sources, self._excluded = config, sources, frozenset(excluded)
        self._constraint = constraint
        self.pool = NGramPool(config.ngram, config.guesses, excluded)
        self.window: Window | None = None
        self._learns = bool(config.window or config.guesses)  # otherwise this is plain decoding

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Learn the prompt, and set up the window."""
        prompt, config = tokens[:prompt_length], self.config
        self._learn_text(prompt, 0, "prompt")
        if config.window:
            seeds = [token for token in prompt if token not in self._excluded] or tokens[-1:]
            self.window = Window(config.window, config.ngram, tokens[-1], seeds, random.Random(config.seed))
        self._learn_text(tokens, prompt_length, "text")

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """Return the tree of window and guesses, merged below the current token."""
        tree = TokenTree(context[-1], max_depth)
        last_row_nodes = self.window.plant(tree) if self.window else []
        for tokens, name in islice(self._proposed(context), self.config.guesses):
            tree.add_path(tokens, name)
        return Draft(tree, last_row_nodes=last_row_nodes, teaches=self._learns)

    def _proposed(self, context: Sequence[int]) -> Iterator[tuple[Sequence[int], str]]:
        """Yield guesses of up to N - 1 tokens with their source names, best first."""
        guesses = chain.from_iterable(source.guesses(context) for source in self._sources)
        proposed = chain(((guess.tokens, guess.source) for guess in guesses), self.pool.lookup(context[-1]))
        most, constraint = self.config.ngram - 1, self._constraint
        if constraint is None:
            yield from ((tokens[:most], name) for tokens, name in proposed)
            return
        if lead := constraint.lead(context):
            yield lead[:most], LEAD
        for tokens, name in proposed:
            if fits := constraint.fits(tokens[:most]):
                yield tokens[:fits], name

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """Advance the window; add its n-grams, those of the model's choices, and the accepted text to the pool."""
        if not draft.teaches:
            return
        if self.window:
            new = self.window.new_row(draft.last_row_nodes, readout.argmax_ids)
            self.pool.learn(self.window.advance(context[-1], new), "pool")
        self.pool.learn(chosen_ngrams(draft.tree, readout.argmax_ids, self.config.ngram), "pool")
        self._learn_text(context, len(context) - len(verdict.tokens), "text")

    def _learn_text(self, tokens: Sequence[int], start: int, source: str) -> None:
        if self.config.prompt_ngrams:
            self.pool.learn_text(tokens, start, source)


def chosen_ngrams(tree: TokenTree, argmax_ids: Sequence[int], ngram: int) -> list[tuple[int, ...]]:
    """Return for each node but the root the n-gram of its token and the model's choices after it, within the tree.

    The choice at a node continues it by one token; if a child carries that token, the child's choice comes next. These
    n-grams cost nothing, since the pass has computed every node's choice. The choices after the root are the accepted
    text, which is learned as such.

    Returns:
        S - 1 n-grams of 2 to N tokens, in the order of the nodes.
    """
    chosen: list[tuple[int, ...]] = [()] * len(tree)
    for node in range(len(tree) - 1, 0, -1):  # children come after their parents
        child = tree.child(node, argmax_ids[node])
        follows = (argmax_ids[node],) if child is None else chosen[child][: ngram - 1]
        chosen[node] = (tree.ids[node], *follows)
    return chosen[1:]
