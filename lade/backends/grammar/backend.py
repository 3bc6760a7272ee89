"""The grammar backend: the `grammar=` argument, its logits processor, and its constraint on drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

from lade.backends.grammar.compiled import GrammarBudget, Matcher, Vocabulary, vocabulary_of_tokenizer
from lade.errors import InputError
from lade.grammar import GRAMMARS, Grammar, GrammarArgument, GrammarError
from lade.model.prepared import Prepared, argument_of, ids_of, prompts_in, vocabulary_of

_PROMPT_TAIL = 16  # tokens at the end of a prompt that identify it in the next call


class GrammarProcessor(LogitsProcessor):
    """Masks all tokens but those that each row's grammar allows; at its end, all but the end of sequence.

    It is called once per token, as in plain decoding, also on rows that beam search has reordered. A text that does not
    extend one of the last call's by one token starts a new answer. Created by `Grammar.processor`.

    The matchers are at the start of each prompt's grammar, or a single one for all prompts. If a row is `alone`, each
    of its tokens must be allowed; None to decide by the batch. Rows of a batch may have ended otherwise and be padded,
    or be beams with zero probability, so a token that is not allowed ends their answer.
    """

    def __init__(self, matchers: Sequence[Matcher], vocabulary: Vocabulary, *, alone: bool | None = None) -> None:
        self._matchers, self.vocabulary, self._alone = matchers, vocabulary, alone
        self._ends = vocabulary.ends
        self._start = 0  # number of prompt tokens
        self._rows: list[_Row] = []

    def of_row(self, row: int, rows: int) -> GrammarProcessor:
        """Return a processor for one row of a batch, alone, at the start of its grammar."""
        return GrammarProcessor([self.matcher_of(row, rows)], self.vocabulary, alone=rows == 1)

    def matcher_of(self, row: int, rows: int) -> Matcher:
        """Return a new matcher at the start of the grammar of one row of a batch."""
        return self._matchers[row * len(self._matchers) // rows].copy()

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
            self._rows = [
                _Row(list(prompt[-_PROMPT_TAIL:]), self.matcher_of(row, len(prompts)), prompts.index(prompt))
                for row, prompt in enumerate(prompts)
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
        return next((row for row in (self._rows[number], *self._rows) if row.text == text), None)


@dataclass
class _Row:
    """A text, and its position in its grammar."""

    text: list[int]  # end of the prompt, and the answer so far
    matcher: Matcher  # at the end of the text
    prompt: int  # index of the first row with the same prompt
    ended: bool = False

    def copy(self) -> _Row:
        """Return an independent copy."""
        return _Row(list(self.text), self.matcher.copy(), self.prompt, self.ended)

    def take(self, token: int, ends: Sequence[int], *, strictly: bool) -> None:
        """Consume the next token; after one of `ends` there is only padding. Strictly, raise if it is not allowed."""
        self.text.append(token)
        if self.ended:
            return
        self.matcher.count_token()
        self.ended = token in ends or not self.matcher.take([token])
        if self.ended and strictly and token not in ends:
            raise GrammarError(f"the grammar does not allow token {token}: leave out the processor that forces it")

    def mask(self, size: int, ends: Sequence[int]) -> Any:
        """Return `[V]` bool, true for tokens that are allowed."""
        if not self.ended:
            packed = np.frombuffer(self.matcher.mask(), np.uint8)
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


def processor_for(grammars: Sequence[Grammar], tokenizer: Any, ends: Sequence[int]) -> GrammarProcessor:
    """Return the processor of grammars for one tokenizer; see `Grammar.processor`."""
    return processor_of(grammars, vocabulary_of_tokenizer(tokenizer, ends))


class GrammarConstraint:
    """The `Constraint` of one row.

    Its own matcher follows the text, and rolls back when the text changes, as it does for rows in lock-step, which show
    the tokens they expect. A grammar that exceeds its limits is reported by the processor, which runs next: here it
    only means that nothing is drafted any more.

    The matcher is at the start of the grammar, after `start` tokens of the prompt. Ids from `vocabulary` on are not
    tokens of both model and tokenizer, and would disable a matcher.
    """

    def __init__(self, matcher: Matcher, start: int, vocabulary: int) -> None:
        self._matcher, self._start, self._vocabulary = matcher, start, vocabulary
        self._taken: list[int] = []  # tokens consumed by the matcher
        self._allowed = True  # true if these are the whole answer

    def lead(self, context: Sequence[int]) -> list[int]:
        """See `Constraint`."""
        self._allowed = False
        with suppress(GrammarError):
            self._allowed = self._move_to(list(context[self._start :]))
            if self._allowed:
                return self._known(self._matcher.forced_tokens())
        return []

    def fits(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        with suppress(GrammarError):
            return self._matcher.valid_prefix(self._known(tokens)) if self._allowed else 0
        return 0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first one outside the vocabulary."""
        return list(takewhile(lambda token: token < self._vocabulary, tokens))

    def _move_to(self, answer: list[int]) -> bool:
        """Move the matcher to this answer; return False if the grammar does not allow it."""
        same = len(self._taken)
        if answer[:same] != self._taken:
            pairs = zip(answer, self._taken, strict=False)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(answer))
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        new = self._known(answer[same:])
        taken = self._matcher.take(new)
        self._taken += new[:taken]
        return len(self._taken) == len(answer)


def with_grammar(model: PreTrainedModel, grammar: GrammarArgument, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`, a `tokenizer` among them, with a grammar's processor after the caller's own.

    Raises:
        InputError: the value is not a grammar, does not fit the tokenizer, or has another number of grammars than
            prompts.
        MissingExtraError: llguidance is not installed.
    """
    several = [grammar] if isinstance(grammar, Grammar) else grammar
    if not isinstance(several, Sequence) or not several or not all(isinstance(each, Grammar) for each in several):
        raise InputError(f"grammar={grammar!r:.60} is not valid: give a lade.Grammar, or one for each prompt")
    prompts = prompts_in(arguments)
    count = prompts.shape[0] if isinstance(prompts, torch.Tensor) and prompts.ndim > 1 else 1
    if len(several) not in (1, count):
        raise InputError(f"grammar has {len(several)} grammars for {count} prompts: give one for all, or one for each")
    ends = ids_of(argument_of(model, arguments, "eos_token_id"))
    processor = processor_of(several, vocabulary_of_tokenizer(arguments.get("tokenizer"), ends))
    return {**arguments, "logits_processor": [*(arguments.get("logits_processor") or ()), processor]}


def constraints_for(prepared: Prepared, prompts: Sequence[Sequence[int]]) -> list[GrammarConstraint | None]:
    """Return the constraint that a grammar processor puts on each row's drafts; None for rows without one.

    Prompts are those of each row, without padding.
    """
    processor = next((each for each in prepared.logits_processor if isinstance(each, GrammarProcessor)), None)
    if processor is None:
        return [None] * len(prompts)
    vocabulary = min(vocabulary_of(prepared.model), processor.vocabulary.size)
    return [
        GrammarConstraint(processor.matcher_of(row, len(prompts)), len(prompt), vocabulary)
        for row, prompt in enumerate(prompts)
    ]


class GrammarBackend:
    """Structured output by llguidance, see `lade.model.registry`."""

    constraints_for = staticmethod(constraints_for)
    with_grammar = staticmethod(with_grammar)
    processor = GrammarProcessor
    processor_for = staticmethod(processor_for)


GRAMMARS.fill(GrammarBackend())
