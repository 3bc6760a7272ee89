"""Drafters and sources: interfaces for proposing tokens, and constraints on what may be drafted.

A method is a `Drafter`: the paper's, the adaptive one, plain Jacobi decoding. Guesses that any method can use, such as
those of a text that is expected, or of a grammar that leaves no choice, come from a `Source`.

To add a source, write one file with a class that has `guesses`, and one line in `factory.drafter_for` that adds it to
`sources`. Its guesses then enter the token trees of every method: in the paper's method before those of the pool, whose
sizes they keep; in the adaptive one beside those of the memory, the likeliest first, or, if they come without scores,
after them. They are verified like all others, and `Step.sources` reports them under the name that they come with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.readout import Readout
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict


class Guess(NamedTuple):
    """Tokens that may follow a context."""

    tokens: Sequence[int]
    source: str
    """The name of what proposes them."""
    scores: Sequence[float] = ()
    """For each token the probability that it and all before it are accepted, never increasing; empty where nothing is
    known of it."""


class Source(Protocol):
    """Proposes guesses for one row."""

    def guesses(self, context: Sequence[int]) -> Iterable[Guess]:
        """Return continuations of `context`, the row's tokens so far, best first."""
        ...


class Draft(NamedTuple):
    """Token tree that one row feeds in one step.

    Attributes:
        tree: what is fed; its root is the last token of the context.
        wants_entries: whether to read the likeliest tokens of each row of logits, for `Drafter.learn`.
        last_row_nodes: `[W]`, the nodes of the last row of the lookahead window; None for cells that are left out.
        teaches: whether `Drafter.learn` looks at what is read of the logits.
    """

    tree: TokenTree
    wants_entries: bool = False
    last_row_nodes: Sequence[int | None] = ()
    teaches: bool = True


class Candidates(NamedTuple):
    """Nodes that one row could feed in one step, before the size is decided, which rows of a batch do together.

    Attributes:
        scores: for each node the probability that it is accepted, the root's 1.0 first. Empty where the size of the
            tree is not weighed.
        draft: makes the draft, once the size is decided.
    """

    scores: Sequence[float]
    draft: Callable[[], Draft]


class Unseen(NamedTuple):
    """A node that a layer can look at, since it has looked at its parent.

    Attributes:
        node: its number in the tree that was grown last.
        parent: number of its parent's prediction; 0 is the root's.
        token: of the node.
        depth: of the node, 1 below the root.
        score: probability that it is accepted.
    """

    node: int
    parent: int
    token: int
    depth: int
    score: float


class PredictedTree(Protocol):
    """The tree of one row while an MTP layer looks at it."""

    def begin(self, context: Sequence[int], max_depth: int | None) -> bool:
        """Begin a step; returns whether guesses are looked for in it."""
        ...

    def grow(self) -> float:
        """Grow the tree by what is known now; returns the sum of its scores: tokens that it is expected to yield."""
        ...

    def unseen(self, most: int) -> list[Unseen]:
        """Return the likeliest nodes of the tree grown last that have no prediction, and whose parents have one.

        Args:
            most: number of nodes to return; there may be fewer.
        """
        ...

    def candidates(self, node: int) -> list[int]:
        """Return the tokens that the memory suggests to follow a node of the tree grown last."""
        ...

    def hear(self, nodes: Sequence[Unseen], tokens: Ints, odds: Doubles) -> None:
        """Take in predictions.

        Args:
            nodes: the nodes that they follow; none for the root, whose prediction comes first.
            tokens: `[E, MTP_WIDTH]`, -1 where there are fewer.
            odds: `[E, MTP_WIDTH]`, their log-odds.
        """
        ...


class Drafter(ABC):
    """Drafts the trees of one row.

    Attributes:
        wants_prompt_entries: whether `learn_prompt` is to be called, for which logits of prompts are computed.
        learns_prompts: whether it is worth calling where they are known anyway.
        mtp: its tree, as an MTP layer looks at it before `candidates` is called; None where it takes no predictions.
        problem: the error of a caller's source, which ends the row; None if there was none.
    """

    wants_prompt_entries: bool = False
    learns_prompts: bool = False
    mtp: PredictedTree | None = None
    problem: Exception | None = None

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:  # noqa: B027 - a no-op is meant
        """Learn from prefill.

        Args:
            tokens: the prompt.
            start: number of the first token with entries.
            entries: `[T, WIDTH]`, see `readout.read`, of the logits at the tokens from `start` on.
        """

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:  # noqa: B027 - likewise
        """Prepare for the first draft, once prefill has yielded the first token."""

    @abstractmethod
    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """Draft the next step.

        Args:
            context: the row's tokens so far; the last one becomes the root.
            max_depth: no node lies deeper; None for no limit.
        """

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """The same in two stages, for a row that shares the size of its trees with others."""
        return Candidates((), partial(self.draft, context, max_depth))

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:  # noqa: B027
        """Learn from a forward pass.

        Args:
            context: the row's tokens so far, with those that were accepted.
            draft: what was fed; the last one that was made.
            readout: what was read of the logits at its S nodes; it has entries if the draft wants them. It may be empty
                if the draft teaches nothing.
            verdict: what was accepted.
        """

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:  # noqa: B027
        """Learn what a step costs.

        Args:
            fed: tokens fed, the root included.
            emitted: tokens emitted, the bonus token included.
            seconds: undisturbed seconds that the whole step took; see `lade.clock`.
            forward_s: seconds of those that the model took.
        """

    def end(self) -> None:  # noqa: B027
        """End of the row: flush pending observations."""

    def close(self) -> None:  # noqa: B027
        """Release what belongs to the row, which may not have ended: it was cancelled, or another row failed."""


class ForwardingDrafter(Drafter):
    """Forwards every call to another drafter; base class of drafters that add something to one.

    Args:
        drafter: drafter that does the work.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.wants_prompt_entries, self.learns_prompts = drafter.wants_prompt_entries, drafter.learns_prompts
        self.mtp = drafter.mtp

    @property
    def problem(self) -> Exception | None:  # type: ignore[override]
        """See `Drafter`."""
        return self._drafter.problem

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`."""
        self._drafter.learn_prompt(tokens, start, entries)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self._drafter.begin(tokens, prompt_length)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """See `Drafter`."""
        return self._drafter.draft(context, max_depth)

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """See `Drafter`."""
        return self._drafter.candidates(context, max_depth)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._drafter.learn(context, draft, readout, verdict)

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        """See `Drafter`."""
        self._drafter.observe(fed, emitted, seconds, forward_s)

    def end(self) -> None:
        """See `Drafter`."""
        self._drafter.end()

    def close(self) -> None:
        """See `Drafter`."""
        self._drafter.close()


LONGEST_LEAD = 64
"""Upper limit of forced tokens that are fed in one step."""
LEAD = "grammar"
"""Name of their source in `Step.sources`."""


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
    """Return the longest prefix of a guess that the constraint allows."""
    fits = constraint.fits(guess.tokens)
    return guess._replace(tokens=guess.tokens[:fits], scores=guess.scores[:fits])
