"""Plain and lookahead decoding of one prompt side by side, each timed by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from lade.cli.loading.load import LoadedModel
from lade.cli.options.decoding import GREEDY, Choices
from lade.cli.run import Palette, generate_arguments
from lade.config import LookaheadConfig
from lade.hf.detokenizer import Detokenizer
from lade.hf.generate import generate, stream
from lade.stats import Stats, Step, distinct_ngrams


class Noise:
    """State of torch's generators of the CPU and one device after `torch.manual_seed(seed)`, kept aside.

    >>> noise = Noise(7, model.device)
    >>> with noise.taken():
    ...     next(steps)  # draws from it, and from nothing else

    Args:
        seed: seed of the generators; None makes `taken` a no-op.
        device: device of the model.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._states: list[torch.Tensor] = []
        with self.taken():
            if seed is not None:
                torch.manual_seed(seed)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run the body with torch's generators as the last turn left them; their states are restored afterwards."""
        if self._seed is None:
            yield
            return
        outside = self._get()
        if self._states:
            self._set(self._states)
        try:
            yield
        finally:
            self._states = self._get()
            self._set(outside)

    def _get(self) -> list[torch.Tensor]:
        match self._device.type:
            case "cuda":
                return [torch.get_rng_state(), torch.cuda.get_rng_state(self._device)]
            case "mps":
                return [torch.get_rng_state(), torch.mps.get_rng_state()]
        return [torch.get_rng_state()]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        match self._device.type:
            case "cuda":
                torch.cuda.set_rng_state(states[1], self._device)
            case "mps":
                torch.mps.set_rng_state(states[1])


class Lane:
    """One side of a race: tokens, text in styled pieces, statistics.

    Args:
        loaded: model to generate with, and its tokenizer.
        prompt: token ids that the text continues.
    """

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self.pieces: list[tuple[str, str]] = []  # text, style
        self.stats = Stats()
        self._steps: list[Step] = []
        self._palette, self._detokenizer = Palette(), Detokenizer(loaded.tokenizer, prompt)

    def take(self, step: Step) -> None:
        """Append a step."""
        self.token_ids += step.tokens
        self.stats.add(step)
        self._steps.append(step)
        self.pieces.append((self._detokenizer.push(step.tokens), self._palette.style(len(step.tokens))))

    def finish(self) -> None:
        """Append the text that the detokenizer held back."""
        self.pieces.append((self._detokenizer.flush(), ""))

    def at(self, seconds: float) -> Lane:
        """Return the lane after this many seconds of decoding, counted from the end of the prefill."""
        past, done = copy(self), 0.0
        past.token_ids, past.pieces, past.stats = [], [], Stats()
        for step, piece in zip(self._steps, self.pieces, strict=False):
            done += step.seconds if step.index else 0.0
            if done > seconds:
                return past
            past.token_ids += step.tokens
            past.stats.add(step)
            past.pieces.append(piece)
        return self

    @property
    def text(self) -> str:
        """Continuation so far."""
        return "".join(text for text, _ in self.pieces)

    @property
    def distinct_4grams(self) -> float:
        """Share of distinct 4-grams in the output; low for repetitive text."""
        return distinct_ngrams(self.token_ids)


class Race:
    """Plain and lookahead decoding of one prompt.

    Plain decoding is transformers' own `model.generate`. While it hands over a token its clock stops, and the other
    lane decodes until its own clock has caught up. So neither clock counts the other lane's time or that of drawing.

    Args:
        loaded: model to generate with, and its tokenizer.
        prompt: token ids of the prompt.
        config: configuration of the lookahead lane.
        max_new_tokens: token limit, at least 1.
        choices: settled choices without beams; each lane has a generator of its own with their seed.
        name: name of the lookahead lane's method.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: list[int],
        config: LookaheadConfig,
        max_new_tokens: int,
        choices: Choices = GREEDY,
        name: str = "lookahead",
    ) -> None:
        self.choices, self.name = choices, name
        self.plain, self.lookahead = Lane(loaded, prompt), Lane(loaded, prompt)
        self._model, self._config = loaded.model, config
        ids = torch.tensor([prompt], device=loaded.model.device)
        self._arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            **generate_arguments(loaded, choices),
        }

    def run(self, draw: Callable[[], None]) -> None:
        """Decode both, calling `draw` after each token of the plain lane and each step after its end."""
        ours, theirs = (Noise(self.choices.seed, self._model.device) for _ in range(2))
        with ours.taken():
            steps = stream(self._model, lookahead=self._config, **self._arguments)

        def catch_up() -> None:
            with ours.taken():  # within a turn of theirs
                while self.lookahead.stats.decode_s <= self.plain.stats.decode_s and (step := next(steps, None)):
                    self.lookahead.take(step)
            draw()

        with theirs.taken():
            generate(self._model, lookahead=None, streamer=_Pacer(self.plain, catch_up), **self._arguments)
        with ours.taken():
            for step in steps:
                self.lookahead.take(step)
                draw()
        for lane in (self.plain, self.lookahead):
            lane.finish()
        draw()

    def at(self, seconds: float) -> tuple[Lane, Lane]:
        """Return both lanes at a time on their clocks."""
        return self.plain.at(seconds), self.lookahead.at(seconds)

    @property
    def seconds(self) -> float:
        """Decoding time of the slower lane, without prefill."""
        return max(self.plain.stats.decode_s, self.lookahead.stats.decode_s)

    @property
    def same(self) -> bool:
        """True if both lanes wrote the same tokens."""
        return self.plain.token_ids == self.lookahead.token_ids

    @property
    def speedup(self) -> float | None:
        """Decoding time of the plain lane over that of the lookahead lane; None without any."""
        seconds = self.lookahead.stats.decode_s
        return self.plain.stats.decode_s / seconds if seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Return statistics and tokens of both lanes."""
        lanes = {"plain": self.plain, "lookahead": self.lookahead}
        return {
            "method": self.name,
            **{name: _lane_dict(lane) for name, lane in lanes.items()},
            "do_sample": self.choices.do_sample,
            "temperature": self.choices.temperature,
            "seed": self.choices.seed,
            "same_tokens": self.same,
            "speedup": self.speedup,
        }


class _Pacer(BaseStreamer):
    """Makes a `Step` of each token that `model.generate` puts; its clock runs only between two puts."""

    def __init__(self, lane: Lane, after: Callable[[], None]) -> None:
        self._lane, self._after = lane, after
        self._index = -1  # the first put is the prompt
        self._since = 0.0

    def put(self, value: torch.Tensor) -> None:
        seconds = perf_counter() - self._since
        if self._index >= 0:
            source = "bonus" if self._index else "prefill"
            tokens: list[int] = value.flatten().tolist()
            self._lane.take(Step(self._index, tokens, [source] * len(tokens), 1, seconds))
            self._after()
        self._index += 1
        self._since = perf_counter()

    def end(self) -> None:
        """Do nothing: no token is held back."""


def _lane_dict(lane: Lane) -> dict[str, Any]:
    stats = lane.stats
    return {
        "text": lane.text,
        "token_ids": lane.token_ids,
        "new_tokens": stats.new_tokens,
        "steps": stats.steps,
        "tokens_per_step": stats.tokens_per_step,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "distinct_4grams": lane.distinct_4grams,
    }
