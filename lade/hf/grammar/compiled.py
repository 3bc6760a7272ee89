"""Grammars compiled for a tokenizer."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lade.errors import InputError, MissingExtraError

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
_LONGEST_REASON = 300

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


def shortened(message: str) -> str:
    """A message of llguidance on one line."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
