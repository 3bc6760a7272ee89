"""What a grammar says about guesses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from lade.hf.grammar.compiled import GrammarError
from lade.hf.grammar.matcher import Matcher


class GrammarConstraint:
    """The `Constraint` of one row.

    It has a matcher of its own, which goes on as the text does, and back where the text turns out to be another one:
    rows in lock-step show what they expect to write. What takes too much is an error of the processor, which is asked
    next: here nothing is guessed any more.

    Args:
        matcher: at the beginning of the grammar.
        start: tokens of the prompt.
        vocabulary: ids below it can be fed, and are the tokenizer's: others put a matcher out of action.
    """

    def __init__(self, matcher: Matcher, start: int, vocabulary: int) -> None:
        self._matcher, self._start, self._vocabulary = matcher, start, vocabulary
        self._taken: list[int] = []  # by the matcher
        self._allowed = True  # whether that is all of the answer

    def lead(self, context: Sequence[int]) -> list[int]:
        """See `Constraint`."""
        self._allowed = False
        with suppress(GrammarError):
            self._allowed = self._move_to(list(context[self._start :]))
            if self._allowed:
                return self._known(self._matcher.certain())
        return []

    def fits(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        with suppress(GrammarError):
            return self._matcher.fitting(self._known(tokens)) if self._allowed else 0
        return 0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first one that is not of the vocabulary."""
        return list(takewhile(lambda token: token < self._vocabulary, tokens))

    def _move_to(self, answer: list[int]) -> bool:
        """Have the matcher take in this answer; false where the grammar does not allow it."""
        same = len(self._taken)
        if answer[:same] != self._taken:
            pairs = zip(answer, self._taken, strict=False)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(answer))
            self._matcher.go_back(len(self._taken) - same)
            del self._taken[same:]
        new = self._known(answer[same:])
        taken = self._matcher.take(new)
        self._taken += new[:taken]
        return len(self._taken) == len(answer)
