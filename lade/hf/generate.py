"""The three ways to decode: `lade.generate`, `lade.stream`, and `model.generate(custom_generate=lade.decode)`."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput

from lade.config import Lookahead, LookaheadConfig
from lade.errors import FallbackWarning, UnsupportedArgumentError, UnsupportedError
from lade.hf.beams import BeamSession, argument_of, num_beams, refuse_slow_beams, refuse_streamed_beams
from lade.hf.one_call import guarded, refuse_values_of_one_call
from lade.hf.original import check_generate, original_generate
from lade.hf.plain import EVERY_PASS, decoding_method, lengths_of, metered, plain_steps
from lade.hf.refusals import REMEDY, check_ids, check_prompt, refuse_media, resolve, with_stop_strings
from lade.hf.session import Session, ids_of
from lade.model.packing.linear import refuse_autocast
from lade.model.support.supports import supports, unwrap
from lade.stats import Stats, Step

Generated = torch.Tensor | GenerateOutput
"""Ids `[B, L + new]`, or the output object of `return_dict_in_generate=True`."""

logger = logging.getLogger(__name__)

ENDS = ("eos_token_id", "pad_token_id")
PROMPTS = ("inputs", "input_ids", "inputs_embeds")
ASSISTANTS = ("assistant_model", "prompt_lookup_num_tokens", "custom_generate")


@dataclass
class _Progress:
    """How far a call of `model.generate` has come.

    Attributes:
        started: whether decoding has begun: until then nothing has been fed, drawn or streamed.
    """

    started: bool = False


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    **model_kwargs: Any,
) -> Generated:
    """The callable for `custom_generate=`; transformers prepares its arguments and returns what it returns.

    To a callable transformers passes neither `streamer=` nor the `tokenizer=` of `stop_strings=`: it raises for stop
    strings, and never ends the streamer, of which nothing can be seen from here. `lade.enable`, `lade.generate`, and
    for a streamer `lade.decoder`, serve them.

    >>> model.generate(**inputs, custom_generate=lade.decode, lookahead=lade.LookaheadConfig(15, 5, 15))

    Args:
        model: the model whose `generate` was called.
        input_ids: `[B, L]` int64, padded on the left.
        logits_processor: called once per emitted token, as in plain decoding; in a batch for each row by itself, unless
            the rows are beams.
        stopping_criteria: likewise.
        generation_config: the final, merged one.
        lookahead: W, N, G; "auto" takes the defaults and falls back to plain decoding, with one `FallbackWarning`,
            where they cannot be served, or are known to be slower: beams of several prompts on a CPU; None decodes
            plainly.
        stats: is added to.
        model_kwargs: attention mask, cache and whatever else `generate` prepared.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served.
        InputError: the prompt cannot be decoded.
    """
    arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    return _decode(*arguments, lookahead=lookahead, stats=stats, streamer=None, **model_kwargs)


def decoder(*, streamer: BaseStreamer | None = None) -> Callable[..., Generated]:
    """A `decode` that knows the streamer, which transformers does not pass to a callable.

    Give the streamer here and not to `model.generate` as well: it gets the prompt, every token, and `end()`.

    >>> model.generate(**inputs, custom_generate=lade.decoder(streamer=TextStreamer(tokenizer)))
    """
    return functools.partial(_decode, streamer=streamer)


@guarded
def _decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    progress: _Progress | None = None,
    **model_kwargs: Any,
) -> Generated:
    config, may_fall_back = resolve(lookahead)
    refuse_autocast(model)
    prepared = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    refuse_streamed_beams(generation_config.num_beams if streamer is not None else None)
    beams = generation_config.num_beams or 1
    if config is not None:
        make: Any = BeamSession if beams > 1 else functools.partial(Session, streamer=streamer)
        try:
            if may_fall_back:
                refuse_slow_beams(input_ids.device, input_ids.shape[0] // beams, beams)
            session = make(*prepared, config=config, stats=Stats() if stats is None else stats, **model_kwargs)
        except UnsupportedError as problem:
            if not may_fall_back:
                raise
            _fall_back(problem, stats)
        else:
            if progress is not None:
                progress.started = True
            result: Generated = session.run()
            return result
    if streamer is not None:
        streamer.put(input_ids.cpu())
        model_kwargs["streamer"] = streamer
    with metered(model, stats) as rows:
        output: Generated = decoding_method(model, generation_config)(*prepared, **model_kwargs)
        if beams > 1:
            rows.extend([EVERY_PASS] * (input_ids.shape[0] // beams))
        else:
            ends, padding = generation_config.eos_token_id, generation_config.pad_token_id
            rows.extend(lengths_of(output, input_ids.shape[1], ids_of(ends), padding))
    return output


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    return_dict_in_generate: Literal[True],
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    **generate_arguments: Any,
) -> GenerateOutput: ...


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    return_dict_in_generate: Literal[False],
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    **generate_arguments: Any,
) -> torch.Tensor: ...


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    **generate_arguments: Any,
) -> Generated: ...  # a generation_config decides


@guarded
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    **generate_arguments: Any,
) -> Generated:
    """`model.generate` with lookahead decoding: same arguments, same tokens, fewer forward passes.

    >>> stats = lade.Stats()
    >>> ids = lade.generate(model, input_ids=ids, max_new_tokens=200, stats=stats)
    >>> stats.tokens_per_step
    2.1

    Args:
        model: a transformers causal language model, or one wrapped by PEFT.
        inputs: `[B, L]` int64, the prompts, padded on the left; usually given as `input_ids=`. Rows of a batch go on at
            their own pace and leave it when they end; with `num_beams` all prompts take their steps together.
        lookahead: see `lade.decode`.
        stats: is added to.
        streamer: gets the prompt, and each token after the stopping criteria and before anything else.
        generate_arguments: anything that `model.generate` takes. After an error a cache passed as `past_key_values`
            holds the text so far, as after plain decoding.

    Returns:
        What `model.generate` returns: `[B, L + new]` int64, or an output object with `return_dict_in_generate=True`,
        which has no `past_key_values` where there are several rows that are not beams, or padding.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served.
        InputError: the prompt cannot be decoded.
    """
    config, may_fall_back = resolve(lookahead)
    refuse_autocast(unwrap(model))
    if inputs is not None:
        generate_arguments["inputs"] = inputs
    check_ids(generate_arguments)
    refuse_streamed_beams(num_beams(unwrap(model), generate_arguments) if streamer is not None else None)
    if config is not None:
        progress = _Progress()
        try:
            if may_fall_back and isinstance(prompts := _prompts(generate_arguments), torch.Tensor):
                refuse_slow_beams(prompts.device, len(prompts), num_beams(unwrap(model), generate_arguments))
            check_request(model, generate_arguments)
            method = functools.partial(_decode, streamer=streamer, progress=progress)
            handed_on = with_stop_strings(unwrap(model), generate_arguments)
            output: Generated = model.generate(custom_generate=method, lookahead=config, stats=stats, **handed_on)
            return output
        except UnsupportedError as problem:
            if progress.started or not may_fall_back:
                raise
            _fall_back(problem, stats)
    with metered(model, stats) as rows, original_generate(model) as plain_generate:
        given = {} if streamer is None else {"streamer": streamer}
        output = plain_generate(**given, **generate_arguments)
        if stats is not None:
            rows.extend(_plain_lengths(unwrap(model), generate_arguments, output))
    return output


@guarded
def stream(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    **generate_arguments: Any,
) -> Iterator[Step]:
    """`generate` for one prompt, step by step: an iterator over `Step`s, whose tokens together are the new tokens.

    Arguments and errors are those of `generate`; errors are raised by the call, not by the first step. Stopping early
    leaves nothing broken: a cache passed as `past_key_values` then holds the text of the steps that were yielded.

    >>> for step in lade.stream(model, input_ids=ids, max_new_tokens=200):
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    """
    config, may_fall_back = resolve(lookahead)
    refuse_autocast(unwrap(model))
    if inputs is not None:
        generate_arguments["inputs"] = inputs
    check_ids(generate_arguments)
    refuse_streamed_beams(num_beams(unwrap(model), generate_arguments))
    _refuse_streamed_rows(unwrap(model), generate_arguments)
    if config is not None:
        try:
            check_request(model, generate_arguments)
            refuse_values_of_one_call(generate_arguments, "lade.stream")
            make = functools.partial(Session, config=config, stats=Stats() if stats is None else stats)
            handed_on = with_stop_strings(unwrap(model), generate_arguments)
            return iter(model.generate(custom_generate=make, **handed_on))
        except UnsupportedError as problem:
            if not may_fall_back:
                raise
            _fall_back(problem, stats)
    return plain_steps(model, stats, **generate_arguments)


def check_request(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse early what `model.generate` would trip over, or would not hand on."""
    supports(model).require()
    check_generate(model)
    for name in ASSISTANTS:
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} asks for another way of decoding beside lookahead", REMEDY)
    if arguments.get("synced_gpus"):
        raise UnsupportedArgumentError("synced_gpus=True has all ranks make as many passes as the slowest one", REMEDY)
    if arguments.get("cache_implementation") == "paged":
        raise UnsupportedArgumentError("cache_implementation='paged' asks for continuous batching", REMEDY)
    refuse_media(arguments)
    ids = arguments.get("inputs", arguments.get("input_ids"))
    if isinstance(ids, torch.Tensor) and arguments.get("inputs_embeds") is None:
        check_prompt(unwrap(model), ids)


def _plain_lengths(model: Any, arguments: dict[str, Any], output: Any) -> list[int]:
    """How many tokens plain decoding gave each row, beams of a prompt being one; none where that cannot be known."""
    prompts = arguments.get("inputs", arguments.get("input_ids"))
    if not isinstance(prompts, torch.Tensor) or not isinstance(getattr(output, "sequences", output), torch.Tensor):
        return []
    if model.config.is_encoder_decoder:
        return []
    if num_beams(model, arguments) > 1:
        return [EVERY_PASS] * prompts.shape[0]
    ends, padding = (argument_of(model, arguments, name) for name in ENDS)
    return lengths_of(output, prompts.shape[1], ids_of(ends), padding)


def _prompts(arguments: dict[str, Any]) -> Any:
    """As `model.generate` was given them, under whatever name."""
    return next((arguments[name] for name in PROMPTS if arguments.get(name) is not None), None)


def _refuse_streamed_rows(model: Any, arguments: dict[str, Any]) -> None:
    prompts = _prompts(arguments)
    rows = prompts.shape[0] if isinstance(prompts, torch.Tensor) and prompts.ndim > 1 else 1
    rows *= argument_of(model, arguments, "num_return_sequences") or 1
    if rows > 1:
        raise UnsupportedArgumentError(f"a batch of {rows} rows cannot be streamed", "stream one at a time")


def _fall_back(problem: UnsupportedError, stats: Stats | None) -> None:
    """Report why plain decoding goes on: as a warning, in the log and in the figures."""
    logger.info("decoding plainly: %s", problem.reason)
    if stats is not None:
        stats.fallback = problem.reason
    warnings.warn(f"decoding plainly: {problem.reason}", FallbackWarning, stacklevel=4)


__all__ = ["LookaheadConfig", "decode", "decoder", "generate", "stream"]
