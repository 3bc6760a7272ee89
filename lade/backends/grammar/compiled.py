"""Grammars compiled for a tokenizer, and matchers that follow a text through them."""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import tokenizers

from lade.errors import InputError, MissingExtraError
from lade.grammar import GrammarError, shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


KEPT = 64  # most compiled grammars kept per tokenizer; the least recently used are evicted
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,  # symbols
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,  # some ten MB
    "step_lexer_fuel": 100_000,  # some 10 ms
    "step_max_items": 25_000,  # some 50 ms
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}
"""Limits below llguidance's defaults, against grammars made to be slow; the schemas of JSONSchemaBench need half of
them."""

Trial = Callable[[str], None]  # called with a grammar before it is compiled; raises `GrammarError` to reject it


_vocabularies: WeakKeyDictionary[Any, dict[tuple[int, ...], Vocabulary]] = WeakKeyDictionary()
_making = threading.Lock()


def vocabulary_of_tokenizer(tokenizer: Any, ends: Iterable[int] = ()) -> Vocabulary:
    """Return the vocabulary of a tokenizer, cached; creating one takes some seconds for a large tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer.
        ends: end-of-sequence ids. Only special ones among them can end an answer to a grammar; if there are none, the
            tokenizer's own end of sequence does. Ordinary ones are allowed where they complete the answer.

    Raises:
        InputError: there is no tokenizer, or it is not a fast one, or has no end of sequence.
        MissingExtraError: llguidance is not installed.
    """
    if tokenizer is None:
        raise InputError("a grammar needs a tokenizer: give tokenizer=...")
    special = set(getattr(tokenizer, "all_special_ids", ())) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    own = getattr(tokenizer, "eos_token_id", None)
    found = tuple(sorted(special.intersection(ends))) or (() if own is None else (own,))
    if not found:
        raise InputError("the tokenizer has no end of sequence, which grammars need to end an answer: set eos_token")
    with _making:
        known = _vocabularies.setdefault(tokenizer, {})
        key = (len(tokenizer), *found)
        if key not in known:
            known[key] = Vocabulary(tokenizer, found)
        return known[key].with_stops(frozenset(ends) - set(found))


class Vocabulary:
    """The tokens of a fast tokenizer as bytes, with the grammars compiled for it. Thread-safe."""

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
        self.ends, self.size = ends, int(self._tokens.vocab_size)  # ids that end an answer
        self.stops = frozenset[int]()  # ids of ordinary text after which decoding stops, too, complete or not
        self._spelling = _without_added_tokens(tokenizer)
        self.specials = tuple(map(str, getattr(tokenizer, "added_tokens_decoder", {}).values()))
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._trial: Trial | None = None
        self._lock = threading.Lock()

    def with_stops(self, stops: frozenset[int]) -> Vocabulary:
        """Return the same vocabulary for decoding that stops after some ordinary tokens."""
        if not stops:
            return self
        other = copy.copy(self)
        other.stops = stops
        return other

    def with_trial(self, trial: Trial) -> Vocabulary:
        """Return a copy with a cache of its own, whose grammars must pass a trial before they are compiled."""
        other = copy.copy(self)
        other._trial, other._compiled = trial, OrderedDict()
        return other

    def compiled(self, grammar: str) -> LLMatcher:
        """Return a compiled grammar of llguidance's format at its start; it is shared, so callers must copy it.

        Raises:
            InputError: the grammar is invalid, or exceeds the limits of compilation.
            GrammarError: the grammar failed its trial.
        """
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None:
                self._compiled.move_to_end(grammar)
                return kept
        if self._trial is not None:
            self._trial(grammar)
        made = self._compile(grammar)  # outside the lock, so that a large grammar blocks nobody
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made

    def recompiled(self, grammar: str, failed: LLMatcher) -> LLMatcher:
        """Compile a grammar again for one answer, and evict the instance that has failed."""
        with self._lock:
            if self._compiled.get(grammar) is failed:
                del self._compiled[grammar]
        return self._compile(grammar)

    def special_id(self, text: str) -> int | None:
        """Return the id of a special token, which no text of a grammar matches; None if `text` is not one."""
        ids = self._tokens.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokens.is_special_token(ids[0]) else None

    def spellings(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return the ids of a text without added tokens: as the tokenizer splits it, and by the longest tokens."""
        known = text.decode(errors="ignore")
        return self._spelling.encode(known, add_special_tokens=False).ids, self._tokens.greedy_tokenize(known)

    def is_special(self, token: int) -> bool:
        """Return True if no text matches a token."""
        return token in self.ends or self._tokens.is_special_token(token)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            made = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        except UnicodeEncodeError as problem:
            raise InputError("the grammar contains a lone surrogate, which is not valid text") from problem
        made.compute_bitmask()  # finds errors such as a schema that no text satisfies
        if made.is_error():
            raise InputError(f"the grammar cannot be used: {shortened(made.get_error())}")
        return made


def _without_added_tokens(tokenizer: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer to which the text of an added token, such as `<think>`, is text like any other."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**parts, "added_tokens": [], "post_processor": None}))


class GrammarBudget:
    """CPU time allowed for following the grammars of one request: so many seconds, and more for each token."""

    def __init__(self, seconds: float, token_seconds: float) -> None:
        self._seconds, self._token_seconds = seconds, token_seconds
        self._spent, self._tokens = 0.0, 0

    def spend(self, seconds: float) -> None:
        """Charge CPU time to the budget; raises `GrammarError` if it is exceeded."""
        self._spent += seconds
        if self._spent > self._seconds + self._tokens * self._token_seconds:
            raise GrammarError(
                f"the grammar takes too long to follow: {self._spent:.2f} s for {self._tokens} tokens, where "
                f"{self._seconds:g} s and {1e3 * self._token_seconds:g} ms per token are allowed: give a simpler one"
            )

    def count_token(self) -> None:
        """Count a token of the answer, which extends the budget."""
        self._tokens += 1


class Matcher:
    """Position of one answer in its grammar; moves forward and back with the text.

    Answers to one grammar share its lexer, which caches its states for all of them, and fails for all once it reaches a
    limit. So a failure counts only if the grammar, compiled again for this answer and fed its text, fails as well. Then
    it depends on this text alone.

    It is made of a grammar in llguidance's format, and raises like `Vocabulary.compiled`.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str, budget: GrammarBudget | None = None) -> None:
        self._vocabulary, self._grammar, self._budget = vocabulary, grammar, budget
        self._shared = vocabulary.compiled(grammar)
        self._state: LLMatcher = self._shared.deep_copy()
        self._taken: list[int] = []

    def copy(self) -> Matcher:
        """Return another matcher at the same position."""
        twin = copy.copy(self)
        twin._state, twin._taken = self._state.deep_copy(), list(self._taken)
        return twin

    def mask(self) -> bytes:
        """Return a bit per token, set if it may come next; at the end of the grammar only the end of sequence may.

        Raises:
            GrammarError: computing the mask exceeds a limit or the budget, or decoding stops after all that may come.
        """
        with self._spending():
            found = self._state.compute_bitmask()
            if self._state.is_error():
                self._renew()
                found = self._state.compute_bitmask()
                self._check()
            bits = kept = int.from_bytes(found, "little")
            if bits.bit_count() == 1 and self._stands_for_text(bits.bit_length() - 1):
                kept = 1 << self._spelled()[0]
            kept = self._without_stops(kept)
            return found if kept == bits else kept.to_bytes(len(found), "little")

    def _stands_for_text(self, token: int) -> bool:
        """Return True for a special token by which llguidance spells a forced text, and which it then refuses."""
        if not self._vocabulary.is_special(token) or self._state.validate_tokens([token]) == 1:
            return False
        return bool(self._state.compute_ff_bytes())  # none are at the end of a grammar

    def _spelled(self) -> list[int]:
        """Return the text that the grammar forces next in ordinary tokens."""
        for ids in self._vocabulary.spellings(self._state.compute_ff_bytes()):
            if count := self._state.validate_tokens(ids):
                return ids[:count]
        raise GrammarError("the grammar forces a text that the tokenizer has no ordinary tokens for")

    def _without_stops(self, bits: int) -> int:
        """Return the tokens that may come next without those that would stop decoding before the answer is complete."""
        kept = bits
        for stop in self._vocabulary.stops:
            if bits >> stop & 1 and not self._complete_after(stop):
                kept &= ~(1 << stop)
        if bits and not kept:
            raise GrammarError(
                f"in the middle of the answer the grammar allows nothing but a token of eos_token_id "
                f"({bits.bit_length() - 1}): leave ordinary tokens out of eos_token_id"
            )
        return kept

    def _complete_after(self, token: int) -> bool:
        """Return whether the answer could end after this token."""
        after = self._state.deep_copy()
        return after.try_consume_tokens([token]) == 1 and after.is_accepting()

    def take(self, tokens: Sequence[int]) -> int:
        """Consume tokens up to the first that the grammar does not allow; return their number. Raises like `mask`."""
        with self._spending():
            count = self._state.try_consume_tokens(list(tokens))
            if count < len(tokens) and self._in_error():
                self._renew()
                count = self._state.try_consume_tokens(list(tokens))
                if count < len(tokens):
                    self._check()
            self._taken += tokens[:count]
            return count

    def count_token(self) -> None:
        """Count the last consumed token as one of the answer, which extends the budget."""
        if self._budget is not None:
            self._budget.count_token()

    def rollback(self, tokens: int) -> None:
        """Roll back the last consumed tokens; raises like `mask`."""
        del self._taken[len(self._taken) - tokens :]
        with self._spending():
            if not self._state.rollback(tokens):
                self._renew()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that the grammar forces next; raises like `mask`."""
        with self._spending():
            forced = self._state.compute_ff_tokens()
            specials = any(map(self._vocabulary.is_special, forced))
            return self._spelled() if specials and self._state.validate_tokens(forced) < len(forced) else forced

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, in order, the grammar allows; raises like `mask`."""
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

    def _in_error(self) -> bool:
        """Return True if the matcher is in an error state, which a failed lexer reports only when asked for a mask."""
        self._state.compute_bitmask()
        return self._state.is_error()

    def _renew(self) -> None:
        self._shared = self._state = self._vocabulary.recompiled(self._grammar, self._shared)
        if self._state.try_consume_tokens(self._taken) < len(self._taken):
            self._check()

    def _check(self) -> None:
        if self._in_error():
            raise GrammarError(f"the grammar exceeds the limits for following it: {shortened(self._state.get_error())}")
