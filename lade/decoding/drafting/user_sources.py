"""Drafts of `lade.Drafter`s: validation, calibration, and a stop where asking takes longer than it saves.

A proposal is compared with the tokens that come, fed or not, so a drafter that is right is trusted within some twenty
tokens, and one that is wrong soon costs nothing. Tokens with probabilities are calibrated by what became of tokens of
about the same probability; tokens without by the number of tokens in a row that the drafter has got right.

Where drafters draft alone, `LookaheadConfig(only=True)`, their proposals are fed as they are: `LoneSources`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from operator import index
from time import perf_counter
from typing import Any

import numpy as np
import torch

from lade.config import LookaheadConfig
from lade.decoding.drafting.copy_drafting import FAINTEST, KEPT, PRIOR_WEIGHT, Agreement
from lade.decoding.drafting.drafter import (
    LEAD,
    LONGEST_CHAIN,
    Candidates,
    Constraint,
    Draft,
    Drafter,
    ForwardingDrafter,
    Guess,
)
from lade.decoding.kernels.layout import TOKEN, Ints
from lade.decoding.readout import Readout
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict
from lade.drafter import Continuation
from lade.drafter import Drafter as UserDrafter
from lade.errors import DrafterError

logger = logging.getLogger(__name__)

_BINS = 10  # of claimed probabilities: few, so that each is soon known
_TRIED = 16  # proposals whose time is compared with what they save; steps until a drafter is tried again


class ClaimCalibration:
    """Calibrates claimed probabilities by their outcomes, in bins of equal width."""

    def __init__(self) -> None:
        self._hits = [0.0] * _BINS
        self._counts = [0.0] * _BINS

    def probability(self, claimed: float) -> float:
        """Return the calibrated probability, in [0, 1)."""
        place = _bin(claimed)
        return (self._hits[place] + PRIOR_WEIGHT * min(claimed, 0.99)) / (self._counts[place] + PRIOR_WEIGHT)

    def learn(self, claimed: float, hit: bool) -> None:
        """Observe whether a token of this claimed probability came."""
        place = _bin(claimed)
        self._hits[place] = KEPT * self._hits[place] + hit
        self._counts[place] = KEPT * self._counts[place] + 1


def _bin(claimed: float) -> int:
    return min(int(claimed * _BINS), _BINS - 1)


class _Asked:
    """One continuation that was proposed, with the agreement before each of its tokens."""

    def __init__(self, rank: int, tokens: list[int], claimed: Sequence[float], agreed: int) -> None:
        self.rank, self.tokens, self.claimed, self.agreed = rank, tokens, claimed, agreed


class UserSource:
    """Asks one drafter on behalf of one row; see `drafter.Source`.

    Args:
        drafter: the drafter that the caller has given.
        vocabulary: V; ids below it can be fed.
        excluded: ids after which nothing is drafted; continuations end before them.
        longest: maximum length of a continuation.
        sized: whether to stop asking where that takes longer than it saves.
        alone: whether proposals are fed as they are, without scores.
        draws: keeps random numbers of the drafter apart from those that choose tokens; None in a thread of an engine,
            whose requests choose by generators of their own.
        now: returns the time in seconds.

    Attributes:
        name: name of the proposed tokens.
        problem: the first error; nothing is proposed after it.
        observes, observes_prompt: whether the drafter observes the predictions of passes, and those of the prompt.
    """

    def __init__(
        self,
        drafter: UserDrafter,
        vocabulary: int,
        excluded: Iterable[int] = (),
        *,
        longest: int = LONGEST_CHAIN,
        sized: bool = False,
        alone: bool = False,
        draws: AbstractContextManager[object] | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._draws = nullcontext() if draws is None else draws
        self.problem: Exception | None = None
        self._drafter, self.name, self._request = drafter, drafter.name, object()
        self._vocabulary, self._excluded, self._longest = vocabulary, frozenset(excluded), longest
        self._most = getattr(drafter, "continuations", UserDrafter.continuations)
        self._ranks = [Agreement() for _ in range(self._most)]
        self._claims = ClaimCalibration()
        self._asked: list[_Asked] = []
        self._length = 0  # of the text behind which they were proposed
        self._agreed = 0  # tokens in a row that came as the first continuation said
        self._begun = False
        self._sized, self._alone, self._now = sized, alone, now
        self.observes, self.observes_prompt = _overrides(drafter, "observe"), _overrides(drafter, "observe_prompt")
        self._proposals = self._skipped = 0
        self._asking_s = self._saved = 0.0  # per proposal: seconds, and accepted tokens
        self._token_s = 0.0  # recent seconds per token of the row

    def begin(self, prompt: Sequence[int], new: Sequence[int]) -> None:
        """Begin the row's text with a prompt and the first tokens of the answer."""
        self._begun = True
        self._call("begin", partial(self._drafter.begin, self._request, tuple(prompt)))
        self.learn(new)

    def learn(self, new: Sequence[int], sources: Sequence[str] = ()) -> None:
        """Learn tokens of the answer, and who proposed them."""
        self._call("learn", partial(self._drafter.learn, self._request, tuple(new)))
        if sources and self._asked:
            self._saved += (sources.count(self.name) - self._saved) / _TRIED

    def see_prompt(self, tokens: Sequence[int], entries: Ints) -> None:
        """Pass on the predictions at tokens of the prompt, once the text has begun."""
        if self.observes_prompt:
            likely = [_ids(row) for row in (entries & TOKEN).tolist()]
            self._call("observe_prompt", partial(self._drafter.observe_prompt, self._request, tokens, likely))

    def see(self, tree: TokenTree, readout: Readout) -> None:
        """Pass on the predictions of a pass."""
        if self.observes:
            assert readout.entries is not None
            rows = zip(readout.argmax_ids, (readout.entries & TOKEN).tolist(), strict=True)
            likely = [list(dict.fromkeys((first, *_ids(row)))) for first, row in rows]
            seen = partial(self._drafter.observe, self._request, tuple(tree.ids), tuple(tree.parents), likely)
            self._call("observe", seen)

    def observe(self, emitted: int, seconds: float) -> None:
        """Learn the duration of a step."""
        if emitted:
            self._token_s += (seconds / emitted - self._token_s) / (_TRIED if self._token_s else 1)

    def end(self) -> None:
        """End the text, once."""
        if not self._begun:
            return
        self._begun = False
        try:
            with self._draws:
                self._drafter.end(self._request)
        except Exception:
            logger.exception("%s.end failed; the text is complete", self.name)

    def guesses(self, context: Sequence[int]) -> list[Guess]:
        """See `drafter.Source`."""
        if not self._alone:
            self._calibrate(context)
        self._asked, self._length = [], len(context)
        if self.problem is not None or self._longest < 1 or not self._is_worth_asking():
            return []
        start = self._now()
        self._asked = self._call("propose", partial(self._proposed, tuple(context))) or []
        self._proposals += 1
        took = self._now() - start
        self._asking_s += (took - self._asking_s) / (_TRIED if self._proposals > 1 else 1)
        if self._alone:
            return [Guess(asked.tokens, self.name) for asked in self._asked]
        return [guess for asked in self._asked if (guess := self._guess(asked)).tokens]

    def _is_worth_asking(self) -> bool:
        """Return False where proposals have lately taken longer than the accepted tokens would without them."""
        if not self._sized or self._proposals < _TRIED or self._saved * self._token_s >= self._asking_s:
            return True
        self._skipped = (self._skipped + 1) % _TRIED
        return not self._skipped

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        """Call the drafter; an error is kept as `problem`, and nothing is called after it."""
        if self.problem is not None:
            return None
        try:
            with self._draws:
                return call()
        except DrafterError as problem:
            self.problem = problem
        except Exception as problem:  # noqa: BLE001 - ends the row, see `Drafter.problem`
            self.problem = DrafterError(self.name, f"{method} raised {type(problem).__name__}: {problem}")
            self.problem.__cause__ = problem
        return None

    def _proposed(self, context: Sequence[int]) -> list[_Asked]:
        """Return what the drafter proposes behind `context`, checked."""
        proposed = self._drafter.propose(self._request, context, self._longest)
        if proposed is None:
            return []
        asked = []
        for rank, each in enumerate(islice(proposed, self._most)):
            tokens, claimed = each if isinstance(each, Continuation) else (each, ())
            ids = list(self._checked(tokens))
            asked.append(_Asked(rank, ids, self._checked_claims(claimed, len(ids)), self._agreed))
        return asked

    def _checked(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the ids of a continuation up to the first excluded one; raise `DrafterError` for one that is no id."""
        if isinstance(tokens, str | bytes) or not hasattr(tokens, "__iter__"):
            problem = f"propose returned {tokens!r:.60} as a continuation: return a list of lists of token ids"
            raise DrafterError(self.name, problem)
        for token in islice(tokens, self._longest):
            try:
                number = index(token)
            except TypeError:
                raise DrafterError(self.name, f"propose returned {token!r:.60} as a token id") from None
            if not 0 <= number < self._vocabulary:
                problem = f"propose returned the id {number}, outside the model's vocabulary of {self._vocabulary}"
                raise DrafterError(self.name, problem)
            if number in self._excluded:
                return
            yield number

    def _checked_claims(self, claimed: Sequence[float], length: int) -> Sequence[float]:
        claims = [float(each) for each in islice(claimed, length)]
        if claims and (len(claims) < length or not all(0.0 <= each <= 1.0 for each in claims)):
            problem = f"propose returned {length} tokens with probabilities {claims!r:.60}: give one in [0, 1] for each"
            raise DrafterError(self.name, problem)
        return claims

    def _guess(self, asked: _Asked) -> Guess:
        """Return a continuation with calibrated scores, cut where it becomes too unlikely."""
        scores, score = list[float](), 1.0
        for place in range(len(asked.tokens)):
            score *= self._probability(asked, place)
            if score < FAINTEST:
                break
            scores.append(score)
        return Guess(asked.tokens[: len(scores)], self.name, scores)

    def _probability(self, asked: _Asked, place: int) -> float:
        if asked.claimed:
            return self._claims.probability(asked.claimed[place])
        return self._ranks[asked.rank].probability(asked.agreed + place)

    def _calibrate(self, context: Sequence[int]) -> None:
        """Compare what was proposed with the tokens that came."""
        new = context[self._length :]
        for asked in self._asked if new else ():
            right = self._learned(asked, new)
            if asked.rank == 0:
                self._agreed = self._agreed + right if right == len(new) else 0

    def _learned(self, asked: _Asked, new: Sequence[int]) -> int:
        """Learn from one continuation; return how many of its first tokens came."""
        for place, (expected, came) in enumerate(zip(asked.tokens, new, strict=False)):
            hit = expected == came
            if asked.claimed:
                self._claims.learn(asked.claimed[place], hit)
            else:
                self._ranks[asked.rank].learn(asked.agreed + place, hit)
            if not hit:
                return place
        return min(len(asked.tokens), len(new))


def _overrides(drafter: UserDrafter, method: str) -> bool:
    """Return whether a drafter overrides an optional method."""
    default = getattr(UserDrafter, method)
    return getattr(type(drafter), method, default) is not default


def _ids(row: Sequence[int]) -> list[int]:
    """Return the ids of a row of entries, without padding."""
    return [token for token in row if token != TOKEN]


class LoneSources(Drafter):
    """Feeds what the sources of one row propose and nothing else, in their order, `most` tokens with the root.

    Forced tokens of a constraint come before all guesses, forbidden ones are cut off.
    """

    def __init__(self, sources: Sequence[UserSource], most: int, constraint: Constraint | None = None) -> None:
        self._own, self._most, self._constraint = sources, most, constraint

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """Return the tree of all proposals, as many as may be fed."""
        tree, constraint = TokenTree(context[-1], max_depth), self._constraint
        lead = [] if constraint is None else list(constraint.lead(context)[:LONGEST_CHAIN])
        self._plant(tree, lead, LEAD)
        below = [*context, *lead] if lead else context
        for guess in (guess for source in self._own for guess in source.guesses(below)):
            path = [*lead, *guess.tokens]
            self._plant(tree, path if constraint is None else path[: constraint.fits(path)], guess.source)
        return Draft(tree, teaches=False)

    def _plant(self, tree: TokenTree, path: Sequence[int], name: str) -> None:
        node: int | None = ROOT
        for token in path:
            if node is None or (len(tree) >= self._most and tree.child(node, token) is None):
                return
            node = tree.add(node, token, name)


class SourcedDrafter(ForwardingDrafter):
    """A drafter that keeps the sources of its drafts informed about the text, and about predictions if they observe.

    Before the prompt, the text that `begin` gets has `before` tokens of the encoder's input.
    """

    def __init__(self, drafter: Drafter, sources: Sequence[UserSource], before: int = 0) -> None:
        super().__init__(drafter)
        self._own, self._before = sources, before
        self._observed = any(source.observes for source in sources)
        self._made: Draft | None = None  # the drafter's own, where a wider readout was asked for
        self._prompt: list[tuple[Sequence[int], Ints]] = []  # predictions in the prompt, before the text begins
        if any(source.observes_prompt for source in sources):
            self.wants_prompt_entries = self.learns_prompts = True

    @property
    def problem(self) -> Exception | None:  # type: ignore[override]
        """See `Drafter`."""
        return next((source.problem for source in self._own if source.problem is not None), None)

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """See `Drafter`."""
        super().begin(tokens, prompt_length)
        for source in self._own:
            source.begin(tokens[self._before : prompt_length], tokens[prompt_length:])
            for part, entries in self._prompt:
                source.see_prompt(part, entries)
        self._prompt = []

    def learn_prompt(self, tokens: Sequence[int], start: int, entries: Ints) -> None:
        """See `Drafter`; what the sources observe is kept until the text begins."""
        if self._drafter.learns_prompts:
            super().learn_prompt(tokens, start, entries)
        self._prompt.append((tuple(tokens[start : start + len(entries)]), entries.copy()))

    def candidates(self, context: Sequence[int], max_depth: int | None) -> Candidates:
        """See `Drafter`."""
        found = super().candidates(context, max_depth)
        return Candidates(found.scores, lambda: self._read(found.draft()))

    def _read(self, draft: Draft) -> Draft:
        """Ask for what the sources observe of the logits."""
        if not self._observed:
            return draft
        self._made = draft
        return draft._replace(wants_entries=True, teaches=True)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """See `Drafter`."""
        super().learn(context, self._made or draft, readout, verdict)
        for source in self._own:
            source.learn(verdict.tokens, verdict.sources)
            source.see(draft.tree, readout)

    def observe(self, emitted: int, seconds: float) -> None:
        """See `Drafter`."""
        super().observe(emitted, seconds)
        for source in self._own:
            source.observe(emitted, seconds)

    def end(self) -> None:
        """See `Drafter`."""
        super().end()
        self.close()

    def close(self) -> None:
        """See `Drafter`."""
        for source in self._own:
            source.end()


def sources_of(
    config: LookaheadConfig,
    vocabulary: int,
    excluded: Iterable[int],
    most: int,
    *,
    apart: AbstractContextManager[object] | None,
) -> list[UserSource]:
    """Return a source per drafter of `LookaheadConfig.sources`, for one row; `apart` is `draws` of `UserSource`."""
    longest = most - 1 if config.only else LONGEST_CHAIN if config.budget is None else config.budget - 1
    options: dict[str, Any] = {"longest": longest, "sized": config.method.sizes_trees, "alone": config.only}
    return [
        UserSource(each, vocabulary, excluded, draws=apart if getattr(each, "_draws", True) else None, **options)
        for each in config.sources
    ]


class DrawsApart:
    """Context in which random numbers come from generators of its own; those of the process are as before afterwards.

    Plain decoding makes no drafts, so a user's drafter must not advance the generators that tokens are drawn from.
    Its own generators start where those of the process are, and go on from one use to the next. Draws of other threads
    meanwhile are undone.
    """

    def __init__(self) -> None:
        self._own: Any = None
        self._shared: Any = None

    def __enter__(self) -> None:
        """Put the own generators in place."""
        self._shared = _all_states()
        if self._own is not None:
            _set_states(self._own)

    def __exit__(self, *error: object) -> None:
        """Put the generators of the process back."""
        self._own = _all_states()
        _set_states(self._shared)


def _all_states() -> tuple[Any, ...]:
    """Return the states of the process's generators: Python's, NumPy's, torch's for the CPU and for each device."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), devices


def _set_states(states: tuple[Any, ...]) -> None:
    python, numpy, cpu, devices = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if devices:
        torch.cuda.set_rng_state_all(devices)
