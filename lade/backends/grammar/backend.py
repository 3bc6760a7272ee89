"""The grammar backend's public object: the `grammar=` argument, and the constraint that it puts on drafts."""

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
from lade.grammar import Grammar, GrammarArgument
from lade.model.backend import Backend
from lade.model.prepared import Prepared, argument_of, ids_of, prompts_in, vocabulary_of


class GrammarConstraint:
    """The `Constraint` of one row.

    It has a matcher of its own, which goes on as the text does, and back where the text turns out to be another one:
    rows in lock-step show what they expect to write. What takes too much is an error of the processor, which is asked
    next: here nothing is guessed any more.

    Args:
        matcher: at the beginning of the grammar.
        start: tokens of the prompt.
        vocabulary: ids below it can be fed, and are the tokenizer's: others put a matcher out of action.
    """

    def __init__(self, matcher: Matcher, start: int, vocabulary: int) -> None:
        self._matcher, self._start, self._vocabulary = matcher, start, vocabulary
        self._taken: list[int] = []  # by the matcher
        self._allowed = True  # whether that is all of the answer

    def lead(self, context: Sequence[int]) -> list[int]:
        """See `Constraint`."""
        self._allowed = False
        with suppress(GrammarError):
            self._allowed = self._move_to(list(context[self._start :]))
            if self._allowed:
                return self._known(self._matcher.certain())
        return []

    def fits(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        with suppress(GrammarError):
            return self._matcher.fitting(self._known(tokens)) if self._allowed else 0
        return 0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first one that is not of the vocabulary."""
        return list(takewhile(lambda token: token < self._vocabulary, tokens))

    def _move_to(self, answer: list[int]) -> bool:
        """Have the matcher take in this answer; false where the grammar does not allow it."""
        same = len(self._taken)
        if answer[:same] != self._taken:
            pairs = zip(answer, self._taken, strict=False)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(answer))
            self._matcher.go_back(len(self._taken) - same)
            del self._taken[same:]
        new = self._known(answer[same:])
        taken = self._matcher.take(new)
        self._taken += new[:taken]
        return len(self._taken) == len(answer)


def with_grammar(model: PreTrainedModel, grammar: GrammarArgument, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments of `generate`, with the processor of a grammar among them, behind the caller's own.

    Args:
        model: has the ids that end an answer, if the arguments do not.
        grammar: as the caller gave it.
        arguments: by name; with a `tokenizer`.

    Raises:
        InputError: it is none, or cannot be used with this tokenizer, or there are more or fewer than prompts.
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
    """For each row what a grammar among its processors says about guesses; None where there is none.

    Args:
        prepared: the batch.
        prompts: the tokens of each row's prompt, without padding.
    """
    processor = next((each for each in prepared.logits_processor if isinstance(each, GrammarProcessor)), None)
    if processor is None:
        return [None] * len(prompts)
    vocabulary = min(vocabulary_of(prepared.model), processor.vocabulary.size)
    return [
        GrammarConstraint(processor.of_row(row, len(prompts)).matcher(), len(prompt), vocabulary)
        for row, prompt in enumerate(prompts)
    ]


class GrammarBackend(Backend):
    """Structured output by llguidance; see `lade.model.joint`."""

    constraints_for = staticmethod(constraints_for)
    with_grammar = staticmethod(with_grammar)
    processor = GrammarProcessor
    processor_of_tokenizer = staticmethod(processor_of_tokenizer)


BACKEND = GrammarBackend()
