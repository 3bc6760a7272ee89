"""Transformers' processors and criteria, called once per emitted token with the arguments of plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from lade.decoding.row import StopRule
from lade.decoding.verify import Choose
from lade.hf.sampling import Sampler


class Transcript:
    """The text so far as the tensor `[1, L]` that processors and criteria expect, grown without copying it each time.

    Args:
        input_ids: `[1, L]`, the prompt just as it was given, padding included.
        skipped: how many columns more than its text the prompt has; less than 0 where embeddings stand for ids.
    """

    def __init__(self, input_ids: torch.Tensor, skipped: int = 0) -> None:
        self._buffer, self._length, self.skipped = input_ids.clone(), input_ids.shape[1], skipped
        self._on_host = input_ids.device.type == "cpu"

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


@dataclass
class Record:
    """Scores and logits of the emitted tokens, for `output_scores` and `output_logits`.

    Attributes:
        scores: `[1, V]` float32 after the processors, one a token; None if not wanted.
        logits: `[1, V]` float32 before them, one a token; None if not wanted.
    """

    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None

    def __bool__(self) -> bool:
        return self.scores is not None or self.logits is not None

    def add(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Append one token's."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)


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
        self._processors: Any = processors  # annotated with LongTensor, which no torch function returns
        self._transcript, self._sampler, self._record = transcript, sampler, record

    def choose_all(self, logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor | None:
        """See `lade.decoding.verify.Chooser.choose_all`."""
        return None

    def bind(self, logits: torch.Tensor, ids: Sequence[int], tokens: Sequence[int]) -> Choose:
        """See `lade.decoding.verify.Chooser.bind`."""

        def choose(node: int) -> int:
            input_ids = self._transcript.upto(tokens)
            raw = logits[node : node + 1].to(copy=True, dtype=torch.float32, device=input_ids.device)  # [1, V]
            scores = self._processors(input_ids, raw)
            self._record.add(scores, raw)
            if self._sampler is not None:
                return self._sampler.draw(scores.softmax(dim=-1))
            return int(scores.argmax(dim=-1))

        return choose


class StopRules:
    """Transformers' stopping criteria for one row.

    Length and end of sequence are decided on plain numbers; with any other criterion among them all are called, once
    per emitted token, as plain decoding does.
    """

    def __init__(self, criteria: StoppingCriteriaList, transcript: Transcript, record: Record) -> None:
        self._criteria, self._transcript, self._record = criteria, transcript, record
        self._eos: set[int] = set()
        self._max_length = self._plain_until = sys.maxsize
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                self._max_length = min(self._max_length, criterion.max_length)
                # Beyond the model's length this criterion warns the user, so from there on it is called for real.
                self._plain_until = min(self._plain_until, criterion.max_position_embeddings or sys.maxsize)
            else:
                self._plain_until = 0

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Whether the row ends with its last token."""
        length = len(tokens) + self._transcript.skipped
        if length <= self._plain_until:
            return tokens[-1] in self._eos or length >= self._max_length
        return bool(self._criteria(self._transcript.upto(tokens), self._record.scores).all())


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
