"""The public ways to decode: `lade.generate`, `lade.stream`, and `model.generate(custom_generate=lade.decode)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput

from lade.config import Lookahead, LookaheadConfig, resolve
from lade.errors import UnsupportedError
from lade.grammar import GRAMMARS, GrammarArgument
from lade.hf.arguments import (
    Generated,
    NeedsGenerateError,
    Prediction,
    arguments_for_callable,
    check_call,
    check_decode,
    clean_up,
    num_beams,
    prediction_ids,
    refuse_adapter_arguments,
    refuse_autocast,
    refuse_streamed_beams,
    refuse_streamed_rows,
    refuse_streamed_segments,
    refuse_unused_prediction,
)
from lade.hf.batch_rules import needs_lock_step
from lade.hf.refusals import fall_back, refuse_slow_beams
from lade.hf.session import Session
from lade.model.facts import with_present_cache_name
from lade.model.prepared import Prepared, custom_generate_for
from lade.model.supports import may_be_shared, unwrap
from lade.stats import Stats, Step


def _rarely_used(name: str) -> Any:
    """Return a module of this folder that few calls need, imported on first use."""
    return import_module(f"lade.hf.{name}")


class _Model(NamedTuple):
    """The model of a call.

    Attributes:
        given: the model as the caller has it.
        inner: the model inside any wrapper.
        distributed: `lade.hf.distributed` if several processes may decode it; None if this one decodes it alone.
    """

    given: Any
    inner: Any
    distributed: Any | None

    @classmethod
    def of(cls, model: Any) -> _Model:
        """Return the model of a call."""
        inner = unwrap(model)
        return cls(model, inner, _rarely_used("distributed") if may_be_shared(inner) else None)


class DecodeSession(Protocol):
    """A generation that has been checked and composed, and has not begun."""

    def run(self) -> Generated:
        """Decode to the end, and return the result of `model.generate`."""
        ...


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
        model_kwargs: attention mask, cache and other arguments that `generate` prepared.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: an explicit config cannot be served, or there is a streamer.
        InputError: the prompt cannot be decoded.
    """
    arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    return _decode(*arguments, lookahead, stats, None, prediction, inputs_tensor, **model_kwargs)


def decoder(*, streamer: BaseStreamer | None = None) -> Callable[..., Generated]:
    """Return a `decode` with a streamer, which transformers does not forward to a callable.

    Do not pass the streamer to `model.generate` as well: it gets the prompt, every token, and `end()` from here.

    >>> model.generate(**inputs, custom_generate=lade.decoder(streamer=TextStreamer(tokenizer)))
    """
    return functools.partial(_decode, streamer=streamer)


def _decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead: Lookahead = "auto",
    stats: Stats | None = None,
    streamer: BaseStreamer | None = None,
    prediction: Prediction | None = None,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> Generated:
    """Decode like `decode`; the streamer gets the prompt, every token, and `end()`."""
    check_decode(stats)
    config, auto = resolve(lookahead)
    refuse_unused_prediction(prediction, config)
    arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    expected = prediction_ids(prediction)
    prepared = Prepared(*arguments, wrapper=model, inputs_tensor=inputs_tensor, predictions=expected)
    return _decode_with(config, prepared, stats, streamer, auto=auto, distributed=_Model.of(model).distributed)


def _decode_with(
    config: LookaheadConfig | None,
    prepared: Prepared,
    stats: Stats | None,
    streamer: BaseStreamer | None,
    *,
    auto: bool,
    distributed: Any | None,
    unassisted: bool = True,
) -> Generated:
    """Decode prepared inputs; the single place for refusals, before anything is fed, drawn or streamed.

    Args:
        config: settings of lookahead decoding; None decodes plainly.
        prepared: inputs prepared by `model.generate`.
        stats: figures to add to; None for none.
        streamer: gets the prompt, every token, and `end()`; None for none.
        auto: fall back to plain decoding where lookahead decoding is not supported.
        distributed: see `_Model`.
        unassisted: as in `decoding_method`; false for a caller that calls `model.generate` again.
    """
    model = prepared.model
    try:
        refuse_autocast(model)
        if streamer is not None:
            refuse_streamed_beams(prepared.beams, streamer)
        session: DecodeSession | None = None
        if config is not None:
            try:
                if distributed is not None:
                    distributed.refuse_unshared(model)
                session = _session_for(prepared, config, stats, streamer, auto=auto)
            except UnsupportedError as problem:
                fall_back(model, problem, stats, allowed=auto)
        if session is not None:
            return session.run()
        if distributed is not None and distributed.leader_of(model) is not None:
            raise NeedsGenerateError("prepared inputs cannot be sent to other processes", "call model.generate")
        output: Generated
        output = _rarely_used("plain").decode_prepared(prepared, stats, streamer, unassisted=unassisted)
        return output
    except BaseException:
        clean_up(model)
        raise


def _session_for(
    prepared: Prepared, config: LookaheadConfig, stats: Stats | None, streamer: BaseStreamer | None, *, auto: bool
) -> DecodeSession:
    stats = Stats() if stats is None else stats
    if prepared.beams == 1:
        processors, criteria, generation_config = prepared.positional[1:]
        several, streamed = len(prepared.prompts) > 1, streamer is not None
        if several and needs_lock_step(processors, criteria, generation_config, streamed=streamed):
            make = _rarely_used("lock_step").LockStepSession
            lock_step: DecodeSession = make(prepared, config=config, stats=stats, streamer=streamer)
            return lock_step
        return Session(prepared, config=config, stats=stats, streamer=streamer)
    if auto:
        refuse_slow_beams(prepared)
    beams: DecodeSession = _rarely_used("lock_step").BeamSession(prepared, config=config, stats=stats)
    return beams


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
    arguments = _named(inputs, generate_arguments)
    decoded = _Model.of(model)
    call = functools.partial(_generate, decoded, arguments, lookahead, stats, streamer, prediction, grammar)
    if decoded.distributed is None or not decoded.distributed.is_shared(model):
        return call()
    output: Generated = decoded.distributed.call_together(model, call)
    return output


def _generate(
    decoded: _Model,
    arguments: dict[str, Any],
    lookahead: Lookahead,
    stats: Stats | None,
    streamer: BaseStreamer | None,
    prediction: Prediction | None,
    grammar: GrammarArgument | None,
) -> Generated:
    model, inner, distributed = decoded
    config, auto = resolve(lookahead)
    refuse_unused_prediction(prediction, config)
    texts = prediction_ids(prediction, arguments.get("tokenizer"))
    if distributed is not None:
        distributed.refuse_shared(model, arguments)
    check_call(model, arguments, stats)
    try:
        if grammar is not None:
            arguments = GRAMMARS.load().with_grammar(inner, grammar, arguments)
        if streamer is not None:  # plain beam search would raise too, but after warnings and with another message
            refuse_streamed_beams(num_beams(inner, arguments), streamer)
        prepared: dict[str, Any] | None = None
        if config is not None:
            try:
                prepared = arguments_for_callable(model, inner, arguments)
            except UnsupportedError as problem:
                fall_back(inner, problem, stats, allowed=auto)
        if prepared is not None:
            use = functools.partial(
                _decode_with,
                config,
                stats=stats,
                streamer=streamer,
                auto=auto,
                distributed=distributed,
                unassisted=False,
            )
            with suppress(NeedsGenerateError):
                output: Generated = model.generate(custom_generate=custom_generate_for(use, model, texts), **prepared)
                return output
        with nullcontext() if distributed is None else distributed.sharing_plainly(model, arguments):
            plainly: Generated = _rarely_used("plain").generate_plainly(model, stats, streamer, arguments)
            return plainly
    except BaseException:
        clean_up(model)
        raise


def _named(inputs: torch.Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `model.generate` by the names that this transformers has for them."""
    return with_present_cache_name(arguments if inputs is None else {**arguments, "inputs": inputs})


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
    arguments = _named(inputs, generate_arguments)
    decoded = _Model.of(model)
    begin = functools.partial(_stream, decoded, arguments, lookahead, stats, prediction, grammar)
    if decoded.distributed is None or not decoded.distributed.is_shared(model):
        return begin()
    steps: Iterator[Step] = decoded.distributed.stream_together(model, begin)
    return steps


def _stream(
    decoded: _Model,
    arguments: dict[str, Any],
    lookahead: Lookahead,
    stats: Stats | None,
    prediction: Prediction | None,
    grammar: GrammarArgument | None,
) -> Iterator[Step]:
    model, inner, distributed = decoded
    config, auto = resolve(lookahead)
    refuse_unused_prediction(prediction, config)
    texts = prediction_ids(prediction, arguments.get("tokenizer"))
    if distributed is not None:
        distributed.refuse_shared(model, arguments)
    check_call(model, arguments, stats)
    try:
        refuse_autocast(inner)
        if grammar is not None:
            arguments = GRAMMARS.load().with_grammar(inner, grammar, arguments)
        refuse_streamed_beams(num_beams(inner, arguments))
        refuse_streamed_rows(inner, arguments)
        if config is not None:
            try:
                refuse_adapter_arguments(arguments, "lade.stream")
                refuse_streamed_segments(inner)
                make = functools.partial(Session, config=config, stats=Stats() if stats is None else stats)
                prepared = arguments_for_callable(model, inner, arguments)
                return iter(model.generate(custom_generate=custom_generate_for(make, model, texts), **prepared))
            except UnsupportedError as problem:
                fall_back(inner, problem, stats, allowed=auto)
        if distributed is not None:
            distributed.refuse_shared_steps(model)
        steps: Iterator[Step] = _rarely_used("plain").plain_steps(model, stats, arguments)
        return steps
    except BaseException:
        clean_up(model)
        raise
