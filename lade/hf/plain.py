"""Plain decoding by transformers itself: asked for, or where lookahead decoding cannot serve."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lade.errors import UnsupportedArgumentError
from lade.hf.one_call import clean_up
from lade.model.runner import input_device
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


EVERY_PASS = sys.maxsize
"""The length of a row that gets a token from every pass, as the beams of a prompt do."""


@contextmanager
def metered(model: Any, stats: Stats | None) -> Iterator[list[int]]:
    """Count and time the forward passes of whatever runs meanwhile, as one generation of one token a pass.

    Passes over more than one token at the beginning (a prefill in chunks) count as prefill.

    Yields:
        A list; whoever knows how many tokens each row of a batch has got puts that in. Then every row counts.
    """
    rows: list[int] = []
    if stats is None:
        yield rows
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
        yield rows
    finally:
        for hook in hooks:
            hook.remove()
        _add_passes(stats, passes, begin, perf_counter(), rows)


def _add_passes(
    stats: Stats, passes: list[tuple[int, float, float]], begin: float, end: float, rows: Sequence[int]
) -> None:
    prefill = max(1, next((i for i, (fed, *_) in enumerate(passes) if fed == 1), len(passes)))
    laps = [*(start for _, start, _ in passes[prefill:]), end]  # a step ends where the next pass begins

    def add(index: int, source: str, fed: int, seconds: float, forward_s: float) -> None:
        going_on = sum(length > index for length in rows) if rows else 1
        if going_on:
            stats.add(*[Step(index, [-1], [source], fed, seconds)] * going_on, forward_s=forward_s)

    if passes:
        add(0, "prefill", sum(fed for fed, *_ in passes[:prefill]), laps[0] - begin, 0.0)
    for index, (fed, start, stop) in enumerate(passes[prefill:], start=1):
        add(index, "bonus", fed, laps[index] - start, stop - start)


def lengths_of(output: Any, width: int, ends: Collection[int], padding: int | None) -> list[int]:
    """How many tokens each row has got, its end of sequence included.

    Args:
        output: what `model.generate` returned for rows that are not beams.
        width: columns of the prompt.
        ends: ids that end a sequence.
        padding: what stands behind a row that ended otherwise.
    """
    rows = getattr(output, "sequences", output)[:, width:].tolist()
    if len(rows) == 1 or not ends:
        return [len(row) for row in rows]
    return [_length(row, ends, padding) for row in rows]


def _length(row: list[int], ends: Collection[int], padding: int | None) -> int:
    for length, token in enumerate(row, start=1):
        if token in ends:
            return length
    return len(row) - next((i for i, token in enumerate(reversed(row)) if token != padding), 0)


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


def _autocast_of_caller(model: PreTrainedModel) -> torch.autocast:
    """The caller's `torch.autocast`, to be entered by another thread, which has none."""
    device = input_device(model).type
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled, torch.is_autocast_cache_enabled())


def plain_steps(model: Any, stats: Stats | None, **generate_arguments: Any) -> Iterator[Step]:
    """`model.generate` as an iterator: one `Step` a token. Stopping early ends the generation."""
    channel, autocast = _Channel(), _autocast_of_caller(unwrap(model))
    criteria = StoppingCriteriaList([*(generate_arguments.pop("stopping_criteria", None) or ()), channel])

    def work() -> None:
        try:
            with autocast, metered(model, stats):
                model.generate(streamer=channel, stopping_criteria=criteria, **generate_arguments)
        except BaseException as problem:  # noqa: BLE001 - handed over to the reader, who raises it
            clean_up(model, problem, generate_arguments.get("generation_config"))
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
