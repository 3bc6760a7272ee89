"""Plain decoding, prompt lookup and lookahead decoding of one prompt side by side, each timed by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from lade.cli.loading.load import LoadedModel
from lade.cli.options.decoding import GREEDY, Choices
from lade.cli.run import generate_arguments
from lade.config import LookaheadConfig
from lade.hf.detokenizer import Detokenizer
from lade.hf.generate import generate, stream
from lade.hf.session import Session
from lade.model.prepared import custom_generate_for
from lade.serving.request import PLAIN
from lade.stats import Stats, Step, distinct_ngrams

LOOKUP = "prompt lookup"
LOOKUP_BUDGET = 16
"""Tokens that prompt lookup feeds in a step: the default of `lade bench`."""
STYLES = {"window": "cyan", "pool": "cyan", "prompt": "yellow", "text": "yellow", "memory": "green"}
"""Colours of accepted drafts by their source; the model's own tokens have none."""
_OTHER, _OWN = "magenta", frozenset({"bonus", "prefill"})


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
        self._steps: list[tuple[Step, list[tuple[str, str]]]] = []  # with its pieces
        self._detokenizer = Detokenizer(loaded.tokenizer, prompt)

    def take(self, step: Step) -> None:
        """Append a step; the text of each token has the colour of its source."""
        self.token_ids += step.tokens
        self.stats.add(step)
        pieces = []
        for source, pairs in groupby(zip(step.sources, step.tokens, strict=True), key=lambda pair: pair[0]):
            style = "" if source in _OWN else STYLES.get(source, _OTHER)
            pieces.append((self._detokenizer.push([token for _, token in pairs]), style))
        self._steps.append((step, pieces))
        self.pieces += pieces

    def finish(self) -> None:
        """Append the text that the detokenizer held back."""
        self.pieces.append((self._detokenizer.flush(), ""))

    def at(self, seconds: float) -> Lane:
        """Return the lane after this many seconds of decoding, counted from the end of the prefill."""
        past, done = copy(self), 0.0
        past.token_ids, past.pieces, past.stats = [], [], Stats()
        for step, pieces in self._steps:
            done += step.seconds if step.index else 0.0
            if done > seconds:
                return past
            past.token_ids += step.tokens
            past.stats.add(step)
            past.pieces += pieces
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
    """Plain decoding, prompt lookup and lookahead decoding of one prompt.

    Plain decoding is transformers' own `model.generate`. While it hands over a token its clock stops, and the other
    lanes decode until their own clocks have caught up. So no clock counts another lane's time or that of drawing.

    Args:
        loaded: model to generate with, and its tokenizer.
        prompt: token ids of the prompt.
        config: configuration of the lookahead lane.
        max_new_tokens: token limit, at least 1.
        choices: settled choices without beams; each lane has a generator of its own with their seed.
        name: name of the lookahead lane's method.
        lookup: add a lane that drafts by prompt lookup alone, the n-grams of the text.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: list[int],
        config: LookaheadConfig,
        max_new_tokens: int,
        choices: Choices = GREEDY,
        name: str = "lookahead",
        *,
        lookup: bool = False,
    ) -> None:
        self.choices, self.name = choices, name
        self.plain, self.lookahead = Lane(loaded, prompt), Lane(loaded, prompt)
        self.lookup = Lane(loaded, prompt) if lookup else None
        self._model, self._config = loaded.model, config
        ids = torch.tensor([prompt], device=loaded.model.device)
        self._arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            **generate_arguments(loaded, choices),
        }

    def run(self, draw: Callable[[], None]) -> None:
        """Decode all, calling `draw` after each token of the plain lane and each step after its end."""
        rivals = [self._begin(self.lookahead, partial(stream, self._model, lookahead=self._config))]
        if self.lookup is not None:
            rivals.append(self._begin(self.lookup, self._lookup))
        own = Noise(self.choices.seed, self._model.device)

        def catch_up() -> None:
            for lane, steps, noise in rivals:
                with noise.taken():  # within a turn of the plain lane
                    while lane.stats.decode_s <= self.plain.stats.decode_s and (step := next(steps, None)):
                        lane.take(step)
            draw()

        with own.taken():
            generate(self._model, lookahead=None, streamer=_Pacer(self.plain, catch_up), **self._arguments)
        for lane, steps, noise in rivals:
            with noise.taken():
                for step in steps:
                    lane.take(step)
                    draw()
        for lane in self.lanes.values():
            lane.finish()
        draw()

    def _begin(self, lane: Lane, start: Callable[..., Iterator[Step]]) -> tuple[Lane, Iterator[Step], Noise]:
        noise = Noise(self.choices.seed, self._model.device)
        with noise.taken():
            return lane, start(**self._arguments), noise

    def _lookup(self, **arguments: Any) -> Iterator[Step]:
        """Return the steps of prompt lookup, as `lade bench` runs it."""
        from lade_lab.peers import PromptLookupDrafter

        make = partial(Session, config=PLAIN, stats=Stats(), drafter=PromptLookupDrafter(LOOKUP_BUDGET))
        return iter(self._model.generate(custom_generate=custom_generate_for(make), **arguments))

    @property
    def lanes(self) -> dict[str, Lane]:
        """The lanes by the names of their methods, plain decoding first."""
        lookup = {} if self.lookup is None else {LOOKUP: self.lookup}
        return {"plain": self.plain, **lookup, self.name: self.lookahead}

    def at(self, seconds: float) -> dict[str, Lane]:
        """Return the lanes at a time on their clocks."""
        return {name: lane.at(seconds) for name, lane in self.lanes.items()}

    @property
    def seconds(self) -> float:
        """Decoding time of the slowest lane, without prefill."""
        return max(lane.stats.decode_s for lane in self.lanes.values())

    @property
    def same(self) -> bool:
        """True if all lanes wrote the tokens of `model.generate`."""
        return all(lane.token_ids == self.plain.token_ids for lane in self.lanes.values())

    @property
    def speedup(self) -> float | None:
        """Decoding time of the plain lane over that of the lookahead lane; None without any."""
        seconds = self.lookahead.stats.decode_s
        return self.plain.stats.decode_s / seconds if seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Return statistics and tokens of all lanes."""
        lanes = {"plain": self.plain, "lookahead": self.lookahead}
        lanes |= {} if self.lookup is None else {"prompt_lookup": self.lookup}
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
