"""A call of a public function before `model.generate` prepares its arguments: checks, predictions, failed calls.

Nearly all checks are made on the inputs that `model.generate` has prepared, in `lade.hf.refusals`. The checks here come
earlier: they concern arguments that transformers does not forward to a callable, or fails on before it calls one.
"""

from __future__ import annotations

import copy
import functools
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateOutput

from lade.config import Lookahead, LookaheadConfig, resolve
from lade.errors import ConfigError, InputError, UnsupportedArgumentError, UnsupportedError, UnsupportedModelError
from lade.grammar import GRAMMARS, GrammarArgument
from lade.hf.refusals import fall_back
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.facts import PACKED, adapters, needs_synced_passes, with_present_cache_name
from lade.model.prepared import (
    REMEDY,
    Prepared,
    argument_of,
    check_shape,
    custom_generate_for,
    holds_media,
    prompts_in,
    refuse,
)
from lade.model.supports import PLAIN_REMEDY, may_be_shared, supports, unwrap
from lade.stats import Stats

P = ParamSpec("P")
T = TypeVar("T")
Generated = torch.Tensor | GenerateOutput
"""Result of `generate`: ids `[B, L + new]`, or an output object with `return_dict_in_generate=True`."""


class NeedsGenerateError(UnsupportedArgumentError):
    """Only `model.generate` itself can decode in this mode, no single loop can decode prepared inputs."""


def shared(*, streams: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a call, or one that streams steps, be made by all processes that decode the model."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not may_be_shared(unwrap(model)):
                return function(model, *args, **kwargs)
            begin = functools.partial(function, model, *args, **kwargs)
            return import_module("lade.hf.distributed").together(model, begin, kwargs, streams=streams)

        return cast(Callable[P, T], call)

    return decorate


@contextmanager
def cleaning_up(model: Any) -> Iterator[None]:
    """Remove what PEFT has put on a model for a call that fails in this context."""
    try:
        yield
    except BaseException:
        clean_up(model)
        raise


@dataclass(frozen=True)
class Call:
    """One call of a public function; nothing has been fed, drawn or streamed yet.

    Attributes:
        model, inner: the model as the caller has it, and the model inside any wrapper.
        arguments: arguments of `model.generate`, by the names that this transformers has for them.
        config: settings of lookahead decoding; None decodes plainly.
        auto: decode plainly where lookahead decoding is not supported.
        stats, streamer: as the caller gave them, or None.
        predictions: ids of the expected answer to each prompt; empty for none.
    """

    model: Any
    inner: Any
    arguments: dict[str, Any]
    config: LookaheadConfig | None
    auto: bool
    stats: Stats | None = None
    streamer: BaseStreamer | None = None
    predictions: Sequence[Sequence[int]] = ()

    @classmethod
    def of(
        cls,
        model: Any,
        inputs: torch.Tensor | None,
        arguments: dict[str, Any],
        lookahead: Lookahead,
        stats: Stats | None,
        prediction: Prediction | None,
        grammar: GrammarArgument | None,
        streamer: BaseStreamer | None = None,
    ) -> Call:
        """Check the arguments of `lade.generate`, `lade.stream` or `lade.decode`; errors are theirs."""
        inner, (config, auto) = unwrap(model), resolve(lookahead)
        arguments = with_present_cache_name(arguments if inputs is None else {**arguments, "inputs": inputs})
        refuse_unused_prediction(prediction, config)
        predictions = prediction_ids(prediction, arguments.get("tokenizer"))
        refuse_without_generate(model)
        check_stats(stats)
        for name in ("inputs", "input_ids"):
            if not isinstance(value := arguments.get(name), torch.Tensor | None):
                raise InputError(not_ids_message(name, value))
        refuse_autocast(inner)
        if grammar is not None:
            arguments = GRAMMARS.load().with_grammar(inner, grammar, arguments)
        if streamer is not None:
            check_streamer(streamer)
        return cls(model, inner, arguments, config, auto, stats, streamer, predictions)

    def with_callable(self, use: Callable[[Prepared], object]) -> dict[str, Any]:
        """Return the arguments with which `model.generate` calls `use`; errors are `arguments_for_callable`'s."""
        arguments = arguments_for_callable(self.model, self.inner, self.arguments)
        return {"custom_generate": custom_generate_for(use, self.model, self.predictions), **arguments}

    def for_callable(self, use: Callable[[Prepared], object]) -> dict[str, Any] | None:
        """Return the arguments with which `model.generate` calls `use`; None to decode plainly."""
        if self.config is None:
            return None
        try:
            return self.with_callable(use)
        except UnsupportedError as problem:
            self.fall_back(problem)
            return None

    def fall_back(self, problem: UnsupportedError) -> None:
        """Report that this call is decoded plainly, or raise the problem if that was not asked for."""
        fall_back(self.inner, problem, self.stats, allowed=self.auto)


REPLACED = "_generate_before_lade"
"""Attribute in which an enabled model keeps its former instance attribute `generate`."""

_decoded_plainly: ContextVar[Any] = ContextVar("_decoded_plainly", default=None)
"""The innermost model whose `generate` must not be accelerated in this context."""


@contextmanager
def original_generate(model: Any) -> Iterator[Callable[..., Any]]:
    """Yield a `generate` that decodes plainly while the context lasts, even on an enabled model.

    This also holds for the models inside wrappers such as PEFT's, and for this thread alone.

    >>> with original_generate(model) as generate:
    ...     output = generate(**inputs)
    """
    token = _decoded_plainly.set(unwrap(model))
    try:
        yield model.generate
    finally:
        _decoded_plainly.reset(token)


def check_generate(model: Any) -> None:
    """Raise `UnsupportedModelError` for a model whose checkpoint brings its own decoding method.

    Transformers replaces `generate` by that method when it loads the model; it need not accept `custom_generate=`.
    """
    attributes = getattr(model, "__dict__", {})
    own = attributes.get(REPLACED, attributes.get("generate"))
    if not isinstance(own, functools.partial) or own.keywords.get("model") is not model:
        return
    if getattr(own.func, "__globals__", {}).get("PACKAGE") != "lookahead-decoding":  # that of `lade export-recipe`
        reason = f"{type(model).__name__} decodes by the custom_generate of its checkpoint"
        raise UnsupportedModelError(reason, PLAIN_REMEDY)


def is_decoded_plainly(model: Any) -> bool:
    """Return whether an `original_generate` of this model, or of a wrapper around it, is active."""
    return _decoded_plainly.get() is unwrap(model)


UNFORWARDED = {
    "assistant_model": "asks for another decoding method than lookahead",
    "prompt_lookup_num_tokens": "asks for another decoding method than lookahead",
    "custom_generate": "asks for another decoding method than lookahead",
    "synced_gpus": "makes all ranks run as many passes as the slowest one",
}
"""Arguments that transformers does not forward to a callable, and their effect."""


def arguments_for_callable(model: Any, inner: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `model.generate` calls a callable and gives it all that it needs.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: `model.generate` would not call it.
        InputError: transformers would fail on the prompt.
    """
    if getattr(type(inner), "generate", None) is not GenerationMixin.generate:
        supports(model).require()  # an overridden `generate` may do anything with our callable, or be missing
    if needs_synced_passes(inner):  # a callable does not learn of it, and would have to synchronize by itself
        supports(model).require()
    check_generate(inner)
    for name, what in UNFORWARDED.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise UnsupportedArgumentError(f"{name}={value} {what}" if value is True else f"{name} {what}", REMEDY)
    if arguments.get("cache_implementation") == "paged":
        raise UnsupportedArgumentError("cache_implementation='paged' asks for continuous batching", REMEDY)
    if argument_of(inner, arguments, "token_healing"):
        refuse("token_healing=True", "transformers does not forward the tokenizer that it needs")
    encoding = inner.config.is_encoder_decoder  # whose encoder may take any input
    if not encoding and holds_media(arguments):  # transformers encodes them before it calls a callable
        supports(model).require()
    ids = arguments.get("inputs", arguments.get("input_ids"))
    if isinstance(ids, torch.Tensor) and not encoding and arguments.get("inputs_embeds") is None:
        check_shape(ids)
    return _with_stop_strings(inner, _with_cache(inner, arguments))


def _with_cache(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Ask for the KV cache where only the checkpoint's defaults are against it, as training leaves them.

    It changes no token; a caller who gives `use_cache=False`, or a config of his own, is told that drafts need it.
    """
    own = arguments.get("use_cache") is not None or arguments.get("generation_config") is not None
    if own or getattr(model.generation_config, "use_cache", None) is not False:
        return arguments
    return {**arguments, "use_cache": True}


def num_beams(model: Any, arguments: Mapping[str, Any]) -> int:
    """Return how many beams `model.generate` would use with these arguments."""
    return argument_of(model, arguments, "num_beams") or 1


def refuse_streamed_beams(beams: int, *, streamed: bool = True) -> None:
    """Raise `UnsupportedArgumentError` for a streamed beam search, plain or not.

    Plain beam search would raise too, but after warnings and with another message.
    """
    if streamed and beams > 1:
        raise UnsupportedArgumentError(
            f"num_beams={beams} cannot be streamed: which beam wins is known only at its end",
            "use lade.generate without a streamer, or num_beams=1",
        )


def refuse_unforwarded_streamer() -> None:
    """Raise `UnsupportedArgumentError` for the `streamer=` of a `model.generate` that has called `lade.decode`.

    Transformers does not forward it and never ends it: the reader of a `TextIteratorStreamer` would block forever. No
    version from 5.17 to 5.23 tells a callable about it, so this looks it up in the local variables of the innermost
    `generate`. The streamer found is ended and refused, never used.
    """
    frame: FrameType | None = sys._getframe(1)
    generate = ("generate", GenerationMixin.__module__)
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != generate:
        frame = frame.f_back
    streamer = None if frame is None else frame.f_locals.get("streamer")
    if streamer is None:
        return
    with suppress(Exception):  # a broken streamer must not hide what is wrong
        streamer.end()
    raise UnsupportedArgumentError(
        "streamer= cannot be used with custom_generate=lade.decode: transformers does not pass it on",
        "give it to lade.decoder(streamer=...) or lade.generate(streamer=...) alone, or call lade.enable(model)",
    )


def refuse_streamed_rows(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedArgumentError` for several rows in one `lade.stream`, of a batch or a beam search."""
    refuse_streamed_beams(num_beams(model, arguments))
    prompts = prompts_in(arguments)
    rows = prompts.shape[0] if isinstance(prompts, torch.Tensor) and prompts.ndim > 1 else 1
    rows *= argument_of(model, arguments, "num_return_sequences") or 1
    if rows > 1:
        raise UnsupportedArgumentError(f"a batch of {rows} rows cannot be streamed", "stream one at a time")


def refuse_streamed_segments(model: Any) -> None:
    """Raise `UnsupportedArgumentError` for a model whose `generate` decodes audio segment by segment (Whisper)."""
    own = getattr(type(model), "generate", None) is not GenerationMixin.generate
    if own and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedArgumentError(
            f"{type(model).__name__} decodes segment by segment and cannot be streamed",
            'use lade.generate, or lookahead="auto", which streams plain decoding',
        )


def refuse_without_generate(model: Any) -> None:
    """Raise `UnsupportedModelError` for an object without a `generate`."""
    if not callable(getattr(model, "generate", None)):
        remedy = GIVE_INSIDE if wraps_model(model) else "give a transformers language model"
        raise UnsupportedModelError(f"{type(model).__name__} has no generate", remedy)


def check_stats(stats: object) -> None:
    """Raise `ConfigError` if `stats` is neither a `Stats` nor None."""
    if not isinstance(stats, Stats | None):
        raise ConfigError("stats", stats, "give a lade.Stats, or None")


def check_streamer(streamer: object) -> None:
    """Raise `ConfigError` if `streamer` has no methods `put` and `end`."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ConfigError("streamer", streamer, "give a transformers streamer, or an object with methods put and end")


def not_ids_message(name: str, value: object) -> str:
    """Return the error message for a prompt that is not a tensor of ids."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, str):
        return (
            f"{name} is a text, {reprlib.repr(first)}: encode it with the tokenizer: "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if isinstance(value, Mapping):
        return f"{name} is a {type(value).__name__}: pass its items as arguments, **{name}"
    return f"{name} is a {type(value).__name__}: give ids as an int64 tensor [batch, length]"


def _with_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with `stop_strings` turned into a criterion, as a callable gets no tokenizer for them.

    They may come from a generation config as well. Without a tokenizer they stay, and transformers asks for one.
    """
    tokenizer, strings = arguments.get("tokenizer"), argument_of(model, arguments, "stop_strings")
    if tokenizer is None or strings is None:
        return arguments
    changed = dict(arguments)
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    if not any(type(each) is StopStringCriteria for each in criteria):  # else transformers takes the user's own alone
        criteria.append(StopStringCriteria(tokenizer, strings))
    changed["stopping_criteria"] = criteria
    given = arguments.get("generation_config")
    if getattr(given, "stop_strings", None) is not None:
        changed["generation_config"] = copy.deepcopy(given)
        changed["generation_config"].stop_strings = None
    if "stop_strings" in arguments or model.generation_config.stop_strings is not None:
        changed["stop_strings"] = None  # an argument takes precedence over the model's generation_config
    return changed


def refuse_autocast(model: Any) -> None:
    """Raise `UnsupportedModelError` if autocast wants another dtype than a packed model's, as its passes would."""
    packed = PACKED.loaded() if torch.is_autocast_enabled("cpu") else None
    if packed is not None:
        packed.refuse_autocast(model)


Prediction: TypeAlias = (
    str | torch.Tensor | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[torch.Tensor]
)
"""Text or ids `[L]` for one prompt, or one of these per prompt of a batch."""


def refuse_unused_prediction(prediction: Prediction | None, config: LookaheadConfig | None) -> None:
    """Raise `ConfigError` for a prediction where nothing is drafted."""
    if prediction is not None and config is None:
        raise ConfigError("prediction", "a text", "lookahead=None drafts nothing: leave one of them out")


def prediction_ids(prediction: Prediction | None, tokenizer: Any = None) -> list[list[int]]:
    """Return the ids of each prediction, one per prompt; empty without any. Text needs the model's tokenizer.

    Raises:
        InputError: a prediction is neither text nor ids, or text without a tokenizer.
    """
    if prediction is None:
        return []
    if isinstance(prediction, torch.Tensor):
        if prediction.ndim not in (1, 2) or prediction.is_floating_point() or prediction.is_complex():
            found = f"{prediction.dtype} of shape {list(prediction.shape)}"
            raise InputError(f"prediction is {found}: give ids, [L] or [B, L], or text")
        prediction = prediction.tolist()
    if isinstance(prediction, Mapping) or not isinstance(prediction, Sequence):
        raise InputError(f"prediction is of type {type(prediction).__name__}: give text, or ids, or one per prompt")
    is_one = isinstance(prediction, str) or all(_is_id(token) for token in prediction)
    return [_ids_of(one, tokenizer) for one in ([prediction] if is_one else prediction)]


def _ids_of(one: Any, tokenizer: Any) -> list[int]:
    if isinstance(one, str):
        if tokenizer is None:
            raise InputError("prediction is text, which takes a tokenizer: give tokenizer=..., or its ids")
        one = tokenizer(one, add_special_tokens=False)["input_ids"]
    ids = one.tolist() if isinstance(one, torch.Tensor) else one
    if not isinstance(ids, Sequence) or not all(_is_id(token) for token in ids):
        raise InputError(f"prediction has {one!r:.60}: give text or ids, one per prompt")
    return list(ids)


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool)


def refuse_adapter_arguments(arguments: dict[str, Any], where: str) -> None:
    """Raise `UnsupportedArgumentError` for arguments that PEFT applies only while `model.generate` runs.

    Here that returns before the first pass; `where` names the function or class that decodes afterwards.
    """
    for name in ("adapter_names", "alora_offsets", "task_ids"):
        if arguments.get(name) is not None:
            what = f"{name} cannot be used with {where}: PEFT applies it only while model.generate runs"
            raise UnsupportedArgumentError(what, "choose the adapter with set_adapter, or use lade.generate")


def refuse_adapter_hooks(model: PreTrainedModel, where: str) -> None:
    """Raise `UnsupportedArgumentError` if PEFT's per-call hooks are installed on the model."""
    peft = adapters()
    if peft is not None:
        refuse_adapter_arguments(dict.fromkeys(peft.call_values(model), True), where)


def clean_up(model: Any) -> None:
    """Remove PEFT's per-call hooks from a model whose generation has failed."""
    model = unwrap(model)
    if isinstance(model, nn.Module) and (peft := adapters()) is not None:
        peft.remove_call_hooks(model)
