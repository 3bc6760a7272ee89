"""The adaptive method: token trees as large as they pay, grown best first from a memory of all logits computed.

A node's score is the probability that it is accepted. The sum of all scores, with 1.0 for the root, whose next token
the model chooses itself, is the expected number of tokens of a step.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lade.config import SIZES, LookaheadConfig
from lade.decoding.drafting.controller import Budget, Controller, FixedBudget
from lade.decoding.drafting.drafter import (
    LEAD,
    LONGEST_CHAIN,
    Candidates,
    Constraint,
    Draft,
    Drafter,
    Guess,
    Source,
    cut,
    fitting,
)
from lade.decoding.drafting.lookahead import LookaheadDrafter, Window
from lade.decoding.drafting.memory import ContextMemory, MtpWeights
from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.kernels.native_tree import Frontier, NativeTree
from lade.decoding.kernels.tables import Tables, tails_of
from lade.decoding.readout import Readout
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict

COLUMNS = 16
NGRAM = SIZES["ngram"]
"""Sizes of the lookahead window; each step feeds as many of its columns as fit."""
LEAST_COLUMNS = 3
"""Smallest window that pays for its cells."""

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

    The memory's nodes are given as in `Ranking`, `[M]`. A tree has at most `most` nodes, the root included, and a guess
    at most `max_depth` tokens; None for no limit.
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


class _Begun(NamedTuple):
    """A step that has begun: what its tree is grown from, each time it is grown.

    Attributes:
        context, max_depth: see `Drafter.draft`.
        lead: forced tokens.
        guesses: guesses of all sources but the memory.
        resting: whether drafting from the memory is skipped.
        plain: whether the root alone is fed, as there are no guesses that pay either.
        tables, stages: tables of the memory, and growth stages.
    """

    context: Sequence[int]
    max_depth: int | None
    lead: Sequence[int]
    guesses: Sequence[Guess]
    resting: bool
    plain: bool
    tables: Tables
    stages: Sequence[tuple[int, float]]


class _Fed(NamedTuple):
    """Candidates that one step fed, by their scores, likeliest first, the root's 1.0 before them.

    The ranking is None if all are the memory's, in the order of the tree.
    """

    scores: Sequence[float]
    ranking: Ranking | None

    def accepted(self, verdict: Verdict) -> list[int]:
        """Return the indices of those that were accepted."""
        if self.ranking is None:
            return [node for node in verdict.path[1:] if node < len(self.scores)]
        order = {path: number for number, path in enumerate(self.ranking.paths[: len(self.scores)])}
        paths = [tuple(verdict.tokens[:depth]) for depth in range(1, len(verdict.path))]
        return [order[path] for path in paths if path in order]


class AdaptiveDrafter(Drafter):
    """Drafts for one row; see `Drafter`, and `PredictedTree` for what an MTP layer sees of it.

    Nodes of the memory, and guesses with scores, are selected by score. If they do not use up the budget, guesses
    without scores and the lookahead window take the rest, so the window's share grows when guesses are rare.

    Args:
        config: the memory to update, None for a new one; whether to learn from the prompt and search the text for
            earlier occurrences of its suffix; seed of the window's first tokens; and a tree size, if fixed.
        budget: decides on tree sizes; not used if the config fixes one.
        excluded: ids after which nothing is drafted (EOS, padding).
        vocabulary: V; ids below it can be fed. A memory of another model may hold others. None for no limit.
        read_logits: also compute the prompt's logits, to learn from them, if the prompt is read at all.
        sources: sources of guesses besides the memory.
        constraint: forced tokens, with which the tree begins, and forbidden ones. With it there is no window.
        mtp: weights of an MTP layer's predictions; None without a layer.

    Raises:
        ValueError: there is no budget.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        budget: Budget | None = None,
        excluded: Collection[int] = (),
        *,
        vocabulary: int | None = None,
        read_logits: bool = True,
        sources: Sequence[Source] = (),
        constraint: Constraint | None = None,
        mtp: MtpWeights | None = None,
    ) -> None:
        memory = ContextMemory() if config.memory is None else config.memory
        assert isinstance(memory, ContextMemory)  # there is no other kind
        budget = budget if config.budget is None else FixedBudget(config.budget)
        if budget is None:
            raise ValueError("the adaptive method needs a budget: give one, or LookaheadConfig(budget=...)")
        self.memory, self.budget, self.learns_prompts = memory, budget, config.prompt_ngrams
        self.wants_prompt_entries = self.learns_prompts and read_logits
        self.window: Window | None = None
        self._tree = NativeTree(excluded, vocabulary)
        self._sources, self._excluded, self._constraint = sources, frozenset(excluded), constraint
        self._rng = random.Random(config.seed)
        self._written = 0  # tokens of the answer before its first step
        self._begun = False
        self._step: _Begun | None = None
        self._scores: list[float] = []  # of the tree that this step has grown
        self._fed = _Fed((), None)
        if mtp is not None:
            self.mtp = self
            self._tree.use_mtp(mtp.lines, mtp.trust)

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`."""
        self.memory.learn(tails_of(np.array(tokens, dtype=np.int64), start, len(entries)), entries)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        seeds = [token for token in tokens[:prompt_length] if token not in self._excluded] or tokens[-1:]
        self.window = Window(COLUMNS, NGRAM, tokens[-1], seeds, self._rng)
        self._written, self._begun = len(tokens) - prompt_length, False
        if self.learns_prompts:
            self.memory.learn_text(tails_of(np.array(tokens, dtype=np.int64), 0, len(tokens) - 1), tokens[1:])

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """See `Drafter`."""
        return self.candidates(context, max_depth).draft()

    def begin_step(self, context: Sequence[int], max_depth: int | None) -> Frontier | None:
        """See `PredictedTree`."""
        self._step = self._begin_step(context, max_depth)
        return None if self._step.resting else self._tree.frontier(self._grow(self._step))

    def suggested(self, nodes: Sequence[int]) -> list[int]:
        """See `PredictedTree`."""
        return self._tree.candidates(self.memory.bound, nodes)

    def add_predictions(self, frontier: Frontier, tokens: Ints, odds: Doubles) -> Frontier:
        """See `PredictedTree`."""
        assert self._step is not None
        return self._tree.frontier(self._grow(self._step, frontier, tokens, odds))

    @property
    def rests(self) -> bool:  # type: ignore[override]
        """See `Drafter`."""
        return self.budget.exhausted

    def _begin_step(self, context: Sequence[int], max_depth: int | None) -> _Begun:
        """Collect the forced tokens, and the guesses of all sources but the memory."""
        self._scores = []
        if not self._begun:  # `context` lacks an encoder's text, which `begin` gets too
            self._tree.set_prompt(len(context) - self._written)
            self._begun = True
        lead = () if self._constraint is None else self._lead(self._constraint, context, max_depth)
        guesses = self._guesses(context, lead)
        resting = self.budget.skip_drafting() and not lead
        plain = resting and not any(not own.scores or self.budget.worth_verifying(own.scores) for own in guesses)
        stages = [(1, 0.0)] if resting else self.budget.stages()  # the root alone
        if self.mtp is not None:
            self._tree.drop_predictions()
        if self.learns_prompts and not plain:
            self._tree.read(context)
        return _Begun(context, max_depth, lead, guesses, resting, plain, self.memory.bound, stages)

    def _grow(self, step: _Begun, *predictions: Any) -> list[float]:
        """Grow the tree of a step from the memory, and from predictions if there are more; return its nodes' scores."""
        self._scores = []  # of no tree, if a constraint raises an error
        if predictions:
            self._tree.add_predictions(*predictions)
        scores = self._tree.grow(step.tables, step.context, step.stages, step.max_depth, step.lead)
        self._scores = scores if self._constraint is None else self._fitting(scores)
        return self._scores

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """See `Drafter`."""
        step, self._step = self._step or self._begin_step(context, max_depth), None
        if step.plain:
            return Candidates((), lambda: Draft(TokenTree(context[-1], max_depth), teaches=False))
        scores, ranking = self._scores or self._grow(step), None
        if scored := [guess for guess in step.guesses if guess.scores]:
            paths = self._tree.paths(len(scores))
            ranking = ranked(scores, paths, scored, most=self.budget.most, max_depth=max_depth)
            scores = ranking.scores
        return Candidates(scores, partial(self._assembled, step, scores, ranking))

    def _lead(self, constraint: Constraint, context: Sequence[int], max_depth: int | None) -> Sequence[int]:
        """Return the tokens that a grammar forces next, up to the number that may be fed."""
        most = min(LONGEST_CHAIN, self.budget.most - 1)
        return constraint.lead(context)[: most if max_depth is None else min(most, max_depth)]

    def _guesses(self, context: Sequence[int], lead: Sequence[int]) -> list[Guess]:
        """Return the guesses of all sources, each after the forced tokens."""
        if not lead:
            guesses = [guess for source in self._sources for guess in source.guesses(context)]
        else:
            ahead, ones = [*context, *lead], [1.0] * len(lead)
            guesses = [
                guess._replace(tokens=[*lead, *guess.tokens], scores=[*ones, *guess.scores] if guess.scores else ())
                for source in self._sources
                for guess in source.guesses(ahead)
            ]
        if self._constraint is None:
            return guesses
        return [guess for guess in (cut(self._constraint, guess) for guess in guesses) if len(guess.tokens) > len(lead)]

    def _fitting(self, scores: Sequence[float]) -> list[float]:
        """Drop the nodes that the constraint forbids; return the scores of the others."""
        assert self._constraint is not None
        nodes = fitting(self._constraint, self._tree.paths(len(scores)))
        if len(nodes) < len(scores):
            self._tree.keep(nodes)
        return [scores[node] for node in nodes]

    def _assembled(self, step: _Begun, scores: Sequence[float], ranking: Ranking | None) -> Draft:
        """Build the draft: the best nodes, then guesses without scores and the window while the budget lasts."""
        tree, size = TokenTree(step.context[-1], step.max_depth), self.budget.choose(scores)
        grown = size if ranking is None else ranking.grown[size - 1]
        self._tree.copy_to(tree, grown)
        if ranking is not None:
            ranking.hang(tree, size)
        leading = min(len(step.lead), grown - 1)  # the likeliest nodes come first
        tree.sources[1 : 1 + leading] = [LEAD] * leading
        self._fed = _Fed(scores[:size], ranking)
        most = self.budget.fill_size(len(tree.ids))
        for guess in step.guesses:
            if not guess.scores:
                tree.add_path(guess.tokens[: most - len(tree)], guess.source)
        last_row_nodes: Sequence[int | None] = ()
        columns = (most - len(tree.ids)) // (NGRAM - 1)
        if self.window is not None and columns >= LEAST_COLUMNS and self._constraint is None:
            last_row_nodes = self.window.plant(tree, columns)
        self._tree.extend(tree, grown)
        return Draft(tree, wants_entries=True, last_row_nodes=last_row_nodes)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        if not draft.wants_entries:
            return
        assert readout.entries is not None
        self.budget.learn(self._fed.scores, self._fed.accepted(verdict))
        self.memory.learn_tree(self._tree, readout.entries, verdict.path, verdict.tokens)
        if self.window is not None and draft.last_row_nodes:
            self.window.advance(context[-1], self.window.new_row(draft.last_row_nodes, readout.argmax_ids))


def reads_logits(config: LookaheadConfig, budget: Controller | None) -> bool:
    """Return whether rows learn from the logits of their prompts.

    Rows of a fixed size do, and rows whose memory outlives them; otherwise the budget of their batch decides.
    """
    return budget is None or config.budget is not None or config.memory is not None or budget.reads_logits


def drafter_for(
    config: LookaheadConfig,
    excluded: Collection[int] = (),
    *,
    vocabulary: int | None = None,
    budget: Budget | None = None,
    sources: Sequence[Source] = (),
    constraint: Constraint | None = None,
    read_logits: bool = True,
    mtp: MtpWeights | None = None,
) -> Drafter:
    """Return a drafter for one row by the config's method; arguments and errors are those of `AdaptiveDrafter`."""
    if config.method.name == "lookahead":
        return LookaheadDrafter(config, excluded, sources, constraint)
    return AdaptiveDrafter(
        config,
        budget,
        excluded,
        vocabulary=vocabulary,
        read_logits=read_logits,
        sources=sources,
        constraint=constraint,
        mtp=mtp,
    )
