"""Plain decoding by transformers itself: asked for, or where lookahead decoding cannot serve."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lade.errors import UnsupportedArgumentError
from lade.model.support import unwrap
from lade.stats import Stats, Step


def decoding_method(model: PreTrainedModel, generation_config: GenerationConfig) -> Callable[..., Any]:
    """Transformers' own loop for the mode that `generation_config` asks for, to be called with prepared arguments.

    Assisted modes get the loop without their assistant, which is not passed on to a callable: same tokens.
    """
    mode = generation_config.get_generation_mode()
    if mode is GenerationMode.ASSISTED_GENERATION:
        mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
    name = GENERATION_MODES_MAPPING.get(mode, "/")
    if "/" in name:
        raise UnsupportedArgumentError(
            f"transformers has no loop for generation mode {mode.value}", "call model.generate"
        )
    method: Callable[..., Any] = getattr(type(model), name)
    return method


@contextmanager
def metered(model: Any, stats: Stats | None) -> Iterator[None]:
    """Count and time the forward passes of whatever runs meanwhile, as one generation of one token a pass.

    Passes over more than one token at the beginning (a prefill in chunks) count as prefill.
    """
    if stats is None:
        yield
        return
    model = unwrap(model)
    passes: list[tuple[int, float, float]] = []  # tokens fed, start, end

    def before(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        passes.append((1 if ids is None else ids.shape[-1], perf_counter(), 0.0))

    def after(module: Any, args: Any, output: Any) -> None:
        passes[-1] = (*passes[-1][:2], perf_counter())

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]
    begin = perf_counter()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _add_passes(stats, passes, begin, perf_counter())


def _add_passes(stats: Stats, passes: list[tuple[int, float, float]], begin: float, end: float) -> None:
    prefill = max(1, next((i for i, (fed, *_) in enumerate(passes) if fed == 1), len(passes)))
    laps = [*(start for _, start, _ in passes[prefill:]), end]  # a step ends where the next pass begins
    if passes:
        stats.add(Step(0, [-1], ["prefill"], sum(fed for fed, *_ in passes[:prefill]), laps[0] - begin))
    for index, (fed, start, stop) in enumerate(passes[prefill:], start=1):
        stats.add(Step(index, [-1], ["bonus"], fed, laps[index] - start), forward_s=stop - start)


class _Channel(BaseStreamer, StoppingCriteria):
    """Carries tokens from the thread that generates to the one that reads, and the wish to stop the other way."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[list[int] | BaseException | None] = queue.SimpleQueue()
        self.closed = threading.Event()
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.items.put(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """The reader is told when the thread ends, so that an error after the last token is not lost."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.closed.is_set(), device=input_ids.device, dtype=torch.bool)


def plain_steps(model: Any, stats: Stats | None, **generate_arguments: Any) -> Iterator[Step]:
    """`model.generate` as an iterator: one `Step` a token. Stopping early ends the generation."""
    channel = _Channel()
    criteria = StoppingCriteriaList([*(generate_arguments.pop("stopping_criteria", None) or ()), channel])

    def work() -> None:
        try:
            with metered(model, stats):
                model.generate(streamer=channel, stopping_criteria=criteria, **generate_arguments)
        except BaseException as problem:  # noqa: BLE001 - handed over to the reader, who raises it
            channel.items.put(problem)
        channel.items.put(None)

    thread = threading.Thread(target=work, name="lade-plain", daemon=True)
    lap = perf_counter()
    thread.start()
    index = 0
    try:
        while (item := channel.items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            now = perf_counter()
            source = "bonus" if index else "prefill"
            yield Step(index, item, [source] * len(item), 1, now - lap)
            index, lap = index + 1, now
    finally:
        channel.closed.set()
        thread.join()
