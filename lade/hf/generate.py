"""The three ways to decode: `lade.generate`, `lade.stream`, and `model.generate(custom_generate=lade.decode)`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lade.config import LookaheadConfig
from lade.errors import FallbackWarning, UnsupportedArgumentError, UnsupportedError
from lade.hf.arguments import (
    REMEDY,
    Lookahead,
    check_ids,
    check_prompt,
    refuse_media,
    resolve,
    with_stop_strings,
)
from lade.hf.beams import BeamSession, argument_of, num_beams, refuse_slow_beams, refuse_streamed_beams
from lade.hf.one_call import guarded, refuse_values_of_one_call
from lade.hf.plain import EVERY_PASS, decoding_method, lengths_of, metered, plain_steps
from lade.hf.session import Output, Session, ids_of
from lade.model.support import supports, unwrap
from lade.stats import Stats, Step

ENDS = ("eos_token_id", "pad_token_id")
PROMPTS = ("inputs", "input_ids", "inputs_embeds")
ASSISTANTS = ("assistant_model", "prompt_lookup_num_tokens", "custom_generate")


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    **model_kwargs: Any,
) -> Output:
    """The callable for `custom_generate=`; transformers prepares its arguments and returns what it returns.

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


def decoder(*, streamer: BaseStreamer | None = None) -> Callable[..., Output]:
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
    **model_kwargs: Any,
) -> Output:
    config, may_fall_back = resolve(lookahead)
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
            _warn(problem)
        else:
            result: Output = session.run()
            return result
    if streamer is not None:
        streamer.put(input_ids.cpu())
        model_kwargs["streamer"] = streamer
    with metered(model, stats) as rows:
        output: Output = decoding_method(model, generation_config)(*prepared, **model_kwargs)
        if beams > 1:
            rows.extend([EVERY_PASS] * (input_ids.shape[0] // beams))
        else:
            ends, padding = generation_config.eos_token_id, generation_config.pad_token_id
            rows.extend(lengths_of(output, input_ids.shape[1], ids_of(ends), padding))
    return output


@guarded
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    **generate_arguments: Any,
) -> Output:
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
        streamer: gets the prompt and every token.
        generate_arguments: anything that `model.generate` takes.

    Returns:
        What `model.generate` returns: `[B, L + new]` int64, or an output object with `return_dict_in_generate=True`,
        which has no `past_key_values` where there are several rows that are not beams, or padding.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served.
        InputError: the prompt cannot be decoded.
    """
    config, may_fall_back = resolve(lookahead)
    if inputs is not None:
        generate_arguments["inputs"] = inputs
    check_ids(generate_arguments)
    refuse_streamed_beams(num_beams(unwrap(model), generate_arguments) if streamer is not None else None)
    if config is not None:
        try:
            if may_fall_back and isinstance(prompts := _prompts(generate_arguments), torch.Tensor):
                refuse_slow_beams(prompts.device, len(prompts), num_beams(unwrap(model), generate_arguments))
            check_request(model, generate_arguments)
            method = decoder(streamer=streamer)
            handed_on = with_stop_strings(unwrap(model), generate_arguments)
            output: Output = model.generate(custom_generate=method, lookahead=config, stats=stats, **handed_on)
            return output
        except UnsupportedError as problem:  # raised before any work is done
            if not may_fall_back:
                raise
            _warn(problem)
    with metered(model, stats) as rows:
        output = model.generate(streamer=streamer, **generate_arguments)
        prompts = generate_arguments.get("inputs", generate_arguments.get("input_ids"))
        if isinstance(prompts, torch.Tensor) and not unwrap(model).config.is_encoder_decoder:
            rows.extend(_plain_lengths(unwrap(model), generate_arguments, prompts, output))
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
    leaves nothing broken.

    >>> for step in lade.stream(model, input_ids=ids, max_new_tokens=200):
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    """
    config, may_fall_back = resolve(lookahead)
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
            _warn(problem)
    return plain_steps(model, stats, **generate_arguments)


def check_request(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse early what `model.generate` would trip over, or would not hand on."""
    supports(model).require()
    for name in ASSISTANTS:
        if arguments.get(name) is not None:
            raise UnsupportedArgumentError(f"{name} asks for another way of decoding beside lookahead", REMEDY)
    refuse_media(arguments)
    ids = arguments.get("inputs", arguments.get("input_ids"))
    if isinstance(ids, torch.Tensor) and arguments.get("inputs_embeds") is None:
        check_prompt(unwrap(model), ids)


def _plain_lengths(model: Any, arguments: dict[str, Any], prompts: torch.Tensor, output: Any) -> list[int]:
    """How many tokens plain decoding gave each row, beams of a prompt being one; `prompts` are `[B, L]`."""
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


def _warn(problem: UnsupportedError) -> None:
    warnings.warn(f"decoding plainly: {problem.reason}", FallbackWarning, stacklevel=4)


__all__ = ["LookaheadConfig", "decode", "decoder", "generate", "stream"]
