"""One prompt continued by several methods, each alone and on its own clock; its text coloured by source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from time import perf_counter
from typing import Any

import torch
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from lade.cli.loading.load import LoadedModel
from lade.cli.options.decoding import GREEDY, Choices
from lade.cli.run import generate_arguments
from lade.config import LookaheadConfig
from lade.hf.detokenizer import Detokenizer
from lade.hf.generate import stream
from lade.stats import Stats, Step, distinct_ngrams

PLAIN, LOOKUP, PACKED = "model.generate", "prompt lookup", "packed weights alone"
_LOOKUP_TOKENS = 10
"""`prompt_lookup_num_tokens` of transformers' own method, as in its documentation."""
LOOKED_UP = "lookup"
COLOURS = {"noted predictions": "green", "earlier text": "cyan", "MTP layer": "magenta", "model itself": ""}
"""Styles by the origin of a token, in the order of the legend."""
_ORIGINS = {
    **dict.fromkeys(("memory", "pool", "window"), "noted predictions"),
    **dict.fromkeys(("text", "prompt", LOOKED_UP), "earlier text"),
    "mtp": "MTP layer",
}


def style_of(source: str) -> str:
    """Return the style of a token from a source of `Step.sources`."""
    return COLOURS[_ORIGINS.get(source, "model itself")]


def legend() -> Text:
    """Return the legend of the colours."""
    parts: list[Any] = [("drafted from: ", "dim")]
    for origin, style in COLOURS.items():
        if style:
            parts += [(origin, style), (" · ", "dim")]
    return Text.assemble(*parts, ("not drafted: white", "dim"))


class Lane:
    """One side of a race: tokens, text in styled pieces, statistics.

    Args:
        name: name of the method.
        tokenizer: tokenizer of the model.
        prompt: token ids that the text continues.
    """

    def __init__(self, name: str, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.name = name
        self.token_ids: list[int] = []
        self.pieces: list[tuple[str, str]] = []  # text, style
        self.stats = Stats()
        self._steps: list[tuple[Step, int]] = []  # each with the number of pieces after it
        self._detokenizer = Detokenizer(tokenizer, prompt)

    def take(self, step: Step) -> None:
        """Append a step."""
        self.token_ids += step.tokens
        self.stats.add(step)
        for style, tokens in groupby(zip(step.sources, step.tokens, strict=True), key=lambda pair: style_of(pair[0])):
            self.pieces.append((self._detokenizer.push([token for _, token in tokens]), style))
        self._steps.append((step, len(self.pieces)))

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
            past.pieces = self.pieces[:pieces]
        return self

    @property
    def text(self) -> str:
        """Continuation so far."""
        return "".join(text for text, _ in self.pieces)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the prefill per second of decoding; None before the first."""
        stats = self.stats
        return stats.accepted_tokens / stats.decode_s if stats.decode_s else None

    def as_dict(self) -> dict[str, Any]:
        """Return statistics, text and tokens."""
        stats = self.stats
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "new_tokens": stats.new_tokens,
            "steps": stats.steps,
            "tokens_per_step": stats.tokens_per_step,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "distinct_4grams": distinct_ngrams(self.token_ids),
        }


class Recorder(BaseStreamer):
    """Makes a `Step` of what `model.generate` puts at once; its clock runs only between two puts.

    Args:
        lane: lane that takes the steps.
        after: called after each step, outside of the clock.
    """

    def __init__(self, lane: Lane, after: Callable[[], None]) -> None:
        self._lane, self._after = lane, after
        self._index = -1  # the first put is the prompt
        self._since = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Take the tokens of a forward pass; all but the last were guessed."""
        seconds = perf_counter() - self._since
        if self._index >= 0:
            tokens: list[int] = value.flatten().tolist()
            sources = [LOOKED_UP] * (len(tokens) - 1) + ["bonus" if self._index else "prefill"]
            self._lane.take(Step(self._index, tokens, sources, len(tokens), seconds))
            self._after()
        self._index += 1
        self._since = perf_counter()

    def end(self) -> None:
        """Do nothing: no token is held back."""


class Race:
    """Decoding of one prompt by `model.generate`, its prompt lookup, and lookahead decoding.

    The methods run one after the other, so none disturbs another. Prompt lookup takes part in greedy races: with
    sampling it has the distribution of plain decoding but not its samples. Models with recurrent states lack it.

    Args:
        loaded: model to generate with, and its tokenizer.
        prompt: token ids of the prompt.
        config: configuration of lookahead decoding.
        max_new_tokens: token limit, at least 1.
        choices: settled choices without beams; torch's seed is set to theirs before each method.
        name: name of the lookahead lane's method.
        earlier: race of the same prompt and choices that has run, whose other lanes this one takes over.
        unpacked: the same model without packed weights, for `model.generate` and its prompt lookup; then a further lane
            shows what packing alone brings. None if all lanes share one model.
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
        earlier: Race | None = None,
        unpacked: Any = None,
    ) -> None:
        self.choices, self.name, self._earlier = choices, name, earlier
        self._model, self._unpacked, self._config = loaded.model, unpacked, config
        names = [PLAIN] if choices.do_sample or getattr(loaded.model, "_is_stateful", False) else [PLAIN, LOOKUP]
        names += [] if unpacked is None else [PACKED]
        self.rivals: list[Lane] = (
            earlier.rivals if earlier else [Lane(each, loaded.tokenizer, prompt) for each in names]
        )
        self.lookahead = Lane(name, loaded.tokenizer, prompt)
        ids = torch.tensor([prompt], device=loaded.model.device)
        self._arguments: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            **generate_arguments(loaded, choices),
        }

    def run(self, draw: Callable[[], None]) -> None:
        """Decode with each method, calling `draw` after each step."""
        for lane in [] if self._earlier else self.rivals:
            self._seed()
            lookup = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if lane.name == LOOKUP else {}
            model = self._model if lane.name == PACKED or self._unpacked is None else self._unpacked
            model.generate(**self._arguments, **lookup, streamer=Recorder(lane, draw))
            lane.finish()
        self._seed()
        for step in stream(self._model, lookahead=self._config, **self._arguments):
            self.lookahead.take(step)
            draw()
        self.lookahead.finish()
        draw()

    def _seed(self) -> None:
        if self.choices.seed is not None:
            torch.manual_seed(self.choices.seed)

    @property
    def plain(self) -> Lane:
        """Lane of `model.generate`."""
        return self.rivals[0]

    @property
    def lanes(self) -> list[Lane]:
        """All lanes, that of `model.generate` first and that of lookahead decoding last."""
        return [*self.rivals, self.lookahead]

    @property
    def panels(self) -> list[Lane]:
        """Lanes that are shown side by side: all but that of packed weights alone."""
        return [lane for lane in self.lanes if lane.name != PACKED]

    def at(self, seconds: float) -> list[Lane]:
        """Return the lanes shown side by side at a time on their clocks."""
        return [lane.at(seconds) for lane in self.panels]

    @property
    def seconds(self) -> float:
        """Decoding time of the slowest lane shown side by side, without prefill."""
        return max(lane.stats.decode_s for lane in self.panels)

    @property
    def same(self) -> bool:
        """True if lookahead decoding wrote the tokens of `model.generate`."""
        return self.plain.token_ids == self.lookahead.token_ids

    @property
    def speedup(self) -> float | None:
        """Decoding time of `model.generate` over that of lookahead decoding; None without any."""
        seconds = self.lookahead.stats.decode_s
        return self.plain.stats.decode_s / seconds if seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Return statistics and tokens of all lanes."""
        names = {PLAIN: "plain", LOOKUP: "prompt_lookup", PACKED: "packed", self.name: "lookahead"}
        return {
            "method": self.name,
            **{names[lane.name]: lane.as_dict() for lane in self.lanes},
            "do_sample": self.choices.do_sample,
            "temperature": self.choices.temperature,
            "seed": self.choices.seed,
            "same_tokens": self.same,
            "speedup": self.speedup,
        }
