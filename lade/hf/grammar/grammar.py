"""`lade.Grammar` and its logits processor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from lade.errors import InputError, MissingExtraError
from lade.hf.grammar.compiled import Budget, GrammarError, Matcher, Vocabulary, shortened, vocabulary_of_tokenizer

_KNOWN_BY = 16
"""Tokens at the end of a prompt by which it is told whether a text still is the one of the last call."""


class GrammarProcessor(LogitsProcessor):
    """Leaves a row the tokens that its grammar allows; at its end that is the end of sequence alone.

    It is asked about each token in turn, as plain decoding does, also about rows that beam search has exchanged. A text
    that is none of the last call's with one token more begins a new answer. Made by `Grammar.processor`.

    Args:
        matchers: at the beginning of each prompt's grammar, or one for all prompts.
        vocabulary: of the tokenizer.
        alone: whether there is one row: then each token must be one that was allowed. A row of a batch may have ended
            otherwise, and be padded, or be a beam without any probability; a token that is not allowed ends its answer.

    Attributes:
        vocabulary: as given.
    """

    def __init__(self, matchers: Sequence[Matcher], vocabulary: Vocabulary, *, alone: bool | None = None) -> None:
        self._matchers, self.vocabulary, self._alone = matchers, vocabulary, alone
        self._ends = vocabulary.ends
        self._start = 0  # columns of the prompt
        self._rows: list[_Row] = []

    def of_row(self, row: int, rows: int) -> GrammarProcessor:
        """The same for one row alone, at the beginning.

        Args:
            row: its number.
            rows: B, of the batch; a multiple of the prompts'.
        """
        return GrammarProcessor([self._matchers[self._prompt_of(row, rows)]], self.vocabulary, alone=rows == 1)

    def matcher(self) -> Matcher:
        """A new matcher, at the beginning of the first prompt's grammar."""
        return self._matchers[0].copy()

    def _prompt_of(self, row: int, rows: int) -> int:
        return row * len(self._matchers) // rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """Scores `[B, V]`, given the text so far, `[B, L]`.

        Raises:
            GrammarError: other processors forbid all that the grammar allows, in a row or in all beams of a prompt; the
                last token of a lone answer is none that it allows; or it takes too much to say what it allows.
        """
        self._advance(input_ids)
        masks = np.stack([row.mask(scores.shape[1], self._ends) for row in self._rows])  # [B, V]
        left: torch.Tensor = scores.masked_fill(~torch.from_numpy(masks).to(scores.device), float("-inf"))
        self._check_left(left.isneginf().all(dim=-1).tolist())
        return left

    def _check_left(self, dead: Sequence[bool]) -> None:
        """Raise `GrammarError` where nothing is left for any row of a prompt, `[B]` says for which; beams may die."""
        if not any(dead):
            return
        stuck = {row.prompt for row, nothing in zip(self._rows, dead, strict=True) if nothing and not row.over}
        alive = {row.prompt for row, nothing in zip(self._rows, dead, strict=True) if not nothing and not row.over}
        if stuck - alive:
            raise GrammarError("the grammar allows only tokens that another processor forbids: leave one of them out")

    def _advance(self, input_ids: torch.Tensor) -> None:
        """Take in the last token of each row, or begin."""
        texts = input_ids[:, max(0, self._start - _KNOWN_BY) :].tolist()
        if not self._goes_on(texts):
            self._start = input_ids.shape[1]
            prompts = list(map(tuple, input_ids.tolist()))
            matchers = [self._matchers[self._prompt_of(row, len(prompts))] for row in range(len(prompts))]
            self._rows = [
                _Row(list(prompt[-_KNOWN_BY:]), matcher.copy(), prompts.index(prompt))
                for prompt, matcher in zip(prompts, matchers, strict=True)
            ]

    def _goes_on(self, texts: list[list[int]]) -> bool:
        """Whether each text is one of the last call's and a token more, which then is taken in."""
        if len(texts) != len(self._rows):
            return False
        origins = [self._origin(text[:-1], row) for row, text in enumerate(texts)]
        found = [origin for origin in origins if origin is not None]
        if len(found) != len(origins):
            return False
        in_place = all(origin is row for origin, row in zip(found, self._rows, strict=True))
        rows = found if in_place else [origin.copy() for origin in found]
        alone = len(rows) == 1 if self._alone is None else self._alone
        for row, text in zip(rows, texts, strict=True):
            row.take(text[-1], self._ends, strictly=alone)
        self._rows = rows
        return True

    def _origin(self, text: list[int], number: int) -> _Row | None:
        """The row that has this text; the one of that number among several."""
        if self._rows[number].text == text:
            return self._rows[number]
        return next((row for row in self._rows if row.text == text), None)


class _Row:
    """A text, and where it is in its grammar.

    Args:
        text: the end of the prompt, and the answer so far.
        matcher: at its end.
        prompt: the first row that has the same one.
        over: whether the answer has ended.
    """

    def __init__(self, text: list[int], matcher: Matcher, prompt: int, *, over: bool = False) -> None:
        self.text, self._matcher, self.prompt, self.over = text, matcher, prompt, over

    def copy(self) -> _Row:
        return _Row(list(self.text), self._matcher.copy(), self.prompt, over=self.over)

    def take(self, token: int, ends: Sequence[int], *, strictly: bool) -> None:
        """Take in the next token.

        Args:
            token: its id.
            ends: ids after which there is only padding.
            strictly: whether it must be one that was allowed.
        """
        self.text.append(token)
        if self.over:
            return
        self._matcher.count_token()
        self.over = token in ends or not self._matcher.take([token])
        if self.over and strictly and token not in ends:
            raise GrammarError(f"the token {token} is none that the grammar allows: another processor made it possible")

    def mask(self, size: int, ends: Sequence[int]) -> Any:
        """`[V]` bool, true for tokens that are allowed."""
        if not self.over:
            packed = np.frombuffer(self._matcher.mask(), np.uint8)
            allowed = np.unpackbits(packed, bitorder="little")[:size].view(np.bool_)
            return allowed if len(allowed) == size else np.pad(allowed, (0, size - len(allowed)))
        only = np.zeros(size, np.bool_)
        only[list(ends)] = True
        return only


_VALUES = frozenset(["const", "enum", "default", "examples"])
"""Members of a schema that are no schemas."""


@dataclass(frozen=True)
class Grammar:
    """What an answer may be: made by one of the functions below.

    >>> grammar = lade.Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}})
    >>> ids = lade.generate(model, **inputs, max_new_tokens=100, grammar=grammar, tokenizer=tokenizer)

    An answer that ends by itself is complete; one that is cut off by its greatest length may be not.

    Attributes:
        source: the grammar as llguidance writes it.
    """

    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | type, *, whitespace: bool = False) -> Grammar:
        """JSON that a schema describes, its members in the order of the schema.

        Args:
            schema: a JSON schema, as an object or as JSON, or a pydantic model.
            whitespace: whether the answer may have whitespace between tokens; without, more of it is certain, which
                takes fewer steps.

        Raises:
            InputError: it is no schema. What of a schema is not supported is found when it is used with a tokenizer.
            MissingExtraError: llguidance is not installed.
        """
        of_model = getattr(schema, "model_json_schema", None)
        given = of_model() if of_model is not None else schema
        try:
            text = given if isinstance(given, str) else json.dumps(_said(given), allow_nan=False)
            return cls(_llguidance().grammar_from_json_schema(text, overrides={"whitespace_flexible": whitespace}))
        except (TypeError, ValueError, RecursionError) as problem:
            raise InputError(f"the schema cannot be used: {shortened(str(problem))}") from problem

    @classmethod
    def json_object(cls, *, whitespace: bool = False) -> Grammar:
        """Any JSON object; see `json_schema`."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text all of which a regular expression matches, in the syntax of Rust's regex crate.

        Raises:
            InputError: it is no text. What of a pattern is not supported is found when it is used with a tokenizer.
            MissingExtraError: llguidance is not installed.
        """
        return cls(_llguidance().grammar_from_regex(_text(pattern, "pattern")))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Grammar:
        """One of several texts.

        Raises:
            InputError: there is none, or one is no text or empty.
        """
        several = [] if isinstance(texts, str) else list(texts)
        if not several or not all(isinstance(text, str) and text for text in several):
            raise InputError(f"choice={texts!r:.60} is not valid: give a list of texts, none of them empty")
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in several)
        return cls.lark(f"start: TEXT\nTEXT: {alternatives}")  # a terminal: as rules, two thousand were too many

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls(_llguidance().grammar_from_lark(_text(grammar, "grammar")))

    @classmethod
    def nested(cls, lark: str, parts: Mapping[str, Grammar]) -> Grammar:
        """A Lark grammar that has other grammars in it, each written `@name`."""
        listed = [{"name": name, **part._definition} for name, part in parts.items()]
        return cls(json.dumps({"grammars": [{"name": "nesting", "lark_grammar": lark}, *listed]}, ensure_ascii=False))

    @property
    def _definition(self) -> dict[str, Any]:
        """As one of several grammars; one that is nested itself is not to be nested again."""
        if not self.source.startswith("{"):
            return {"lark_grammar": self.source}
        (found,) = json.loads(self.source)["grammars"]
        return {kind: value for kind, value in found.items() if kind != "name" and value is not None}

    def processor(self, tokenizer: Any, eos_token_id: int | Sequence[int] | None = None) -> GrammarProcessor:
        """A logits processor for `model.generate`, of one generation at a time, with the same tokens.

        >>> grammar = lade.Grammar.json_object()
        >>> ids = model.generate(**inputs, logits_processor=[grammar.processor(tokenizer)], max_new_tokens=100)

        With `custom_generate=lade.decode`, or an enabled model, guesses are made by it, too.

        Args:
            tokenizer: the model's.
            eos_token_id: what ends an answer, as in `model.generate`; None for the tokenizer's own.

        Raises:
            InputError: the grammar, or the tokenizer, cannot be used.
            MissingExtraError: llguidance is not installed.
        """
        ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ()
        return processor_of([self], vocabulary_of_tokenizer(tokenizer, ends))


def processor_of(grammars: Sequence[Grammar], vocabulary: Vocabulary, budget: Budget | None = None) -> GrammarProcessor:
    """One that has for each prompt of a batch its grammar, or for all of them the same; raises like `processor`."""
    return GrammarProcessor([Matcher(vocabulary, grammar.source, budget) for grammar in grammars], vocabulary)


def _said(schema: Any) -> Any:
    """A schema without `"propertyNames": {"type": "string"}`, which is so in any JSON, and which llguidance refuses.

    What describes records in TypeScript writes it for each of them.
    """
    if isinstance(schema, list | tuple):
        return [_said(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: part for name, part in schema.items() if (name, part) != ("propertyNames", {"type": "string"})}
    return {name: part if name in _VALUES else _said(part) for name, part in kept.items()}


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name}={value!r:.60} is not valid: give a text")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"{name}={value!r:.60} has half a character in it, which is no text") from problem
    return value


def _llguidance() -> Any:
    """What writes grammars."""
    try:
        from llguidance import LLMatcher
    except ImportError as problem:
        raise MissingExtraError("llguidance", "grammar") from problem
    return LLMatcher
