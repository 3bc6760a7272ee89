"""Transformers' own processors and criteria, asked row by row instead of for all rows at once."""

import inspect
import itertools
import time

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from lade import UnsupportedArgumentError
from lade.hf.batch_rules import (
    REFUSED_PROCESSORS,
    ROW_WISE_CRITERIA,
    ROW_WISE_PROCESSORS,
    check_lengths,
    needs_lock_step,
    row_processors,
)
from lade.model.config import Positions
from lade.model.prepared import PromptTexts

BATCH_PROCESSORS = frozenset(
    """
    ClassifierFreeGuidanceLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor DiaEOSChannelFilterLogitsProcessor
    DiaEOSDelayPatternLogitsProcessor SynthIDTextWatermarkLogitsProcessor UnbatchedClassifierFreeGuidanceLogitsProcessor
    """.split()  # noqa: SIM905
)
"""Transformers' processors that pair rows, count calls, or keep a state over all rows: they need lock-step."""
BATCH_CRITERIA = frozenset({"ConfidenceCriteria"})
"""Transformers' criteria that read the first row only."""
ROWS, LENGTH, VOCABULARY = 4, 7, 40
PROMPTS = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def allowed_tokens(batch_id, input_ids):
    return [(batch_id * 7 + int(input_ids[-1])) % VOCABULARY, batch_id, batch_id + 11]


class Times(GenerationConfig):
    """What Whisper's processor asks a config for."""

    no_timestamps_token_id = 20
    eos_token_id = 3


ARGUMENTS = {
    "AlternatingCodebooksLogitsProcessor": [(LENGTH, 10, 15)],
    "BarkEosPrioritizerLogitsProcessor": [(3, 0.05)],
    "EncoderNoRepeatNGramLogitsProcessor": [(2, PROMPTS), (2, PROMPTS[:2])],
    "EncoderRepetitionPenaltyLogitsProcessor": [(1.5, PROMPTS), (1.5, PROMPTS[:2])],
    "EpsilonLogitsWarper": [(0.01,)],
    "EtaLogitsWarper": [(0.01,)],
    "ExponentialDecayLengthPenalty": [((1, 1.5), 3, LENGTH)],
    "ForcedBOSTokenLogitsProcessor": [(4,)],
    "ForcedEOSTokenLogitsProcessor": [(LENGTH + 2, 3)],
    "InfNanRemoveLogitsProcessor": [()],
    "LogitNormalization": [()],
    "MinLengthLogitsProcessor": [(LENGTH + 2, 3)],
    "MinNewTokensLengthLogitsProcessor": [(LENGTH, 2, 3)],
    "MinPLogitsWarper": [(0.2,)],
    "NoBadWordsLogitsProcessor": [([[5], [6, 7]], 3)],
    "NoRepeatNGramLogitsProcessor": [(1,), (2,)],
    "PrefixConstrainedLogitsProcessor": [(allowed_tokens, 1)],
    "RepetitionPenaltyLogitsProcessor": [(1.5,), (1.5, 3), (1.5, torch.tensor([0, 2, 5, 1]))],
    "SequenceBiasLogitsProcessor": [({(5,): 2.0, (6, 7): -3.0},)],
    "SuppressTokensAtBeginLogitsProcessor": [([1, 2], LENGTH)],
    "SuppressTokensLogitsProcessor": [([1, 2],)],
    "TemperatureLogitsWarper": [(0.7,)],
    "TopHLogitsWarper": [(0.4,)],
    "TopKLogitsWarper": [(5,)],
    "TopPLogitsWarper": [(0.6,)],
    "TypicalLogitsWarper": [(0.6,)],
    "WatermarkLogitsProcessor": [(VOCABULARY, "cpu"), (VOCABULARY, "cpu", 0.25, 2.0, 15485863, "selfhash", 4)],
    "WhisperTimeStampLogitsProcessor": [(Times(), LENGTH)],
}


def classes_of(module, base):
    return {
        name: thing
        for name, thing in vars(module).items()
        if inspect.isclass(thing)
        and issubclass(thing, base)
        and thing is not base
        and thing.__module__ == module.__name__
    }


PROCESSORS = classes_of(logits_process, LogitsProcessor)
CRITERIA = classes_of(stopping_criteria, StoppingCriteria)
LENGTHS_BY_ROW = "Tensor" in str(inspect.signature(PROCESSORS["RepetitionPenaltyLogitsProcessor"]))
"""Whether a repetition penalty may leave out as many tokens of each row as that row's prompt has."""


def test_every_class_of_transformers_has_been_looked_at():
    """One that is not known goes in lock-step. Some of these are younger than the oldest transformers served."""
    kinds = [ROW_WISE_PROCESSORS, BATCH_PROCESSORS, set(REFUSED_PROCESSORS), ROW_WISE_CRITERIA, BATCH_CRITERIA]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert set(PROCESSORS) <= ROW_WISE_PROCESSORS | BATCH_PROCESSORS | set(REFUSED_PROCESSORS)
    assert set(CRITERIA) <= ROW_WISE_CRITERIA | BATCH_CRITERIA
    assert set(ARGUMENTS) == ROW_WISE_PROCESSORS


def go_together(processors=(), criteria=(), config=None, *, streamed=False):
    lists = LogitsProcessorList(processors), StoppingCriteriaList(criteria)
    return needs_lock_step(*lists, config or GenerationConfig(), streamed=streamed)


def made(name):
    """An instance, even of a class whose arguments nobody knows here."""
    known = ARGUMENTS.get(name)
    cls = PROCESSORS[name]
    return cls(*known[0]) if known else cls.__new__(cls)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_is_asked_for_a_row_or_for_all_or_is_refused(name):
    processor = made(name)
    if name in REFUSED_PROCESSORS:
        with pytest.raises(
            UnsupportedArgumentError, match=f"{name} cannot be used .* of several rows: {REFUSED_PROCESSORS[name]}"
        ):
            go_together([processor])
    else:
        assert go_together([processor]) == (name in BATCH_PROCESSORS)


CASES = [(name, arguments) for name in sorted(ROW_WISE_PROCESSORS) for arguments in ARGUMENTS[name]]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda part: part if isinstance(part, str) else "")
def test_a_row_is_told_what_the_batch_is_told(name, arguments):
    """Over several tokens: first all rows at once, then one row after the other."""
    if name not in PROCESSORS:
        pytest.skip("younger than this transformers")
    generator = torch.Generator().manual_seed(2)
    texts = torch.cat([PROMPTS, torch.randint(0, VOCABULARY, (ROWS, 3), generator=generator)], dim=1)
    scores = 3.0 * torch.randn(4, ROWS, VOCABULARY, generator=generator)
    if name == "InfNanRemoveLogitsProcessor":
        scores[:, 1:3, 5] = torch.tensor([torch.nan, torch.inf])
    if name == "RepetitionPenaltyLogitsProcessor" and isinstance(arguments[-1], torch.Tensor) and not LENGTHS_BY_ROW:
        pytest.skip("younger than this transformers")
    processor = PROCESSORS[name](*arguments)
    first = 1 if name == "ForcedBOSTokenLogitsProcessor" else LENGTH
    together = [processor(texts[:, : first + n], scores[n].clone()) for n in range(4)]
    processors = LogitsProcessorList([PROCESSORS[name](*arguments)])
    differs = False
    for row in range(ROWS):
        own = row_processors(processors, row, ROWS)
        for n in range(4):
            alone = own(texts[row : row + 1, : first + n], scores[n, row : row + 1].clone())
            assert torch.equal(alone, together[n][row : row + 1])
            differs |= not torch.equal(alone, scores[n, row : row + 1])
    assert differs, "it did nothing, so nothing was tested"


@pytest.mark.skipif(not LENGTHS_BY_ROW, reason="younger than this transformers")
def test_the_batchs_own_processors_stay_as_they_are():
    penalty = PROCESSORS["RepetitionPenaltyLogitsProcessor"](1.5, torch.tensor([0, 2]))
    banned = PROCESSORS["EncoderNoRepeatNGramLogitsProcessor"](2, PROMPTS)
    row_processors(LogitsProcessorList([penalty, banned]), 1, ROWS)
    assert penalty.prompt_ignore_length.tolist() == [0, 2] and banned.batch_size == ROWS


def one_of(name):
    if name == "StopStringCriteria":
        return CRITERIA[name].__new__(CRITERIA[name])
    arguments = {"EosTokenCriteria": 3, "MaxLengthCriteria": 9, "MaxTimeCriteria": 5.0, "ConfidenceCriteria": 0.5}
    return CRITERIA[name](arguments[name])


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_is_asked_for_a_row_or_for_all(name):
    assert go_together((), [one_of(name), one_of("EosTokenCriteria")]) == (name in BATCH_CRITERIA)


@pytest.mark.parametrize("name", ["MaxTimeCriteria", "StopStringCriteria"])
def test_without_an_end_of_sequence_there_is_no_padding_behind_a_row(name):
    criteria = [one_of("MaxLengthCriteria"), one_of(name)]
    assert go_together((), criteria) and not go_together((), criteria[:1])


@pytest.mark.parametrize("name", ["EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria"])
def test_a_criterion_says_of_a_row_what_it_says_in_the_batch(name):
    texts = PROMPTS.clone()
    texts[2, -1] = 3
    for criterion, length in itertools.product(
        [one_of(name), CRITERIA["MaxTimeCriteria"](1.0, time.time() - 9)], (5, 7)
    ):
        together = criterion(texts[:, -length:], None)
        assert together.tolist() == [bool(criterion(text[None, -length:], None)) for text in texts]


class Users(PROCESSORS["TemperatureLogitsWarper"]):
    """What it makes of a batch nobody knows, though it is derived from one that is known."""


class UsersCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize(
    ("processors", "criteria"),
    [([lambda ids, scores: scores], []), ([Users(0.5)], []), ([], [UsersCriterion(), one_of("EosTokenCriteria")])],
)
def test_what_a_user_wrote_is_shown_all_rows(processors, criteria):
    assert go_together(processors, criteria)


def test_what_else_takes_all_rows():
    for name in ("output_scores", "output_logits"):
        assert go_together(config=GenerationConfig(return_dict_in_generate=True, **{name: True}))
        assert not go_together(config=GenerationConfig(**{name: True})), "without an output object it is ignored"
    assert go_together(streamed=True) and not go_together()


@pytest.mark.parametrize(
    ("positions", "width", "paddings", "max_length", "served"),
    [
        (Positions((32, 64), longrope_switch=32), 10, [0, 3], 32, True),
        (Positions((32, 64), longrope_switch=32), 10, [0, 3], 33, False),
        (Positions((32, 64), longrope_switch=32), 10, [1, 3], 33, True),
        (Positions((32, 64), longrope_switch=32), 40, [0, 7], 60, True),
        (Positions((32, 64), longrope_switch=32), 40, [0, 8], 60, False),
        (Positions((32,), dynamic=32), 10, [0, 3], 32, True),
        (Positions((32,), dynamic=32), 10, [0, 3], 33, False),
        (Positions((32,), dynamic=32), 40, [0, 0], 60, False),
        (Positions((32,)), 10, [0, 3], 500, True),
    ],
)
def test_rows_do_not_stand_on_both_sides_of_a_change_of_frequencies(positions, width, paddings, max_length, served):
    columns = [range(padding, width) for padding in paddings]
    texts = PromptTexts([list(each) for each in columns], columns, width, width)
    if served:
        check_lengths(positions, texts, max_length)
    else:
        with pytest.raises(UnsupportedArgumentError, match=f"max_length={max_length} cannot .*from 32 tokens on"):
            check_lengths(positions, texts, max_length)
