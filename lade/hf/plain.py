"""Plain decoding by transformers itself: on request, or where lookahead decoding cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateOutput

from lade.backends.cpu.packing.linear import refuse_autocast
from lade.backends.processes.tensor_parallel import in_step
from lade.errors import UnsupportedArgumentError
from lade.hf.arguments import argument_of
from lade.hf.ids import ids_of
from lade.hf.original import original_generate
from lade.hf.pass_meter import EVERY_PASS, metered
from lade.hf.prepared import Prepared
from lade.model.support.supports import unwrap
from lade.model.user_cache import begin_plainly, cache_in
from lade.stats import Stats

Generated = torch.Tensor | GenerateOutput
"""Ids `[B, L + new]`, or the output object of `return_dict_in_generate=True`."""


class NeedsGenerateError(UnsupportedArgumentError):
    """No loop decodes what `model.generate` has prepared in this mode: only `model.generate` itself does."""


def decoding_method(prepared: Prepared, *, unassisted: bool = True) -> Callable[..., Any]:
    """Transformers' own loop for the mode of `prepared`, unbound.

    Args:
        prepared: what `model.generate` has prepared.
        unassisted: whether assisted modes may have the loop without their assistant, which transformers does not pass
            to a callable: the tokens are the same.

    Raises:
        NeedsGenerateError: there is no such loop.
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
    """Plain decoding of what `model.generate` has prepared.

    Args:
        prepared: what `model.generate` has prepared.
        stats: is added to.
        streamer: gets the prompt and every token.
        unassisted: see `decoding_method`.

    Raises:
        NeedsGenerateError: see `decoding_method`.
    """
    method = decoding_method(prepared, unassisted=unassisted)
    begin_plainly(prepared.user_cache, prepared.model)
    streamed = {} if streamer is None else {"streamer": streamer}
    if streamer is not None:
        streamer.put(prepared.input_ids.cpu())
    with metered(prepared.model, stats) as rows:
        more = {**streamed, "synced_gpus": True} if in_step(prepared.model) else streamed
        output: Generated = method(prepared.model, *prepared.positional, **prepared.model_kwargs, **more)
        if stats is not None:
            prompts, width = len(prepared.prompts), prepared.input_ids.shape[1]
            rows.extend(_lengths(prepared.generation_config, prompts, width, output))
    return output


def generate_plainly(
    model: Any, stats: Stats | None, streamer: BaseStreamer | None, arguments: dict[str, Any]
) -> Generated:
    """`model.generate` itself, also of an enabled model.

    Args:
        model: the model as the caller has it.
        stats: is added to.
        streamer: gets the prompt and every token.
        arguments: arguments of `model.generate`, by name.
    """
    inner = unwrap(model)
    refuse_autocast(inner)
    begin_plainly(cache_in(arguments), inner)
    if streamer is not None:
        arguments = {**arguments, "streamer": streamer}
    with metered(model, stats) as rows, original_generate(model) as generate:
        output: Generated = generate(**arguments)
        if stats is not None:
            rows.extend(_lengths_by(inner, arguments, output))
    return output


def _lengths(config: Any, prompts: int, width: int, output: Any) -> list[int]:
    """How many tokens plain decoding gave each row, its end of sequence included; the beams of a prompt are one row.

    Args:
        config: has the fields of a generation_config that say how many beams there are and how rows end.
        prompts: P, how many there are.
        width: columns of the prompts.
        output: what `model.generate` returned.
    """
    if (config.num_beams or 1) > 1:
        return [EVERY_PASS] * prompts
    rows = getattr(output, "sequences", output)[:, width:].tolist()
    ends = ids_of(config.eos_token_id)
    if len(rows) == 1 or not ends:
        return [len(row) for row in rows]
    return [_length(row, ends, config.pad_token_id) for row in rows]


def _lengths_by(model: Any, arguments: dict[str, Any], output: Any) -> list[int]:
    """The same by the arguments of `model.generate`; none where they do not say it."""
    prompts = arguments.get("inputs", arguments.get("input_ids"))
    if not isinstance(prompts, torch.Tensor) or not isinstance(getattr(output, "sequences", output), torch.Tensor):
        return []
    if model.config.is_encoder_decoder:
        return []
    fields = ("num_beams", "eos_token_id", "pad_token_id")
    config = SimpleNamespace(**{name: argument_of(model, arguments, name) for name in fields})
    return _lengths(config, prompts.shape[0], prompts.shape[1], output)


def _length(row: list[int], ends: Collection[int], padding: int | None) -> int:
    for length, token in enumerate(row, start=1):
        if token in ends:
            return length
    return len(row) - next((i for i, token in enumerate(reversed(row)) if token != padding), 0)
