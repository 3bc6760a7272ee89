"""The grammar backend: the `grammar=` argument, and the constraint that grammars put on drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.backends.grammar.compiled import GrammarError, Matcher, vocabulary_of_tokenizer
from lade.backends.grammar.processor import GrammarProcessor, processor_of, processor_of_tokenizer
from lade.errors import InputError
from lade.grammar import GRAMMARS, Grammar, GrammarArgument
from lade.model.prepared import Prepared, argument_of, ids_of, prompts_in, vocabulary_of


class GrammarConstraint:
    """The `Constraint` of one row.

    Its own matcher follows the text, and rolls back when the text changes, as it does for rows in lock-step, which show
    the tokens they expect. A grammar that exceeds its limits is reported by the processor, which runs next: here it
    only means that nothing is drafted any more.

    Args:
        matcher: matcher at the start of the grammar.
        start: number of prompt tokens.
        vocabulary: ids below it are tokens of both model and tokenizer; other ids would disable a matcher.
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
    """Return the arguments of `generate` with a grammar's processor added after the caller's own.

    Args:
        model: model whose end-of-sequence ids apply unless `arguments` give others.
        grammar: value of the caller's `grammar=` argument.
        arguments: keyword arguments of `generate`, with a `tokenizer`.

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

    Args:
        prepared: the prepared batch of the call.
        prompts: prompt tokens of each row, without padding.
    """
    processor = next((each for each in prepared.logits_processor if isinstance(each, GrammarProcessor)), None)
    if processor is None:
        return [None] * len(prompts)
    vocabulary = min(vocabulary_of(prepared.model), processor.vocabulary.size)
    return [
        GrammarConstraint(processor.of_row(row, len(prompts)).matcher(), len(prompt), vocabulary)
        for row, prompt in enumerate(prompts)
    ]


class GrammarBackend:
    """Structured output by llguidance, see `lade.model.registry`."""

    constraints_for = staticmethod(constraints_for)
    with_grammar = staticmethod(with_grammar)
    processor = GrammarProcessor
    processor_of_tokenizer = staticmethod(processor_of_tokenizer)


BACKEND = GrammarBackend()
GRAMMARS.fill(BACKEND)
