"""Rules for calling processors and criteria row by row, which plain decoding calls for a whole batch.

Plain decoding calls them with all rows, which are equally long. Where rows advance at their own pace, they are called
for each row separately, with the columns that plain decoding would show of it. For transformers' own classes the result
is the same, as they treat each row independently; for a user's own it is unknown, so those rows advance in lock-step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lade.errors import UnsupportedArgumentError
from lade.grammar import GRAMMARS
from lade.model.config import Positions
from lade.model.prepared import PromptTexts

ROW_WISE_PROCESSORS = frozenset(
    f"{name}LogitsProcessor"
    for name in """
    AlternatingCodebooks BarkEosPrioritizer EncoderNoRepeatNGram EncoderRepetitionPenalty ForcedBOSToken ForcedEOSToken
    InfNanRemove MinLength MinNewTokensLength NoBadWords NoRepeatNGram PrefixConstrained RepetitionPenalty SequenceBias
    SuppressTokens SuppressTokensAtBegin Watermark WhisperTimeStamp
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
) | frozenset(
    """
    EpsilonLogitsWarper EtaLogitsWarper ExponentialDecayLengthPenalty LogitNormalization MinPLogitsWarper
    TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
    """.split()  # noqa: SIM905
)
"""Transformers' processors that treat each row independently; others may pair rows, count calls, or keep a state."""

REFUSED_PROCESSORS = {"WhisperNoSpeechDetection": "it runs the model for all rows"}
"""Transformers' processors that are refused, with the reason."""

ROW_WISE_CRITERIA = frozenset({"EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"})

REMEDY = 'decode the prompts one by one, use plain model.generate, or lookahead="auto", which falls back to it'


def needs_lock_step(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, *, streamed: bool
) -> bool:
    """Return whether several rows have to advance in lock-step, so that all of them can be shown at once.

    A streamer needs that, as it gets one token of every row at a time.

    Raises:
        UnsupportedArgumentError: a processor is not supported in either mode.
    """
    for processor in processors:
        name = type(processor).__name__
        if type(processor).__module__ == logits_process.__name__ and name in REFUSED_PROCESSORS:
            _refuse(name, REFUSED_PROCESSORS[name])
    # Without EOS transformers continues rows that have ended, and records their scores too.
    ends = [criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria]
    continues_rows = bool(ends) and not any(type(criterion) is EosTokenCriteria for criterion in ends)
    recorded = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    return (
        streamed
        or continues_rows
        or bool(recorded)
        or not all(
            _is_grammar(each) or _is_row_wise(each, logits_process.__name__, ROW_WISE_PROCESSORS) for each in processors
        )
        or not all(_is_row_wise(each, stopping_criteria.__name__, ROW_WISE_CRITERIA) for each in criteria)
    )


def _is_grammar(processor: Any) -> bool:
    grammars = GRAMMARS.loaded()
    return grammars is not None and type(processor) is grammars.processor


def _is_row_wise(thing: Any, module: str, row_wise: frozenset[str]) -> bool:
    return type(thing).__module__ == module and type(thing).__name__ in row_wise


def check_lengths(positions: Positions, texts: PromptTexts, max_length: int) -> None:
    """Refuse texts on both sides of a length at which a pass changes the rotary frequencies of all its rows."""
    shortest, longest = min(map(len, texts.ids)), max_length - min(texts.hidden)
    for limit, beyond in ((positions.longrope_switch, True), (positions.dynamic, False)):
        if limit is not None and longest > limit and not (beyond and shortest > limit):
            _refuse(
                f"max_length={max_length}",
                f"from {limit} tokens on, the longest row decides how this model sees the others",
            )


def row_processors(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """Return the processors for one row of a batch that does not need lock-step."""
    return LogitsProcessorList([_for_row(processor, row, rows) for processor in processors])


def _for_row(processor: Any, row: int, rows: int) -> Any:
    """Return the processor, or a copy restricted to the row if it holds data per row."""
    if rows == 1 and not _is_grammar(processor):
        return processor
    match type(processor).__name__:
        case "GrammarProcessor":
            return processor.of_row(row, rows)
        case "PrefixConstrainedLogitsProcessor":
            allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
            return PrefixConstrainedLogitsProcessor(lambda _, input_ids: allowed(prompt, input_ids), 1)
        case "RepetitionPenaltyLogitsProcessor":
            if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                own = copy.copy(processor)
                own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
                return own
        case "EncoderRepetitionPenaltyLogitsProcessor":
            own, prompts = copy.copy(processor), processor.encoder_input_ids  # each once, for num_return_sequences rows
            prompt = row // (rows // prompts.shape[0]) if _repeats_prompts(processor) else row
            own.encoder_input_ids = prompts[prompt : prompt + 1]
            return own
        case "EncoderNoRepeatNGramLogitsProcessor":
            own, prompts = copy.copy(processor), processor.generated_ngrams
            own.generated_ngrams, own.batch_size = [prompts[row // (rows // processor.batch_size)]], 1
            return own
    return processor


def _repeats_prompts(processor: Any) -> bool:
    """Return whether each prompt serves all its return sequences; before transformers 5.19 only the first did."""
    rows = 2 * processor.encoder_input_ids.shape[0]
    scores = torch.ones(rows, int(processor.encoder_input_ids.max()) + 1, device=processor.encoder_input_ids.device)
    return not torch.equal(processor(processor.encoder_input_ids, scores.clone())[-1], scores[-1])


def _refuse(what: str, why: str) -> None:
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding of several rows: {why}", REMEDY)
