"""`lade.Grammar` and its logits processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from lade.backends.grammar.compiled import Budget, GrammarError, Matcher, Vocabulary, vocabulary_of_tokenizer
from lade.grammar import Grammar

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


def processor_of(grammars: Sequence[Grammar], vocabulary: Vocabulary, budget: Budget | None = None) -> GrammarProcessor:
    """One that has for each prompt of a batch its grammar, or for all of them the same; raises like `processor`."""
    return GrammarProcessor([Matcher(vocabulary, grammar.source, budget) for grammar in grammars], vocabulary)


def processor_of_tokenizer(grammars: Sequence[Grammar], tokenizer: Any, ends: Sequence[int]) -> GrammarProcessor:
    """Return the processor of some grammars for one tokenizer; see `Grammar.processor`."""
    return processor_of(grammars, vocabulary_of_tokenizer(tokenizer, ends))
