"""What it takes to call processors and criteria row by row, which plain decoding calls for a whole batch.

Plain decoding calls them with all rows, which are equally long. Ours advance at their own pace, so they are called for
each row by itself, with the columns that plain decoding would show of it. For transformers' own classes that is the
same, as they treat one row at a time; of a user's own it cannot be known.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lade.errors import UnsupportedArgumentError
from lade.model.position_limits import Positions

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
"""Transformers' processors that treat each row as if it were alone."""

BATCH_PROCESSORS = {
    "ClassifierFreeGuidanceLogitsProcessor": "it pairs the rows of a batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it pairs the rows of a batch",
    "DiaEOSChannelFilterLogitsProcessor": "its rows have several channels",
    "DiaEOSDelayPatternLogitsProcessor": "it counts the calls for all rows",
    "SynthIDTextWatermarkLogitsProcessor": "it remembers the texts of all rows together",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model a second time at each token",
    "WhisperNoSpeechDetection": "it runs the model for all rows",
}
"""Those that do not, and why."""

ROW_WISE_CRITERIA = frozenset({"EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"})
BATCH_CRITERIA = {"ConfidenceCriteria": "it reads the first row only"}

REMEDY = 'decode the prompts one by one, use plain model.generate, or lookahead="auto", which falls back to it'


def check_rows(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, *, streamed: bool
) -> None:
    """Raise `UnsupportedArgumentError` for what cannot be served where there are several rows."""
    for processor in processors:
        _check_row_wise(processor, logits_process.__name__, ROW_WISE_PROCESSORS, BATCH_PROCESSORS)
    for criterion in criteria:
        _check_row_wise(criterion, stopping_criteria.__name__, ROW_WISE_CRITERIA, BATCH_CRITERIA)
    ends = [criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria]
    if ends and not any(type(criterion) is EosTokenCriteria for criterion in ends):
        _refuse(
            f"a {type(ends[0]).__name__} without eos_token_id",
            "transformers then writes on in rows that have ended until the last one ends, instead of padding them",
        )
    for name in ("output_scores", "output_logits"):
        if config.return_dict_in_generate and getattr(config, name):
            _refuse(f"{name}=True", "transformers computes those of rows that have ended, too")
    if streamed:
        _refuse("a streamer", "rows come at their own pace; transformers' own streamers take a single row as well")


def check_lengths(positions: Positions, width: int, paddings: list[int], max_length: int) -> None:
    """Refuse texts on both sides of a length at which a pass changes the frequencies of all its rows.

    Args:
        positions: limits of the model's positions.
        width: L, padding included.
        paddings: `[B]`, padding columns of each row.
        max_length: greatest length of the output, padding included.
    """
    shortest, longest = width - max(paddings), max_length - min(paddings)
    for limit, beyond in ((positions.longrope_switch, True), (positions.dynamic, False)):
        if limit is not None and longest > limit and not (beyond and shortest > limit):
            _refuse(
                f"max_length={max_length}",
                f"from {limit} tokens on, the longest row decides how this model sees the others",
            )


def processors_of_row(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """The processors as they are for one row alone; `check_rows` has let them pass.

    Args:
        processors: those of the batch.
        row: number of the row.
        rows: B, the rows of the batch.
    """
    return LogitsProcessorList([_of_row(processor, row, rows) for processor in processors])


def _of_row(processor: Any, row: int, rows: int) -> Any:
    """The same processor, unless it was made with something that belongs to the rows."""
    match type(processor).__name__:
        case "PrefixConstrainedLogitsProcessor":
            allowed = functools.partial(_of_this_row, processor._prefix_allowed_tokens_fn, row)
            return PrefixConstrainedLogitsProcessor(allowed, 1)
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
    """Whether each prompt counts for all its rows; before transformers 5.19 the rows beyond the prompts had none."""
    rows = 2 * processor.encoder_input_ids.shape[0]
    scores = torch.ones(rows, int(processor.encoder_input_ids.max()) + 1, device=processor.encoder_input_ids.device)
    return not torch.equal(processor(processor.encoder_input_ids, scores.clone())[-1], scores[-1])


def _of_this_row(allowed: Any, row: int, batch_id: int, input_ids: torch.Tensor) -> Any:
    """A user's `prefix_allowed_tokens_fn`, called with the row's number in the batch."""
    return allowed(row, input_ids)


def _check_row_wise(thing: Any, module: str, row_wise: frozenset[str], refused: dict[str, str]) -> None:
    name = type(thing).__name__
    name = getattr(thing, "__name__", name) if name == "function" else name
    if type(thing).__module__ != module:
        _refuse(f"{name}, which is not transformers' own,", "plain decoding shows it all rows at once")
    if name not in row_wise:
        _refuse(name, refused.get(name, "it is not known whether it treats one row at a time"))


def _refuse(what: str, why: str) -> None:
    raise UnsupportedArgumentError(f"{what} cannot be used with lookahead decoding of several rows: {why}", REMEDY)
