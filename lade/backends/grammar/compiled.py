"""Grammars compiled for a tokenizer, and matchers of a text against them."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lade.errors import InputError, MissingExtraError
from lade.grammar import shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


KEPT = 64
"""Compiled grammars that are kept for a tokenizer: those that were used last."""
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,  # symbols
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,  # some ten MB
    "step_lexer_fuel": 100_000,  # some 10 ms
    "step_max_items": 25_000,  # some 50 ms
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}
"""Less than llguidance allows, against grammars that are made to be slow; the schemas of JSONSchemaBench take half."""

Trial = Callable[[str], None]
"""Is given a grammar before it is compiled; raises `SlowGrammarError` for one that is not to be."""


class GrammarError(InputError):
    """An answer cannot follow its grammar any further."""


class SlowGrammarError(InputError):
    """A grammar takes longer to compile than it may."""


_vocabularies: WeakKeyDictionary[Any, dict[tuple[int, ...], Vocabulary]] = WeakKeyDictionary()
_making = threading.Lock()


def vocabulary_of_tokenizer(tokenizer: Any, ends: Iterable[int] = ()) -> Vocabulary:
    """What of a tokenizer grammars need; made once, which takes some seconds for a large one.

    Args:
        tokenizer: a fast transformers tokenizer.
        ends: ids that end an answer; of these only special ones can end what a grammar describes, and where there are
            none, it is the tokenizer's own end of sequence.

    Raises:
        InputError: the tokenizer is not a fast one, or knows no end of sequence.
        MissingExtraError: llguidance is not installed.
    """
    if tokenizer is None:
        raise InputError("a grammar describes text, which takes a tokenizer: give tokenizer=...")
    special = set(getattr(tokenizer, "all_special_ids", ())) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    own = getattr(tokenizer, "eos_token_id", None)
    found = tuple(sorted(special.intersection(ends))) or (() if own is None else (own,))
    if not found:
        raise InputError("the tokenizer has no end of sequence, with which a grammar ends an answer: set its eos_token")
    with _making:
        known = _vocabularies.setdefault(tokenizer, {})
        key = (len(tokenizer), *found)
        if key not in known:
            known[key] = Vocabulary(tokenizer, found)
        return known[key]


class Vocabulary:
    """A tokenizer's tokens as bytes, and the grammars that were compiled for it. Any thread may use it.

    Args:
        tokenizer: a fast transformers tokenizer.
        ends: ids that end an answer.

    Attributes:
        ends: as given.
        size: ids below it are the tokenizer's.
        specials: texts of its added tokens.
    """

    def __init__(self, tokenizer: Any, ends: tuple[int, ...]) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as problem:
            raise MissingExtraError("llguidance", "grammar") from problem
        try:
            self._tokens: LLTokenizer = from_tokenizer(tokenizer, eos_token=list(ends))
        except ValueError as problem:
            kind = type(tokenizer).__name__
            raise InputError(f"grammars cannot be used with a tokenizer of type {kind}: {problem}") from problem
        self.ends, self.size = ends, int(self._tokens.vocab_size)
        self.specials = tuple(map(str, getattr(tokenizer, "added_tokens_decoder", {}).values()))
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._trial: Trial | None = None
        self._lock = threading.Lock()

    def tried_by(self, trial: Trial) -> Vocabulary:
        """The same, with compiled grammars of its own, each of which has passed a trial."""
        other = copy.copy(self)
        other._trial, other._compiled = trial, OrderedDict()
        return other

    def compiled(self, grammar: str) -> LLMatcher:
        """A grammar at its beginning, which others share: to be copied.

        Args:
            grammar: as llguidance writes it.

        Raises:
            InputError: it is none, or takes too much to compile.
            SlowGrammarError: it has failed its trial.
        """
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None:
                self._compiled.move_to_end(grammar)
                return kept
        if self._trial is not None:
            self._trial(grammar)
        made = self._compile(grammar)  # outside the lock: others need not wait for a large one
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made

    def compiled_anew(self, grammar: str, failed: LLMatcher) -> LLMatcher:
        """The same for one answer alone; the one that has failed is not given to others any more."""
        with self._lock:
            if self._compiled.get(grammar) is failed:
                del self._compiled[grammar]
        return self._compile(grammar)

    def special_id(self, text: str) -> int | None:
        """The id of a special token, which no text of a grammar has; None where a text is none."""
        ids = self._tokens.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokens.is_special_token(ids[0]) else None

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            made = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        except UnicodeEncodeError as problem:
            raise InputError("the grammar has half a character in it, which is no text") from problem
        made.compute_bitmask()  # some errors are found there only, such as a schema that no text satisfies
        if made.is_error():
            raise InputError(f"the grammar cannot be used: {shortened(made.get_error())}")
        return made


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
