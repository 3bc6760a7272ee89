"""Transformers' stopping criteria for one row, and which of them ended it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from lade.hf.answer_text import AnswerText
from lade.hf.processors import Record, StopReason, Transcript

_REASONS: dict[type, StopReason] = {
    EosTokenCriteria: "eos",
    AnswerText: "stop_text",
    StopStringCriteria: "stop_text",
    MaxLengthCriteria: "length",
    MaxTimeCriteria: "time",
}
_RANK: tuple[StopReason, ...] = ("eos", "stop_text", "criterion", "length", "time")


class StopRules:
    """Transformers' stopping criteria for one row.

    Length, end of sequence and `AnswerText` are decided on plain numbers; with any other criterion among them all are
    called, once per emitted token, as plain decoding does.

    Args:
        criteria: those of the row.
        transcript: the text so far.
        record: has the scores for them, and gets what ended the row.
    """

    def __init__(self, criteria: StoppingCriteriaList, transcript: Transcript, record: Record) -> None:
        self._criteria: Any = criteria  # annotated with LongTensor, which no torch function returns
        self._transcript, self._record = transcript, record
        self._eos: set[int] = set()
        self._text: AnswerText | None = None
        self._max_length = self._plain_until = sys.maxsize
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                self._max_length = min(self._max_length, criterion.max_length)
                # Beyond the model's length this criterion warns the user, so from there on it is called for real.
                self._plain_until = min(self._plain_until, criterion.max_position_embeddings or sys.maxsize)
            elif type(criterion) is AnswerText and self._text is None:
                self._text = criterion
            else:
                self._plain_until = 0

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the row ends with its last token."""
        length = len(tokens) + self._transcript.skipped
        if length > self._plain_until:
            return self._ask(tokens)
        stopped = self._text is not None and self._text.add(tokens[-1])
        if tokens[-1] in self._eos:
            self._record.ended_by = "eos"
        elif stopped:
            self._record.ended_by = "stop_text"
        elif length >= self._max_length:
            self._record.ended_by = "length"
        else:
            return False
        return True

    def _ask(self, tokens: Sequence[int]) -> bool:
        """Call every criterion, as `StoppingCriteriaList` does."""
        input_ids, scores = self._transcript.upto(tokens), self._record.scores
        answers = [(criterion, criterion(input_ids, scores)) for criterion in self._criteria]
        reasons = [_REASONS.get(type(criterion), "criterion") for criterion, ends in answers if _all(ends)]
        if reasons:
            self._record.ended_by = min(reasons, key=_RANK.index)
        return bool(reasons)


def _all(ends: Any) -> bool:
    """Of a `[1]` bool; old criteria answer with a Python bool."""
    return bool(ends) if isinstance(ends, bool) else bool(ends.all())
