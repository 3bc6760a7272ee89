"""Transformers' logits processors and stopping criteria, called once per emitted token or for all nodes of a tree.

Node by node, each emitted token costs a dozen kernels and a wait for the device; on a GPU that is much of a small
model's step. Processors that do not read the text may as well be called for every node, reached or not, before
the host waits. On a CPU that would be work for nodes that are mostly rejected; there it is of use that such processors
need neither the text nor a copy of the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList, StoppingCriteriaList
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
from lade.hf.batch_rules import processors_of_row
from lade.hf.detokenizer import AnswerText
from lade.hf.sampling import NO_TOKEN, Sampler
from lade.model.prepared import Prepared
from lade.stats import TokenLogprobs


class Transcript:
    """The text so far as the tensor `[1, L]` that processors and criteria expect, grown without copying it each time.

    Args:
        input_ids: `[1, L]`, the prompt just as it was given, padding included.
        skipped: how many columns more than its text the prompt has; less than 0 where embeddings stand for ids.
    """

    def __init__(self, input_ids: torch.Tensor, skipped: int = 0) -> None:
        self._buffer, self._length, self.skipped = input_ids.clone(), input_ids.shape[1], skipped
        self._on_host = input_ids.device.type == "cpu"

    @property
    def device(self) -> torch.device:
        """Where the text is, and what is called with it."""
        return self._buffer.device

    def upto(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[1, L]`: the prompt as given and all emitted tokens."""
        length = len(tokens) + self.skipped
        if length > self._buffer.shape[1]:
            self._buffer = pad(self._buffer, (0, self._buffer.shape[1] + 1))
            return self.upto(tokens)
        if length > self._length:
            tail = tokens[self._length - self.skipped :]
            if self._on_host:
                self._buffer.numpy()[0, self._length : length] = tail  # a tensor of it would take ten times as long
            else:
                self._buffer[0, self._length : length] = torch.tensor(tail, device=self._buffer.device)
            self._length = length
        return self._buffer[:, :length]


StopReason = Literal["eos", "stop_token", "stop_text", "length", "time", "criterion"]
"""What ends an answer: an end of sequence, another id that was to end it, a text, the greatest length, the time that it
may take, or another criterion. Where several do with one token, the first of these counts."""


@dataclass
class Record:
    """What is kept of the emitted tokens beside themselves.

    Attributes:
        scores: `[1, V]` float32 after the processors, one a token; None if not wanted.
        logits: `[1, V]` float32 before them, one a token; None if not wanted.
        top: ids whose log-probabilities are kept beside that of the emitted one; None to keep none.
        logprobs: of tokens that nobody has asked about yet.
        ended_by: what ended the answer; None before its end.
    """

    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    top: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended_by: StopReason | None = None

    def __bool__(self) -> bool:
        """Whether logits have to be looked at one by one."""
        return self.scores is not None or self.logits is not None or self.top is not None

    def add(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Append one token's."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def add_logprobs(self, token: int, logprobs: torch.Tensor) -> None:
        """Append an emitted token's, given those of all ids, `[1, V]`."""
        values, ids = logprobs[0].topk(min(self.top or 0, logprobs.shape[1]))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        self.logprobs.append(TokenLogprobs(token, float(logprobs[0, token]), top))

    def taken(self, tokens: int) -> list[TokenLogprobs] | None:
        """Those of so many tokens, the first ones that were not asked about yet; None if not wanted."""
        if self.top is None:
            return None
        taken, self.logprobs = self.logprobs[:tokens], self.logprobs[tokens:]
        return taken


Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the text so far, `[1, L]`, and logits `[1, V]` to scores `[1, V]`."""


def called_directly(processors: LogitsProcessorList) -> Process:
    """What a list of processors does, which looks at the signature of each whenever it is called: that takes as long
    as the processors themselves. One that wants further arguments is left to the list, which has a word for it.
    """
    whole: Any = processors  # annotated with LongTensor, which no torch function returns
    if any(len(signature(processor.__call__).parameters) > 2 for processor in processors):
        return cast(Process, whole)

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in whole:
            scores = processor(input_ids, scores)
        return scores

    return process


class Processed:
    """The token after transformers' logits processors (temperature, repetition penalty, the user's own ...).

    A draw is made once per emitted token, with the noise that plain decoding draws for it. So the same seed gives the
    same tokens, and leaves torch's generator in the same state.

    Args:
        processors: called with the text so far and the logits of one node.
        transcript: the text so far.
        sampler: draws the tokens; None for the argmax.
        record: collects scores and logits.
    """

    def __init__(
        self, processors: LogitsProcessorList, transcript: Transcript, *, sampler: Sampler | None, record: Record
    ) -> None:
        self._processors = called_directly(processors)
        self._transcript, self._sampler, self._record = transcript, sampler, record

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """See `lade.decoding.verify.Chooser.choose_all`."""
        return None

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `lade.decoding.verify.Chooser.bind`."""

        def choose(node: int) -> int:
            input_ids, raw = self._shown(logits[node : node + 1], tokens)
            logprobs = None if self._record.top is None else raw.log_softmax(dim=-1)  # before anyone writes to it
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

    def _shown(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What processors get: the text so far, `[1, L]`, and float32 logits `[1, V]` that they may write to."""
        input_ids = self._transcript.upto(tokens)
        return input_ids, logits.to(copy=True, dtype=torch.float32, device=input_ids.device)


class Streamed:
    """Stop rules that pass each token on to a streamer, once the criteria have been called with it.

    Plain decoding does it in this order, so criteria and processors that read the streamer see the same there.

    Args:
        stop: is called first.
        streamer: gets each token as `[1]` int64, on the CPU.
    """

    def __init__(self, stop: StopRule, streamer: BaseStreamer) -> None:
        self._stop, self._streamer = stop, streamer

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the row ends with its last token."""
        done = self._stop(tokens)
        self._streamer.put(torch.tensor(tokens[-1:]))
        return done


BLIND_PROCESSORS = frozenset(
    """
    EpsilonLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper SuppressTokensLogitsProcessor
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Transformers' processors that make of each row what they would make of it alone, whatever the text, and that do not
wait for the device."""


def pays_at_once(device: torch.device) -> bool:
    """Whether a wait costs more there than processing all nodes; also, whether torch draws there as `draws` knows."""
    return device.type == "cuda"


def can_be_asked_at_once(processors: LogitsProcessorList) -> bool:
    """Whether all of them are `BLIND_PROCESSORS`."""
    return all(
        type(processor).__module__ == logits_process.__name__ and type(processor).__name__ in BLIND_PROCESSORS
        for processor in processors
    )


class Blind(Processed):
    """Calls processors that do not read the text without one, and with the logits as they are; see `Processed`."""

    def __init__(
        self, processors: LogitsProcessorList, transcript: Transcript, *, sampler: Sampler | None, record: Record
    ) -> None:
        super().__init__(processors, transcript, sampler=sampler, record=record)
        self._no_text = torch.empty((1, 0), dtype=torch.long, device=transcript.device)

    def _shown(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """No text, `[1, 0]`, and float32 logits `[1, V]`, which none of these processors writes to."""
        return self._no_text, logits.to(dtype=torch.float32, device=self._no_text.device)


class AtOnce(Processed):
    """Makes the choices for all nodes of a step on the device; see `Processed`, whose tokens it emits.

    What was drawn ahead is taken only as it is emitted, so that torch's generator is where plain decoding has it
    whenever other code may read it.
    """

    _probabilities: torch.Tensor | None = None  # [S, V]

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """See `lade.decoding.verify.Chooser.choose_all`."""
        raw = logits.float()  # which none of these processors writes to
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
                return sampler.draw(probabilities[node : node + 1])  # which raises
            sampler.take()
            return ids[node]

        return choose


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


def row_for(
    prepared: Prepared,
    number: int,
    text: list[int],
    drafter: Drafter,
    *,
    sampler: Sampler | None,
    record: Record,
    streamer: BaseStreamer | None = None,
) -> Row:
    """The row that writes the answer to one prompt of a batch.

    Args:
        prepared: the batch.
        number: the prompt's row in it.
        text: of the prompt; it has further columns where some are masked, and fewer where embeddings stand for ids.
        drafter: drafts for this row alone.
        sampler: draws its tokens; None for the argmax.
        record: gets scores and logits.
        streamer: gets each token.
    """
    prompt, rows = prepared.input_ids[number : number + 1], len(prepared.input_ids)
    processors = processors_of_row(prepared.logits_processor, number, rows)
    transcript = Transcript(prompt, prompt.shape[1] - len(text))
    chooser: Chooser = Greedy()
    if processors or sampler or record:
        make: type[Processed] = Processed
        if can_be_asked_at_once(processors) and not record:
            make = AtOnce if pays_at_once(prompt.device) else Blind
        chooser = make(processors, transcript, sampler=sampler, record=record)
    stop: StopRule = StopRules(prepared.stopping_criteria, transcript, record)
    if streamer is not None:
        stop = Streamed(stop, streamer)
    return Row(text, drafter, chooser, stop, prepared.source_text(number))
