"""The paper's method: guesses from the lookahead window and from the pool, at fixed sizes W, N and G."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice

from lade.config import LookaheadConfig
from lade.decoding.drafting.constraint import LEAD, Constraint
from lade.decoding.drafting.drafter import Draft, Drafter, Source
from lade.decoding.drafting.ngram_pool import NGramPool
from lade.decoding.drafting.window import Window
from lade.decoding.readout import Readout
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict


class LookaheadDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        config: the sizes W, N and G.
        excluded: ids that no n-gram may contain (end of sequence, padding).
        sources: guesses that come before those of the pool; all together are G of up to N - 1 tokens.
        constraint: what must follow comes before all of them, and what cannot is left out.
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
        self._learns = bool(config.window or config.guesses)  # else this is plain decoding

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Learn the prompt, and set up the window."""
        prompt, config = tokens[:prompt_length], self.config
        self._learn_text(prompt, 0, "prompt")
        if config.window:
            seeds = [token for token in prompt if token not in self._excluded] or tokens[-1:]
            self.window = Window(config.window, config.ngram, tokens[-1], seeds, random.Random(config.seed))
        self._learn_text(tokens, prompt_length, "text")

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """Window and guesses, merged under the current token."""
        tree = TokenTree(context[-1], max_depth)
        last_row_nodes = self.window.plant(tree) if self.window else []
        for tokens, name in islice(self._proposed(context), self.config.guesses):
            tree.add_path(tokens, name)
        return Draft(tree, last_row_nodes=last_row_nodes, teaches=self._learns)

    def _proposed(self, context: Sequence[int]) -> Iterator[tuple[Sequence[int], str]]:
        """Guesses of up to N - 1 tokens, each with the name of its source, the best first."""
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
        """The window advances; its n-grams, the model's choices at all nodes and the accepted text enter the pool."""
        if not draft.teaches:
            return
        if self.window:
            new = self.window.new_row(draft.last_row_nodes, readout.argmax_ids)
            self.pool.learn(self.window.advance(context[-1], new), "pool")
        self.pool.learn(chosen_ngrams(draft.tree, readout.argmax_ids, self.config.ngram), "pool")
        self._learn_text(context, len(context) - len(verdict.tokens), "text")

    def _learn_text(self, tokens: Sequence[int], start: int, source: str) -> None:
        """Enter the n-grams that end with the tokens from `start` on."""
        if self.config.prompt_ngrams:
            ngram = self.config.ngram
            ends = range(max(start + 1, ngram), len(tokens) + 1)
            self.pool.learn((tokens[end - ngram : end] for end in ends), source)


def chosen_ngrams(tree: TokenTree, argmax_ids: Sequence[int], ngram: int) -> list[tuple[int, ...]]:
    """For each node but the root its token and what the model chose to follow it, as far as the tree shows.

    The choice at a node continues it by one token; where a child carries that token, the child's choice comes next.
    These n-grams cost nothing, since the pass has computed every node's choice. What follows the root is the accepted
    text, which is learned as such.

    Args:
        tree: the candidates of a step.
        argmax_ids: `[S]`, the argmax at each node.
        ngram: N, the greatest length.

    Returns:
        S - 1 n-grams of 2 to N tokens, in the order of the nodes.
    """
    chosen: list[tuple[int, ...]] = [()] * len(tree)
    for node in range(len(tree) - 1, 0, -1):  # children come after their parents
        child = tree.child(node, argmax_ids[node])
        follows = (argmax_ids[node],) if child is None else chosen[child][: ngram - 1]
        chosen[node] = (tree.ids[node], *follows)
    return chosen[1:]
