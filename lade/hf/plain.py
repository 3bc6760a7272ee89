"""Plain decoding by transformers, at once or streamed, with its forward passes counted and timed."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lade.errors import LadeError
from lade.hf.call import Generated, NeedsGenerateError, clean_up, original_generate, refuse_autocast
from lade.model.facts import CACHE_NAMES, needs_synced_passes
from lade.model.module_changes import hooked
from lade.model.prepared import USER_CACHES, Prepared, argument_of, ids_of
from lade.model.supports import SPLIT_MODELS, unwrap
from lade.stats import Stats, Step


@dataclass
class _Pass:
    """One forward pass; `end` is 0 until it completes."""

    fed: int
    start: float
    end: float = 0.0


@contextmanager
def metered(model: Any, stats: Stats | None) -> Iterator[list[int]]:
    """Count and time this thread's forward passes while the context lasts, as one generation of one token per pass.

    Passes over several tokens at the beginning (chunked prefill) count as prefill.

    Yields:
        An empty list for the number of tokens of each row of a batch; if it is filled, every row counts.
    """
    rows: list[int] = []
    if stats is None:
        yield rows
        return
    model = unwrap(model)
    passes: list[_Pass] = []

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        passes.append(_Pass(1 if ids is None else ids.shape[-1], perf_counter()))

    def after(output: Any) -> None:
        passes[-1].end = perf_counter()

    begin = perf_counter()
    counted: Sequence[_Pass] = passes
    with hooked(model, before=before, after=after):
        try:
            yield rows
        except BaseException:
            # A pass counts if another one follows, prefill as a whole: the last failed, or its token was not emitted.
            counted = passes[:-1] if any(each.fed == 1 for each in passes[1:]) else ()
            raise
        finally:
            _add_passes(stats, counted, begin, perf_counter(), rows)


def _add_passes(stats: Stats, passes: Sequence[_Pass], begin: float, end: float, rows: Sequence[int]) -> None:
    prefill = max(1, next((i for i, each in enumerate(passes) if each.fed == 1), len(passes)))
    laps = [*(each.start for each in passes[prefill:]), end]  # a step ends when the next pass begins

    def add(index: int, source: str, fed: int, seconds: float, forward_s: float) -> None:
        going_on = sum(length > index for length in rows) if rows else 1
        if going_on:
            stats.add(*[Step(index, [-1], [source], fed, seconds)] * going_on, forward_s=forward_s)

    if passes:
        add(0, "prefill", sum(each.fed for each in passes[:prefill]), laps[0] - begin, 0.0)
    for index, each in enumerate(passes[prefill:], start=1):
        add(index, "bonus", each.fed, laps[index] - each.start, each.end - each.start)


def decoding_method(prepared: Prepared, *, unassisted: bool = True) -> Callable[..., Any]:
    """Return transformers' own loop for the generation mode, unbound; raise `NeedsGenerateError` if there is none.

    With `unassisted`, assisted modes use the loop without their assistant, which transformers does not forward to a
    callable: the tokens are the same.
    """
    config = prepared.generation_config
    mode = config.get_generation_mode()
    if mode is GenerationMode.ASSISTED_GENERATION and unassisted:
        mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
    name = GENERATION_MODES_MAPPING.get(mode, "/")
    if "/" in name or mode is GenerationMode.ASSISTED_GENERATION:
        raise NeedsGenerateError(f"transformers has no loop for generation mode {mode.value}", "call model.generate")
    method: Callable[..., Any] = getattr(type(prepared.model), name)
    return method


def decode_prepared(
    prepared: Prepared, stats: Stats | None, streamer: BaseStreamer | None, *, unassisted: bool = True
) -> Generated:
    """Decode prepared inputs plainly; `unassisted` as in `decoding_method`.

    Raises:
        NeedsGenerateError: no loop decodes in this mode, see `decoding_method`, or other processes have to follow it.
    """
    if (split := SPLIT_MODELS.loaded()) is not None and split.leads(prepared.model):
        raise NeedsGenerateError("prepared inputs cannot be sent to other processes", "call model.generate")
    method = decoding_method(prepared, unassisted=unassisted)
    _prepare(prepared.user_cache, prepared.model)
    streamed = {} if streamer is None else {"streamer": streamer}
    if streamer is not None:
        streamer.put(prepared.input_ids.cpu())
    with metered(prepared.model, stats) as rows:
        more = {**streamed, "synced_gpus": True} if needs_synced_passes(prepared.model) else streamed
        output: Generated = method(prepared.model, *prepared.positional, **prepared.model_kwargs, **more)
        if stats is not None:
            prompts, width = len(prepared.prompts), prepared.input_ids.shape[1]
            rows.extend(_generated_lengths(prepared.generation_config, prompts, width, output))
    return output


def generate_plainly(
    model: Any, stats: Stats | None, streamer: BaseStreamer | None, arguments: dict[str, Any]
) -> Generated:
    """Call the plain `model.generate`, even on an enabled model; in all processes that share its layers."""
    inner = unwrap(model)
    refuse_autocast(inner)
    _prepare(_cache_in(arguments), inner)
    if streamer is not None:
        arguments = {**arguments, "streamer": streamer}
    split = SPLIT_MODELS.loaded()
    sharing = nullcontext() if split is None else split.decoding_plainly(inner, arguments)
    with sharing, metered(model, stats) as rows, original_generate(model) as generate:
        output: Generated = generate(**arguments)
        if stats is not None:
            rows.extend(_lengths_from_arguments(inner, arguments, output))
    return output


def _cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of `model.generate`; None if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def _prepare(cache: Any, model: PreTrainedModel) -> None:
    """Prepare a user's cache, or None, for plain decoding."""
    if cache is not None:
        USER_CACHES.load().prepare_for_plain(cache, model)


def _generated_lengths(config: Any, prompts: int, width: int, output: Any) -> list[int]:
    """Return the number of tokens generated in each row, EOS included; the beams of a prompt are one row."""
    if (config.num_beams or 1) > 1:
        return [sys.maxsize] * prompts  # the beams of a prompt get a token from every pass
    rows = getattr(output, "sequences", output)[:, width:].tolist()
    ends = ids_of(config.eos_token_id)
    if len(rows) == 1 or not ends:
        return [len(row) for row in rows]
    return [_generated_length(row, ends, config.pad_token_id) for row in rows]


def _lengths_from_arguments(model: Any, arguments: dict[str, Any], output: Any) -> list[int]:
    """Return the lengths given the arguments of `model.generate`; empty where these do not determine them."""
    prompts = arguments.get("inputs", arguments.get("input_ids"))
    if not isinstance(prompts, torch.Tensor) or not isinstance(getattr(output, "sequences", output), torch.Tensor):
        return []
    if model.config.is_encoder_decoder:
        return []
    fields = ("num_beams", "eos_token_id", "pad_token_id")
    config = SimpleNamespace(**{name: argument_of(model, arguments, name) for name in fields})
    return _generated_lengths(config, prompts.shape[0], prompts.shape[1], output)


def _generated_length(row: list[int], ends: Collection[int], padding: int | None) -> int:
    for length, token in enumerate(row, start=1):
        if token in ends:
            return length
    return len(row) - next((i for i, token in enumerate(reversed(row)) if token != padding), 0)


class _Closed(BaseException):
    """Ends a generation whose reader has stopped; not an `Exception`, so that no handler in between catches it."""


class _Channel(BaseStreamer):
    """Carries tokens from the generating thread to the reading one, on request.

    The generating thread waits between two tokens. If it ran ahead, a user's cache would contain text, and torch's
    generator draws, that the reader has never seen.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[list[int] | BaseException | None] = queue.SimpleQueue()
        self._requested = threading.Semaphore(0)
        self._closed = self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.items.put(value.flatten().tolist())
            self._requested.acquire()
            if self._closed:
                raise _Closed
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the reader stops when the thread ends, so that an error after the last token is not lost."""

    def request(self) -> None:
        """Let the generating thread produce the next token; called by the reader."""
        self._requested.release()

    def close(self) -> None:
        """End the generation; called by the reader."""
        self._closed = True
        self._requested.release()


def plain_steps(model: Any, stats: Stats | None, arguments: dict[str, Any]) -> Iterator[Step]:
    """Run `model.generate` as an iterator with one `Step` per token. Stopping early ends the generation.

    Raises:
        UnsupportedArgumentError: other processes would have to follow.
        LadeError: it is read in a forked process, which lacks the generating thread.
    """
    if (split := SPLIT_MODELS.loaded()) is not None:
        split.refuse_plain_steps(unwrap(model))
    return _steps(model, stats, arguments)


def _steps(model: Any, stats: Stats | None, arguments: dict[str, Any]) -> Iterator[Step]:
    channel, casting = _Channel(), _autocasts(unwrap(model))
    _prepare(_cache_in(arguments), unwrap(model))

    def work() -> None:
        try:
            with ExitStack() as stack, metered(model, stats), suppress(_Closed):
                for autocast in casting:
                    stack.enter_context(autocast)
                generate = stack.enter_context(original_generate(model))
                generate(streamer=channel, **arguments)
        except BaseException as problem:  # noqa: BLE001 - passed to the reader, which raises it
            clean_up(model)
            channel.items.put(problem)
        channel.items.put(None)

    thread = threading.Thread(target=work, name="lade-plain", daemon=True)
    lap = perf_counter()
    thread.start()
    index, home = 0, os.getpid()
    try:
        while (item := channel.items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            source = "bonus" if index else "prefill"
            yield Step(index, item, [source] * len(item), 1, perf_counter() - lap)
            if os.getpid() != home:
                raise LadeError(
                    f"this stream is generated in process {home}, and process {os.getpid()}, which was forked from it, "
                    "has no thread for that: start a new stream in this process"
                )
            index, lap = index + 1, perf_counter()
            channel.request()
    finally:
        if os.getpid() == home:
            channel.close()
            thread.join()


def _autocasts(model: PreTrainedModel) -> list[torch.autocast]:
    """Return contexts that apply this thread's autocast settings, which are per thread, to another thread."""
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        for kind in sorted({"cpu", model.device.type})
    ]
