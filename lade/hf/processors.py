"""Choosers and stop rules from transformers' logits processors and stopping criteria.

Called node by node, they cost a dozen kernels and a synchronization per emitted token; on a GPU that is a large part of
a small model's step. Processors that do not read the text can be called for all nodes at once, accepted or not, before
the host synchronizes. On a CPU that would be wasted work on nodes that are mostly rejected; but such processors need
neither the text nor a copy of the logits there.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from lade.decoding.drafting.drafter import Drafter
from lade.decoding.row import Row, StopRule
from lade.decoding.verify import Choose, Chooser, Greedy
from lade.hf.batch_rules import row_processors
from lade.hf.sampling import NO_TOKEN, RowSampler
from lade.model.prepared import Prepared
from lade.stats import TokenLogprobs


class Transcript:
    """The text so far as the tensor `[1, L]` that processors and criteria expect, in a growing buffer.

    Args:
        input_ids: `[1, L]`, the prompt as given, padding included.
        skipped: number of columns of the prompt beyond its text; negative where embeddings stand for ids.
    """

    def __init__(self, input_ids: torch.Tensor, skipped: int = 0) -> None:
        self._buffer, self._length, self.skipped = input_ids.clone(), input_ids.shape[1], skipped
        self.device = input_ids.device  # also of the processors and criteria
        self._on_host = self.device.type == "cpu"

    def upto(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the prompt as given and all emitted tokens, `[1, L]`."""
        length = len(tokens) + self.skipped
        if length > self._buffer.shape[1]:
            self._buffer = pad(self._buffer, (0, self._buffer.shape[1] + 1))
            return self.upto(tokens)
        if length > self._length:
            tail = tokens[self._length - self.skipped :]
            if self._on_host:
                self._buffer.numpy()[0, self._length : length] = tail  # ten times as fast as by a tensor
            else:
                self._buffer[0, self._length : length] = torch.tensor(tail, device=self.device)
            self._length = length
        return self._buffer[:, :length]


StopReason = Literal["eos", "stop_token", "stop_text", "length", "time", "criterion"]
"""Reason why an answer ends: EOS, a stop token, a stop text, the maximum length, the time limit or another criterion.
If several apply to one token, the first of these counts."""


@dataclass
class Record:
    """Data recorded about the emitted tokens.

    Attributes:
        scores, logits: `[1, V]` float32 after and before the processors, one per token; None if not requested.
        top: number of top ids whose log-probabilities are recorded besides that of the emitted one; None for nothing.
        logprobs: log-probabilities of the tokens that were not taken yet.
        ended_by: the reason why the answer ended; None before its end.
    """

    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    top: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended_by: StopReason | None = None

    def __bool__(self) -> bool:
        """Return whether the logits of each token have to be examined."""
        return self.scores is not None or self.logits is not None or self.top is not None

    def add(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Append scores and logits of one token."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def add_logprobs(self, token: int, logprobs: torch.Tensor) -> None:
        """Append the log-probabilities of an emitted token, given those of all ids, `[1, V]`."""
        values, ids = logprobs[0].topk(min(self.top or 0, logprobs.shape[1]))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        self.logprobs.append(TokenLogprobs(token, float(logprobs[0, token]), top))

    def taken(self, tokens: int) -> list[TokenLogprobs] | None:
        """Remove and return the log-probabilities of the next `tokens` tokens; None if not requested."""
        if self.top is None:
            return None
        taken, self.logprobs = self.logprobs[:tokens], self.logprobs[tokens:]
        return taken


Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps the text so far, `[1, L]`, and logits `[1, V]` to scores `[1, V]`."""


def direct_call(processors: LogitsProcessorList) -> Process:
    """Return a function that applies the processors without inspecting their signatures at each call, as the list does.

    Inspection takes as long as the processors themselves. If one of them needs further arguments, the list is returned,
    which raises a helpful error.
    """
    whole: Any = processors  # annotated with LongTensor, a type that no torch function returns
    if any(len(signature(processor.__call__).parameters) > 2 for processor in processors):
        return cast(Process, whole)

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in whole:
            scores = processor(input_ids, scores)
        return scores

    return process


class ProcessedChooser:
    """Chooses tokens after transformers' logits processors (temperature, repetition penalty, the user's own ...).

    Each emitted token is drawn once, with the noise that plain decoding draws for it. So the same seed gives the same
    tokens, and leaves torch's generator in the same state. Without a sampler the argmax is taken.
    """

    def __init__(
        self, processors: LogitsProcessorList, transcript: Transcript, *, sampler: RowSampler | None, record: Record
    ) -> None:
        self._processors = direct_call(processors)
        self._transcript, self._sampler, self._record = transcript, sampler, record

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """See `lade.decoding.verify.Chooser.choose_all`."""
        return None

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `lade.decoding.verify.Chooser.bind`."""

        def choose(node: int) -> int:
            input_ids, raw = self._processor_inputs(logits[node : node + 1], tokens)
            logprobs = None if self._record.top is None else raw.log_softmax(dim=-1)  # before processors modify it
            scores = self._processors(input_ids, raw)
            self._record.add(scores, raw)
            if self._sampler is not None:
                token = self._sampler.draw(scores.softmax(dim=-1))
            else:
                token = int(scores.argmax(dim=-1))
            if logprobs is not None:
                self._record.add_logprobs(token, logprobs)
            return token

        return choose

    def _processor_inputs(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text so far, `[1, L]`, and float32 logits `[1, V]` that processors may modify."""
        input_ids = self._transcript.upto(tokens)
        return input_ids, logits.to(copy=True, dtype=torch.float32, device=input_ids.device)


class StreamedStop:
    """A stop rule that forwards each token to a streamer after the criteria were called, as plain decoding does."""

    def __init__(self, stop: StopRule, streamer: BaseStreamer) -> None:
        self._stop, self._streamer = stop, streamer

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the row ends at its last token."""
        done = self._stop(tokens)
        self._streamer.put(torch.tensor(tokens[-1:]))
        return done


TEXT_FREE_PROCESSORS = frozenset(
    """
    EpsilonLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper SuppressTokensLogitsProcessor
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Transformers' processors that treat each row independently, do not read the text, and do not wait for the device."""


def prefers_batched(device: torch.device) -> bool:
    """Return whether processing all nodes beats a synchronization there, and torch draws as `draw_ahead` assumes."""
    return device.type == "cuda"


def are_text_free(processors: LogitsProcessorList) -> bool:
    """Return whether all processors are `TEXT_FREE_PROCESSORS`."""
    return all(
        type(processor).__module__ == logits_process.__name__ and type(processor).__name__ in TEXT_FREE_PROCESSORS
        for processor in processors
    )


class TextFreeChooser(ProcessedChooser):
    """Calls processors that do not read the text, without a text or a copy of the logits; see `ProcessedChooser`."""

    @cached_property
    def _no_text(self) -> torch.Tensor:
        return torch.empty((1, 0), dtype=torch.long, device=self._transcript.device)

    def _processor_inputs(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an empty text, `[1, 0]`, and float32 logits `[1, V]`, which these processors do not modify."""
        return self._no_text, logits.to(dtype=torch.float32, device=self._no_text.device)


class BatchedChooser(ProcessedChooser):
    """Chooses at all nodes of a step on the device; emits the same tokens as `ProcessedChooser`.

    Draws made ahead are taken only when their token is emitted, so that torch's generator is in the state of plain
    decoding whenever other code may read it.
    """

    _probabilities: torch.Tensor | None = None  # [S, V]

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """See `lade.decoding.verify.Chooser.choose_all`."""
        raw = logits.float()  # which these processors do not modify
        no_text = torch.empty((len(raw), 0), dtype=torch.long, device=raw.device)
        scores = self._processors(no_text, raw)  # [S, V]
        if self._sampler is None:
            choices: torch.Tensor = scores.argmax(dim=-1)
            return choices
        self._probabilities = scores.softmax(dim=-1)
        return self._sampler.draw_ahead(self._probabilities, depths)

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `lade.decoding.verify.Chooser.bind`."""
        sampler, probabilities = self._sampler, self._probabilities
        if sampler is None or probabilities is None:
            return ids.__getitem__

        def choose(node: int) -> int:
            if ids[node] == NO_TOKEN:
                return sampler.draw(probabilities[node : node + 1])  # raises
            sampler.take()
            return ids[node]

        return choose


_REASONS: dict[type, StopReason] = {
    EosTokenCriteria: "eos",
    StopStringCriteria: "stop_text",
    MaxLengthCriteria: "length",
    MaxTimeCriteria: "time",
}
_RANK: tuple[StopReason, ...] = ("eos", "stop_text", "criterion", "length", "time")


class TokenCriterion(StoppingCriteria, ABC):
    """A criterion that reads one new token at a time, for stop texts; see `lade.hf.detokenizer.AnswerText`."""

    @abstractmethod
    def add(self, token: int) -> bool:
        """Add the next token; return whether it completes a stop text."""


def _reason_of(criterion: StoppingCriteria) -> StopReason:
    return "stop_text" if isinstance(criterion, TokenCriterion) else _REASONS.get(type(criterion), "criterion")


class StopRules:
    """Transformers' stopping criteria for one row.

    Length, EOS and a `TokenCriterion` are evaluated on plain numbers; if there is any other criterion, all of them are
    called, once per emitted token as in plain decoding.
    """

    def __init__(self, criteria: StoppingCriteriaList, transcript: Transcript, record: Record) -> None:
        self._criteria: Any = criteria  # annotated with LongTensor, a type that no torch function returns
        self._transcript, self._record = transcript, record
        self._eos: set[int] = set()
        self._text: TokenCriterion | None = None
        self._max_length = self._plain_until = sys.maxsize
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                self._max_length = min(self._max_length, criterion.max_length)
                # Beyond the model's length this criterion warns the user, so from there on it is called itself.
                self._plain_until = min(self._plain_until, criterion.max_position_embeddings or sys.maxsize)
            elif isinstance(criterion, TokenCriterion) and self._text is None:
                self._text = criterion
            else:
                self._plain_until = 0

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the row ends at its last token."""
        length = len(tokens) + self._transcript.skipped
        if length > self._plain_until:
            return self._call_criteria(tokens)
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

    def _call_criteria(self, tokens: Sequence[int]) -> bool:
        """Call every criterion, as `StoppingCriteriaList` does."""
        input_ids, scores = self._transcript.upto(tokens), self._record.scores
        answers = [(criterion, criterion(input_ids, scores)) for criterion in self._criteria]
        # A user's own criterion may return a Python bool.
        reasons = [_reason_of(criterion) for criterion, ends in answers if bool(torch.as_tensor(ends).all())]
        if reasons:
            self._record.ended_by = min(reasons, key=_RANK.index)
        return bool(reasons)


def row_for(
    prepared: Prepared,
    number: int,
    text: list[int],
    drafter: Drafter,
    *,
    sampler: RowSampler | None,
    record: Record,
    streamer: BaseStreamer | None = None,
) -> Row:
    """Return the row that generates the answer to one prompt of a batch, number `number`.

    Its text is without masked columns, and with ids in place of embeddings. Without a sampler the argmax is taken.
    """
    prompt, rows = prepared.input_ids[number : number + 1], len(prepared.input_ids)
    processors = prepared.logits_processor
    if processors:
        processors = row_processors(processors, number, rows)
    transcript = Transcript(prompt, prompt.shape[1] - len(text))
    chooser: Chooser = Greedy()
    if processors or sampler or record:
        make: type[ProcessedChooser] = ProcessedChooser
        if are_text_free(processors) and not record:
            make = BatchedChooser if prefers_batched(prompt.device) else TextFreeChooser
        chooser = make(processors, transcript, sampler=sampler, record=record)
    stop: StopRule = StopRules(prepared.stopping_criteria, transcript, record)
    if streamer is not None:
        stop = StreamedStop(stop, streamer)
    return Row(text, drafter, chooser, stop, prepared.source_text(number))
