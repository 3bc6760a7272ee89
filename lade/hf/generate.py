"""The public ways to decode: `lade.generate`, `lade.stream`, and `model.generate(custom_generate=lade.decode)`.

Behind all of them is a `Session`: one generation, of one row or of a batch, prepared by `model.generate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, cast, overload

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput

from lade.config import Lookahead
from lade.errors import UnsupportedError
from lade.grammar import GrammarArgument
from lade.hf.call import (
    Call,
    Generated,
    NeedsGenerateError,
    Prediction,
    cleaning_up,
    num_beams,
    refuse_adapter_arguments,
    refuse_streamed_beams,
    refuse_streamed_rows,
    refuse_streamed_segments,
    refuse_unforwarded_streamer,
    shared,
)
from lade.hf.session import Session, run_of
from lade.model.prepared import Prepared
from lade.stats import Stats, Step


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    prediction: Prediction | None = None,
    inputs_tensor: torch.Tensor | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Generated:
    """The callable for `custom_generate=`; transformers prepares its arguments and returns its result.

    Transformers forwards neither `streamer=` nor the `tokenizer=` of `stop_strings=` to a callable: it raises an error
    for stop strings, and this function does for a streamer, after ending it. `lade.enable`, `lade.generate` and, for a
    streamer, `lade.decoder` support them.

    >>> model.generate(**inputs, custom_generate=lade.decode, lookahead=lade.LookaheadConfig(15, 5, 15))

    Args:
        model: the model whose `generate` was called.
        input_ids: `[B, L]` int64, padded on the left.
        logits_processor: processors, called once per emitted token as in plain decoding. In a batch transformers' own
            are called for each row separately, unless the rows are beams; with any other all rows advance in lock-step.
        stopping_criteria: criteria, called once per emitted token; in a batch like the processors.
        generation_config: the final, merged config.
        lookahead: settings: W, N, G; "auto" takes the defaults and falls back to plain decoding, with one
            `FallbackWarning`, where they are not supported, or known to be slower: beam search over several prompts on
            a CPU; None decodes plainly.
        stats: figures to add to; None for none.
        prediction: ids of the expected answer, see `lade.generate`.
        inputs_tensor: input of the encoder, if the model has one: drafts are taken from that text too.
        streamer: gets the prompt, every token, and `end()`; given by `lade.decoder` alone.
        model_kwargs: attention mask, cache and other arguments that `generate` prepared.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served, or there is a streamer.
        InputError: the prompt cannot be decoded.
    """
    with cleaning_up(model):
        refuse_unforwarded_streamer()
        call = Call.of(model, None, {}, lookahead, stats, prediction, None, streamer)
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        prepared = Prepared(*arguments, wrapper=model, inputs_tensor=inputs_tensor, predictions=call.predictions)
        refuse_streamed_beams(prepared.beams, streamed=streamer is not None)
        return _decode_prepared(call, prepared)


def decoder(*, streamer: BaseStreamer | None = None) -> Callable[..., Generated]:
    """Return a `decode` with a streamer, which transformers does not forward to a callable.

    Do not pass the streamer to `model.generate` as well: it gets the prompt, every token, and `end()` from here.

    >>> model.generate(**inputs, custom_generate=lade.decoder(streamer=TextStreamer(tokenizer)))
    """
    return functools.partial(decode, streamer=streamer)


def _decode_prepared(call: Call, prepared: Prepared, *, unassisted: bool = True) -> Generated:
    """Decode prepared inputs; `unassisted` as in `decoding_method`, false where `model.generate` is called again."""
    run = run_of(call, prepared)
    if run is not None:
        return run()
    plain = import_module("lade.hf.plain")  # few calls need it
    return cast(Generated, plain.decode_prepared(prepared, call.stats, call.streamer, unassisted=unassisted))


@overload
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    return_dict_in_generate: Literal[True],
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
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
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
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
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> Generated: ...  # a generation_config decides


@shared()
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> Generated:
    """`model.generate` with lookahead decoding: same arguments, same tokens, fewer forward passes.

    >>> stats = lade.Stats()
    >>> ids = lade.generate(model, input_ids=ids, max_new_tokens=200, stats=stats)
    >>> stats.tokens_per_step
    2.1

    Args:
        model: a transformers causal language model or encoder-decoder model, or one wrapped by PEFT.
        inputs: `[B, L]` int64, the prompts, padded on the left, or the encoder's input; usually given as
            `input_ids=`. Rows of a batch leave it when they end; with `num_beams` all prompts step together.
        lookahead: settings, "auto" or None, see `lade.decode`.
        stats: figures to add to; None for none.
        streamer: gets the prompt, and each token right after the stopping criteria were called; None for none.
        prediction: expected answer, for instance a file that is to be edited: ids, or text with a `tokenizer=`; in a
            batch one per prompt. It changes the speed, never a token.
        grammar: a `lade.Grammar` that constrains the answer, with a `tokenizer=`; in a batch one for all prompts, or
            one per prompt. The tokens are those of `model.generate` with its processor in `logits_processor`.
        generate_arguments: any other argument of `model.generate`. After an error a cache passed as
            `cache`, or `past_key_values`, holds the text so far, as after plain decoding.

    Returns:
        The ids that `model.generate` returns, `[B, L + new]` int64, or its output object with
        `return_dict_in_generate=True`. Its cache is of transformers' own kind; that of a batch, or of a prompt with
        padding, is filled by a pass over the texts when it is first read. Padded beams and batches with media or an
        encoder have none, and recurrent layers a `TreeCache`.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served.
        InputError: the prompt cannot be decoded, or the prediction or the grammar is not valid.
        ConfigError: a prediction was given with `lookahead=None`.
    """
    with cleaning_up(model):
        call = Call.of(model, inputs, generate_arguments, lookahead, stats, prediction, grammar, streamer)
        refuse_streamed_beams(num_beams(call.inner, call.arguments), streamed=streamer is not None)
        with suppress(NeedsGenerateError):
            if arguments := call.for_callable(functools.partial(_decode_prepared, call, unassisted=False)):
                return cast(Generated, model.generate(**arguments))
        return cast(Generated, import_module("lade.hf.plain").generate_plainly(model, stats, streamer, call.arguments))


@shared(streams=True)
def stream(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    prediction: Prediction | None = None,
    grammar: GrammarArgument | None = None,
    **generate_arguments: Any,
) -> Iterator[Step]:
    """Run `generate` for one prompt, step by step: an iterator over `Step`s, whose tokens together are the new tokens.

    Arguments and errors are those of `generate`; errors are raised by the call, not by the first step. The iteration
    may be stopped early: a cache of the caller's then holds the text of the steps that were yielded.

    >>> for step in lade.stream(model, input_ids=ids, max_new_tokens=200):
    ...     print(tokenizer.decode(step.tokens), end="", flush=True)
    """
    with cleaning_up(model):
        call = Call.of(model, inputs, generate_arguments, lookahead, stats, prediction, grammar)
        refuse_streamed_rows(call.inner, call.arguments)
        if call.config is not None:
            try:
                refuse_adapter_arguments(call.arguments, "lade.stream")
                refuse_streamed_segments(call.inner)
                make = functools.partial(Session, config=call.config, stats=Stats() if stats is None else stats)
                with cleaning_up(model):  # also where plain decoding follows
                    return iter(model.generate(**call.with_callable(make)))
            except UnsupportedError as problem:
                call.fall_back(problem)
        return cast(Iterator[Step], import_module("lade.hf.plain").plain_steps(model, stats, call.arguments))
