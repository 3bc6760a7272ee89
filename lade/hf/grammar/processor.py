"""The logits processor of a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessor

from lade.errors import InputError
from lade.hf.grammar.compiled import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KNOWN_BY = 16
"""Tokens at the end of a prompt by which it is told whether a text still is the one of the last call."""


class GrammarProcessor(LogitsProcessor):
    """Leaves a row the tokens that its grammar allows; at its end that is the end of sequence alone.

    It is asked about each token in turn, as plain decoding does, also about rows that beam search has exchanged. A text
    that is none of the last call's with one token more begins a new answer. Made by `Grammar.processor`.

    Args:
        matchers: at the beginning of each prompt's grammar, or one for all prompts.
        vocabulary: of the tokenizer.

    Attributes:
        vocabulary: as given.
    """

    def __init__(self, matchers: Sequence[LLMatcher], vocabulary: Vocabulary) -> None:
        self._matchers, self.vocabulary = matchers, vocabulary
        self._ends = vocabulary.ends
        self._start = 0  # columns of the prompt
        self._rows: list[_Row] = []

    def of_row(self, row: int, rows: int) -> GrammarProcessor:
        """The same for one row alone, at the beginning.

        Args:
            row: its number.
            rows: B, of the batch; a multiple of the prompts'.
        """
        return GrammarProcessor([self._matchers[self._prompt_of(row, rows)]], self.vocabulary)

    def matcher(self) -> LLMatcher:
        """A new matcher, at the beginning of the first prompt's grammar."""
        return self._matchers[0].deep_copy()

    def _prompt_of(self, row: int, rows: int) -> int:
        return row * len(self._matchers) // rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """Scores `[B, V]`, given the text so far, `[B, L]`.

        Raises:
            InputError: the grammar leaves nothing that other processors allow; the last token of an answer is none
                that it allows; or it takes too much to say what it allows.
        """
        self._advance(input_ids)
        masks = np.stack([row.mask(scores.shape[1], self._ends) for row in self._rows])  # [B, V]
        left: torch.Tensor = scores.masked_fill(~torch.from_numpy(masks).to(scores.device), float("-inf"))
        if len(self._rows) == 1 and bool(left.isneginf().all()):
            raise InputError("the grammar allows only tokens that another processor forbids: leave one of them out")
        return left

    def _advance(self, input_ids: torch.Tensor) -> None:
        """Take in the last token of each row, or begin."""
        texts = input_ids[:, max(0, self._start - _KNOWN_BY) :].tolist()
        if not self._goes_on(texts):
            self._start = input_ids.shape[1]
            known = input_ids[:, -_KNOWN_BY:].tolist()
            numbers = [self._prompt_of(row, len(known)) for row in range(len(known))]
            self._rows = [_Row(text, self._matchers[at].deep_copy()) for text, at in zip(known, numbers, strict=True)]

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
        alone = len(rows) == 1
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
    """

    def __init__(self, text: list[int], matcher: LLMatcher, *, over: bool = False) -> None:
        self.text, self._matcher, self._over = text, matcher, over

    def copy(self) -> _Row:
        return _Row(list(self.text), self._matcher.deep_copy(), over=self._over)

    def take(self, token: int, ends: Sequence[int], *, strictly: bool) -> None:
        """Take in the next token.

        Args:
            token: its id.
            ends: ids after which there is only padding.
            strictly: whether it must be one that was allowed; rows of batches that have ended are padded.
        """
        self.text.append(token)
        if self._over:
            return
        self._over = token in ends or not self._matcher.try_consume_tokens([token])
        if self._over and strictly and token not in ends:
            self._check()
            raise InputError(f"the token {token} is none that the grammar allows: another processor made it possible")

    def mask(self, size: int, ends: Sequence[int]) -> Any:
        """`[V]` bool, true for tokens that are allowed."""
        if not self._over:
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            allowed = np.unpackbits(packed, bitorder="little")[:size].view(np.bool_)
            return allowed if len(allowed) == size else np.pad(allowed, (0, size - len(allowed)))
        only = np.zeros(size, np.bool_)
        only[list(ends)] = True
        return only

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"the grammar takes too much to follow: {self._matcher.get_error():.200}")
