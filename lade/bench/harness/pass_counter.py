"""Counts and times the forward passes of transformers' own methods, from outside."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from lade.stats import Stats, Step


@dataclass
class Pass:
    """One forward pass.

    Attributes:
        cached: tokens in the cache before it.
        fed: tokens fed.
        start, end: on the clock.
    """

    cached: int
    fed: int
    start: float
    end: float = 0.0


class Meter:
    """While it is entered, it notes the passes of one model; a draft model that runs meanwhile is another.

    >>> with Meter(model) as meter:
    ...     output = model.generate(ids, max_new_tokens=20)
    >>> meter.stats(prompt_tokens=ids.shape[1], new_tokens=output.shape[1] - ids.shape[1])

    On a GPU a pass ends for it when it has been launched, so `forward_s` then says little; the sums of times are right.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._hooks: list[Any] = []
        self.passes: list[Pass] = []
        self.begin = self.end = 0.0

    def __enter__(self) -> Meter:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        ]
        self.begin = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end = perf_counter()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        ids, cache = kwargs.get("input_ids", args[0] if args else None), kwargs.get("past_key_values")
        fed = 1 if ids is None else ids.shape[-1]
        self.passes.append(Pass(0 if cache is None else cache.get_seq_length(), fed, perf_counter()))

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.passes[-1].end = perf_counter()

    def stats(self, prompt_tokens: int, new_tokens: int) -> Stats:
        """The figures of one generation.

        A pass that begins before the end of the prompt belongs to prefill. Of what a later pass emits the cache tells:
        it grows by just that until the next one. Where a method checks guesses in prefill already, as transformers'
        assisted ones do, `sum(accepted)` is less than `new_tokens - 1`.

        Args:
            prompt_tokens: length of the prompt.
            new_tokens: tokens emitted.
        """
        steps = [each for each in self.passes if each.cached >= prompt_tokens]
        starts = [each.start for each in steps] + [self.end]  # a step ends where the next one begins
        lengths = [each.cached for each in steps] + [prompt_tokens + new_tokens - 1]
        stats, emitted = Stats(), [after - before for before, after in pairwise(lengths)]
        stats.add(_step(0, new_tokens - sum(emitted), prompt_tokens, starts[0] - self.begin))
        for index, (each, tokens) in enumerate(zip(steps, emitted, strict=True), start=1):
            seconds = starts[index] - starts[index - 1]
            stats.add(_step(index, tokens, each.fed, seconds), forward_s=each.end - each.start)
        return stats


def _step(index: int, tokens: int, fed: int, seconds: float) -> Step:
    """A step of a method that drafts one token after the other: all it emits was drafted, but for the last token."""
    sources = ["draft"] * (tokens - 1) + ["bonus"] * min(tokens, 1)
    return Step(index, [-1] * tokens, sources, fed, seconds)
