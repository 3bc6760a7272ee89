"""Where an answer is in its grammar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING

from lade.hf.grammar.compiled import GrammarError, Vocabulary, shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Budget:
    """CPU time that following the grammars of one request may take, in all its answers together.

    Args:
        seconds: whatever its length.
        token_seconds: for each token.
    """

    def __init__(self, seconds: float, token_seconds: float) -> None:
        self._seconds, self._token_seconds = seconds, token_seconds
        self._spent, self._tokens = 0.0, 0

    def spend(self, seconds: float) -> None:
        """Count time that was spent.

        Raises:
            GrammarError: it is more than there was.
        """
        self._spent += seconds
        if self._spent > self._seconds + self._tokens * self._token_seconds:
            raise GrammarError(
                f"the grammar takes too long to follow: {self._spent:.2f} s for {self._tokens} tokens, and "
                f"{self._seconds:g} s and {1e3 * self._token_seconds:g} ms a token are allowed: give a simpler one"
            )

    def count_token(self) -> None:
        """One more was written."""
        self._tokens += 1


class Matcher:
    """The place of one answer in its grammar, which goes on, and back, as the text does.

    Answers to one grammar share its lexer, which remembers what it has found out for any of them, and fails all of them
    once that has come to a limit. So a failure counts only if the grammar, compiled anew for this answer alone and fed
    its text, fails as well: it depends on this text, and on nothing else.

    Args:
        vocabulary: of the tokenizer.
        grammar: as llguidance writes it.
        budget: what it may take; None for any time.

    Raises:
        InputError: it is no grammar, or takes too much to compile.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str, budget: Budget | None = None) -> None:
        self._vocabulary, self._grammar, self._budget = vocabulary, grammar, budget
        self._shared = vocabulary.compiled(grammar)
        self._state: LLMatcher = self._shared.deep_copy()
        self._taken: list[int] = []

    def copy(self) -> Matcher:
        """Another one at the same place."""
        twin = Matcher.__new__(Matcher)
        twin.__dict__ |= self.__dict__
        twin._state, twin._taken = self._state.deep_copy(), list(self._taken)
        return twin

    def mask(self) -> bytes:
        """Which tokens may come next, a bit each; the end of sequence alone at the end of the grammar.

        Raises:
            GrammarError: that takes too much to tell, or too long.
        """
        with self._spending():
            found = self._state.compute_bitmask()
            if self._state.is_error():
                self._renew()
                found = self._state.compute_bitmask()
                self._check()
            return found

    def take(self, tokens: Sequence[int]) -> int:
        """Go on by these tokens, up to the first one that the grammar does not allow; how many that are.

        Raises:
            GrammarError: see `mask`.
        """
        with self._spending():
            count = self._state.try_consume_tokens(list(tokens))
            if count < len(tokens) and self._has_failed():
                self._renew()
                count = self._state.try_consume_tokens(list(tokens))
                if count < len(tokens) and self._has_failed():
                    self._check()
            self._taken += tokens[:count]
            return count

    def count_token(self) -> None:
        """The last token that was taken is one of the answer's, for which there is time."""
        if self._budget is not None:
            self._budget.count_token()

    def go_back(self, tokens: int) -> None:
        """Forget the last tokens that were taken; raises like `mask`."""
        del self._taken[len(self._taken) - tokens :]
        with self._spending():
            if not self._state.rollback(tokens):
                self._renew()

    def certain(self) -> list[int]:
        """Tokens that come next whatever the answer is; raises like `mask`."""
        with self._spending():
            return self._state.compute_ff_tokens()

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the grammar allows, one after the other; raises like `mask`."""
        with self._spending():
            return self._state.validate_tokens(list(tokens))

    @contextmanager
    def _spending(self) -> Iterator[None]:
        if self._budget is None:
            yield
            return
        start = thread_time()
        yield
        self._budget.spend(thread_time() - start)

    def _has_failed(self) -> bool:
        """Whether no token is taken any more, as it is where the lexer has failed: asked for a mask, it says so."""
        self._state.compute_bitmask()
        return self._state.is_error()

    def _renew(self) -> None:
        self._shared = self._state = self._vocabulary.compiled_anew(self._grammar, self._shared)
        if self._state.try_consume_tokens(self._taken) < len(self._taken):
            self._has_failed()
            self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise GrammarError(f"the grammar takes too much to follow: {shortened(self._state.get_error())}")
