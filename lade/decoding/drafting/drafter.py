"""Drafters and sources: interfaces for proposing tokens, and constraints on what may be drafted.

A method is a `Drafter`: the paper's, or the adaptive one. Guesses that any method can use, such as those from an
expected answer, come from a `Source`.

To add a source, write a class with the method `guesses`, and add it in `DecodeJob._sources` (`lade/hf/job.py`). Its
guesses enter the token trees of every method: in the paper's method before those of the pool, and cut to their length;
in the adaptive one together with the memory's nodes, likeliest first, or after them if they have no scores. They are
verified like all others, and `Step.sources` reports them under their source name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from lade.decoding.kernels.layout import Doubles, Ints
from lade.decoding.kernels.native_tree import Frontier
from lade.decoding.readout import Readout
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict

T = TypeVar("T")


class Guess(NamedTuple):
    """Tokens that may follow a context."""

    tokens: Sequence[int]
    source: str
    """Source name."""
    scores: Sequence[float] = ()
    """For each token the probability that it and all before it are accepted, never increasing; empty if unknown."""


class Source(Protocol):
    """Proposes guesses for one row."""

    def guesses(self, context: Sequence[int]) -> Iterable[Guess]:
        """Return continuations of `context`, the row's tokens so far, best first."""


class Draft(NamedTuple):
    """Token tree that one row feeds in one step.

    Attributes:
        tree: the token tree; its root is the last token of the context.
        wants_entries: whether `Drafter.learn` needs the top-k entries of each row of logits.
        last_row_nodes: `[W]`, the nodes of the last row of the lookahead window; None for cells that were left out.
        teaches: whether `Drafter.learn` uses the readout.
    """

    tree: TokenTree
    wants_entries: bool = False
    last_row_nodes: Sequence[int | None] = ()
    teaches: bool = True


class Candidates(NamedTuple):
    """Nodes that one row could feed in one step, before the tree size is chosen, which a batch does for all its rows.

    Attributes:
        scores: the probability that each is accepted, the root's 1.0 first; empty if the tree has a fixed size.
        draft: builds the draft, once the size is chosen.
    """

    scores: Sequence[float]
    draft: Callable[[], Draft]


class PredictedTree(Protocol):
    """The tree of one row while an MTP layer predicts its nodes."""

    def begin_step(self, context: Sequence[int], max_depth: int | None) -> Frontier | None:
        """Begin a step, see `Drafter.draft`; return the frontier of its tree, the root, or None to draft nothing."""

    def suggested(self, nodes: Sequence[int]) -> list[int]:
        """Return the tokens that the memory suggests to follow nodes of the present tree."""

    def add_predictions(self, frontier: Frontier, tokens: Ints, odds: Doubles) -> Frontier:
        """Add predictions, and grow the tree anew; return its frontier.

        They follow the E nodes of the last frontier: `[E, MTP_WIDTH]` ids, padded with -1, and their log-odds.
        """


class Drafter(ABC):
    """Drafts the trees of one row.

    Attributes:
        wants_prompt_entries: whether `learn_prompt` needs to be called, which takes the logits of the prompt.
        learns_prompts: whether to call it if these logits are known anyway.
        mtp: its tree for the predictions of an MTP layer, made before `candidates`; None if it takes no predictions.
        problem: error of a caller's own drafter, which ends the row; None if there was none.
        rests: whether drafting has cost the text all that it may, so that it feeds one token a step for now.
    """

    wants_prompt_entries: bool = False
    learns_prompts: bool = False
    mtp: PredictedTree | None = None
    problem: Exception | None = None
    rests: bool = False

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:  # noqa: B027 - a no-op is meant
        """Learn from prefill: entries `[T, WIDTH]` of the logits at the prompt's tokens from `start` on, see `read`."""

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:  # noqa: B027 - a no-op is meant
        """Prepare for the first draft, once prefill has yielded the first token."""

    @abstractmethod
    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """Draft what follows `context`, the row's tokens so far, at most `max_depth` deep; None for no limit."""

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """Draft in two stages, for a row whose tree size is chosen for the whole batch; see `draft`."""
        return Candidates((), partial(self.draft, context, max_depth))

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:  # noqa: B027
        """Learn from a forward pass.

        Args:
            context: the row's tokens so far, with those that were accepted.
            draft: the draft that was fed, the last one made.
            readout: readout of the logits at its S nodes, with entries if the draft wants them; possibly empty if the
                draft does not teach.
            verdict: the accepted path and tokens.
        """

    def observe(self, emitted: int, seconds: float) -> None:  # noqa: B027
        """Learn how many tokens a step emitted, the bonus token included, and how long it took, see `lade.clock`."""

    def end(self) -> None:  # noqa: B027
        """End of the row."""

    def close(self) -> None:  # noqa: B027
        """Release what belongs to the row, which may not have ended: it was cancelled, or another row failed."""

    def silence(self) -> None:  # noqa: B027
        """Draft nothing from now on; only an `IsolatedDrafter` can."""


class ForwardingDrafter(Drafter):
    """Forwards every call to another drafter; base class of drafters that add something to one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.wants_prompt_entries, self.learns_prompts = drafter.wants_prompt_entries, drafter.learns_prompts
        self.mtp = drafter.mtp

    @property
    def problem(self) -> Exception | None:  # type: ignore[override]
        """See `Drafter`."""
        return self._drafter.problem

    @property
    def rests(self) -> bool:  # type: ignore[override]
        """See `Drafter`."""
        return self._drafter.rests

    def _forward(self, call: Callable[..., T], *args: Any) -> T | None:
        """Make a call of the other drafter whose result nobody needs."""
        return call(*args)

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`."""
        self._forward(self._drafter.learn_prompt, tokens, start, entries)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        self._drafter.begin(tokens, prompt_length)

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """See `Drafter`."""
        return self.candidates(context, max_depth).draft()

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """See `Drafter`."""
        return self._drafter.candidates(context, max_depth)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        self._forward(self._drafter.learn, context, draft, readout, verdict)

    def observe(self, emitted: int, seconds: float) -> None:
        """See `Drafter`."""
        self._forward(self._drafter.observe, emitted, seconds)

    def end(self) -> None:
        """See `Drafter`."""
        self._forward(self._drafter.end)

    def close(self) -> None:
        """See `Drafter`."""
        self._forward(self._drafter.close)

    def silence(self) -> None:
        """See `Drafter`."""
        self.mtp = None
        self._drafter.silence()


class IsolatedDrafter(ForwardingDrafter):
    """A drafter whose error ends its own row, as its `problem`, and not the step that the row shares with others.

    Nothing is drafted after the first error, nor once it is silenced: the row then feeds its last token alone.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._problem: Exception | None = None
        self._silent = False

    @property
    def problem(self) -> Exception | None:  # type: ignore[override]
        """See `Drafter`."""
        return self._problem or super().problem

    def silence(self) -> None:
        """See `Drafter`."""
        self._silent, self.mtp = True, None

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """See `Drafter`."""

        def root_alone() -> Draft:
            return Draft(TokenTree(context[-1]), teaches=False)

        found = self._forward(super().candidates, context, max_depth)
        if found is None:
            return Candidates((), root_alone)
        return Candidates(found.scores, lambda: self._forward(found.draft) or root_alone())

    def _forward(self, call: Callable[..., T], *args: Any) -> T | None:
        """Return the result of a call; None after an error, now or before, and where nothing is drafted."""
        if self._silent or self._problem is not None:
            return None
        try:
            return call(*args)
        except Exception as problem:  # noqa: BLE001 - stored as the drafter's `problem`
            self._problem = problem
            return None


LONGEST_CHAIN = 64
"""Maximum number of tokens per guess, and of forced tokens per step."""
LEAD = "grammar"
"""Source name of forced tokens in `Step.sources`."""


class Constraint(Protocol):
    """Rules for a row's text, such as a grammar. They only tell what is worth drafting: the chooser enforces them."""

    def lead(self, context: Sequence[int]) -> Sequence[int]:
        """Return the tokens forced after `context`, the row's tokens so far; empty if there is a choice."""

    def fits(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix of `tokens` allowed after the context last passed to `lead`."""


def fitting(constraint: Constraint, paths: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes of a tree that a constraint allows, ascending; a node is among them only with its parent.

    For each node the tokens from below the root are given, after its parent's. The constraint's `lead` was last called
    with the tree's context; it may answer otherwise from one path to the next, once its budget of time is used up.
    """
    known: dict[tuple[int, ...], bool] = {(): True}
    for path in reversed(paths):  # a leaf settles the nodes above it
        if tuple(path) not in known:
            fits = constraint.fits(path)
            for end in range(1, len(path) + 1):
                known[tuple(path[:end])] = end <= fits
    kept, nodes = set[tuple[int, ...]](), list[int]()
    for node, path in enumerate(map(tuple, paths)):
        if known[path] and (not path or path[:-1] in kept):
            kept.add(path)
            nodes.append(node)
    return nodes


def cut(constraint: Constraint, guess: Guess) -> Guess:
    """Return the longest prefix of a guess that the constraint allows."""
    fits = constraint.fits(guess.tokens)
    return guess._replace(tokens=guess.tokens[:fits], scores=guess.scores[:fits])
