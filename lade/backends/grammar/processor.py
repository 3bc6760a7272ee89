"""The logits processor of `lade.Grammar`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from lade.backends.grammar.compiled import GrammarBudget, GrammarError, Matcher, Vocabulary, vocabulary_of_tokenizer
from lade.grammar import Grammar

_PROMPT_TAIL = 16
"""Tokens at the end of a prompt that identify it in the next call."""


class GrammarProcessor(LogitsProcessor):
    """Masks all tokens but those that each row's grammar allows; at its end, all but the end of sequence.

    It is called once per token, as in plain decoding, also on rows that beam search has reordered. A text that does not
    extend one of the last call's by one token starts a new answer. Created by `Grammar.processor`.

    Args:
        matchers: matchers at the start of each prompt's grammar, or a single one for all prompts.
        vocabulary: vocabulary of the tokenizer.
        alone: true if there is one row, whose every token must be allowed; None to decide by the batch. Rows of a batch
            may have ended otherwise and be padded, or be beams with zero probability, so a token that is not allowed
            ends their answer.

    Attributes:
        vocabulary: vocabulary of the tokenizer.
    """

    def __init__(self, matchers: Sequence[Matcher], vocabulary: Vocabulary, *, alone: bool | None = None) -> None:
        self._matchers, self.vocabulary, self._alone = matchers, vocabulary, alone
        self._ends = vocabulary.ends
        self._start = 0  # number of prompt tokens
        self._rows: list[_Row] = []

    def of_row(self, row: int, rows: int) -> GrammarProcessor:
        """Return a processor for one row alone, at the start of its grammar.

        Args:
            row: index of the row in the batch.
            rows: B, size of the batch; a multiple of the number of prompts.
        """
        return GrammarProcessor([self._matchers[self._prompt_of(row, rows)]], self.vocabulary, alone=rows == 1)

    def matcher(self) -> Matcher:
        """Return a new matcher at the start of the first prompt's grammar."""
        return self._matchers[0].copy()

    def _prompt_of(self, row: int, rows: int) -> int:
        return row * len(self._matchers) // rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """Return masked scores `[B, V]`, given the text so far, `[B, L]`.

        Raises:
            GrammarError: other processors forbid everything that the grammar allows, in a row or in all beams of a
                prompt; or the last token of a lone answer is not allowed; or the grammar exceeds its limits.
        """
        self._advance(input_ids)
        masks = np.stack([row.mask(scores.shape[1], self._ends) for row in self._rows])  # [B, V]
        left: torch.Tensor = scores.masked_fill(~torch.from_numpy(masks).to(scores.device), float("-inf"))
        self._check_left(left.isneginf().all(dim=-1).tolist())
        return left

    def _check_left(self, dead: Sequence[bool]) -> None:
        """Raise `GrammarError` if all rows of a prompt are dead, `[B]` tells which; single beams may die."""
        if not any(dead):
            return
        stuck = {row.prompt for row, nothing in zip(self._rows, dead, strict=True) if nothing and not row.ended}
        alive = {row.prompt for row, nothing in zip(self._rows, dead, strict=True) if not nothing and not row.ended}
        if stuck - alive:
            raise GrammarError("another processor forbids all tokens that the grammar allows: leave one of them out")

    def _advance(self, input_ids: torch.Tensor) -> None:
        """Consume the last token of each row, or start new answers."""
        texts = input_ids[:, max(0, self._start - _PROMPT_TAIL) :].tolist()
        if not self._continues(texts):
            self._start = input_ids.shape[1]
            prompts = list(map(tuple, input_ids.tolist()))
            matchers = [self._matchers[self._prompt_of(row, len(prompts))] for row in range(len(prompts))]
            self._rows = [
                _Row(list(prompt[-_PROMPT_TAIL:]), matcher.copy(), prompts.index(prompt))
                for prompt, matcher in zip(prompts, matchers, strict=True)
            ]

    def _continues(self, texts: list[list[int]]) -> bool:
        """Consume the last tokens and return True if each text extends one of the last call's by one token."""
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
        """Return the row that has this text, preferably the one at index `number`."""
        if self._rows[number].text == text:
            return self._rows[number]
        return next((row for row in self._rows if row.text == text), None)


class _Row:
    """A text, and its position in its grammar.

    Args:
        text: end of the prompt, and the answer so far.
        matcher: matcher at the end of the text.
        prompt: index of the first row with the same prompt.
        ended: true if the answer has ended.
    """

    def __init__(self, text: list[int], matcher: Matcher, prompt: int, *, ended: bool = False) -> None:
        self.text, self._matcher, self.prompt, self.ended = text, matcher, prompt, ended

    def copy(self) -> _Row:
        """Return an independent copy."""
        return _Row(list(self.text), self._matcher.copy(), self.prompt, ended=self.ended)

    def take(self, token: int, ends: Sequence[int], *, strictly: bool) -> None:
        """Consume the next token.

        Args:
            token: id of the token.
            ends: ids after which there is only padding.
            strictly: true to raise if the grammar does not allow the token.
        """
        self.text.append(token)
        if self.ended:
            return
        self._matcher.count_token()
        self.ended = token in ends or not self._matcher.take([token])
        if self.ended and strictly and token not in ends:
            raise GrammarError(f"the grammar does not allow token {token}: leave out the processor that forces it")

    def mask(self, size: int, ends: Sequence[int]) -> Any:
        """Return `[V]` bool, true for tokens that are allowed."""
        if not self.ended:
            packed = np.frombuffer(self._matcher.mask(), np.uint8)
            allowed = np.unpackbits(packed, bitorder="little")[:size].view(np.bool_)
            return allowed if len(allowed) == size else np.pad(allowed, (0, size - len(allowed)))
        only = np.zeros(size, np.bool_)
        only[list(ends)] = True
        return only


def processor_of(
    grammars: Sequence[Grammar], vocabulary: Vocabulary, budget: GrammarBudget | None = None
) -> GrammarProcessor:
    """Return a processor with a grammar for each prompt of a batch, or a single one for all; raises like `Matcher`."""
    return GrammarProcessor([Matcher(vocabulary, grammar.source, budget) for grammar in grammars], vocabulary)


def processor_of_tokenizer(grammars: Sequence[Grammar], tokenizer: Any, ends: Sequence[int]) -> GrammarProcessor:
    """Return the processor of grammars for one tokenizer; see `Grammar.processor`."""
    return processor_of(grammars, vocabulary_of_tokenizer(tokenizer, ends))
