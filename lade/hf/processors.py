"""Transformers' processors, called once per emitted token with the arguments of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from lade.decoding.row import StopRule
from lade.decoding.verify import Choose
from lade.hf.sampling import Sampler
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
