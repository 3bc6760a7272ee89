"""`grammar=`: what answers may be, in all the ways in which callers give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from lade.errors import InputError
from lade.hf.arguments import argument_of, prompts_in
from lade.hf.grammar.compiled import vocabulary_of_tokenizer
from lade.hf.grammar.constraint import GrammarConstraint
from lade.hf.grammar.grammar import Grammar, processor_of
from lade.hf.grammar.processor import GrammarProcessor
from lade.hf.ids import ids_of, vocabulary_of
from lade.hf.prepared import Prepared

GrammarArgument: TypeAlias = Grammar | Sequence[Grammar]
"""One for all prompts, or one for each prompt of a batch."""


def with_grammar(model: PreTrainedModel, grammar: GrammarArgument | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments of `generate`, with the processor of a grammar among them, behind the caller's own.

    Args:
        model: has the ids that end an answer, if the arguments do not.
        grammar: as the caller gave it.
        arguments: by name; with a `tokenizer`.

    Raises:
        InputError: it is none, or cannot be used with this tokenizer, or there are more or fewer than prompts.
        MissingExtraError: llguidance is not installed.
    """
    if grammar is None:
        return arguments
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
