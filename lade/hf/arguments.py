"""Arguments of `model.generate`, checked before it prepares anything, and the unpatched `model.generate`.

Nearly all checks are made on what `model.generate` has prepared, in `lade.hf.refusals`. Here are those that cannot wait
so long: of arguments that transformers keeps to itself or stumbles over before it calls a callable.
"""

from __future__ import annotations

import copy
import functools
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from lade.errors import ConfigError, InputError, UnsupportedArgumentError, UnsupportedModelError
from lade.hf.refusals import check_shape, refuse
from lade.model import joint
from lade.model.capture_blockers import GIVE_INSIDE, wraps_model
from lade.model.facts import needs_synced_passes
from lade.model.prepared import REMEDY, argument_of, holds_media, prompts_in
from lade.model.support.supports import PLAIN_REMEDY, supports, unwrap
from lade.stats import Stats

REPLACED = "_generate_before_lade"
"""Where an enabled model keeps a `generate` that was an attribute of its own before."""

_decoded_plainly: ContextVar[Any] = ContextVar("_decoded_plainly", default=None)
"""The innermost model whose `generate` is not to be accelerated in this context."""


@contextmanager
def original_generate(model: Any) -> Iterator[Callable[..., Any]]:
    """While it is entered, the `generate` that it yields decodes plainly, whether or not the model is enabled.

    That holds for the models inside PEFT's and other wrappers as well, and for this thread alone.

    >>> with original_generate(model) as generate:
    ...     output = generate(**inputs)
    """
    token = _decoded_plainly.set(unwrap(model))
    try:
        yield model.generate
    finally:
        _decoded_plainly.reset(token)


def check_generate(model: Any) -> None:
    """Raise `UnsupportedModelError` for a model whose checkpoint brings a way of decoding of its own.

    Transformers puts that in place of `generate` when it loads the model. It need not take `custom_generate=`.
    """
    model = unwrap(model)
    attributes = getattr(model, "__dict__", {})
    own = attributes.get(REPLACED, attributes.get("generate"))
    if isinstance(own, functools.partial) and own.keywords.get("model") is model and not _is_our_recipe(own.func):
        reason = f"{type(model).__name__} decodes by the custom_generate of its checkpoint"
        raise UnsupportedModelError(reason, PLAIN_REMEDY)


def _is_our_recipe(function: Any) -> bool:
    """Whether it is the `generate` that `lade export-recipe` writes, which hands a callable on."""
    return getattr(function, "__globals__", {}).get("PACKAGE") == "lookahead-decoding"


def is_decoded_plainly(model: Any) -> bool:
    """Whether an `original_generate` of this model, or of a wrapper around it, is running."""
    return _decoded_plainly.get() is unwrap(model)


KEPT = {
    "assistant_model": "asks for another way of decoding beside lookahead",
    "prompt_lookup_num_tokens": "asks for another way of decoding beside lookahead",
    "custom_generate": "asks for another way of decoding beside lookahead",
    "synced_gpus": "has all ranks make as many passes as the slowest one",
}
"""Arguments that transformers does not pass to a callable, and what they do."""


def arguments_for_callable(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which `model.generate` comes to a callable, and the callable gets all that it needs.

    Args:
        model: the model as the caller has it.
        arguments: by name, as the caller gave them.

    Raises:
        UnsupportedModelError, UnsupportedArgumentError: they never come there.
        InputError: transformers would stumble over the prompt.
    """
    inner = unwrap(model)
    if getattr(type(inner), "generate", None) is not GenerationMixin.generate:
        supports(model).require()  # a `generate` of its own may do anything with our callable, or not be there at all
    if needs_synced_passes(inner):  # of which a callable hears nothing, and has to see to itself
        supports(model).require()
    check_generate(model)
    for name, what in KEPT.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise UnsupportedArgumentError(f"{name}={value} {what}" if value is True else f"{name} {what}", REMEDY)
    if arguments.get("cache_implementation") == "paged":
        raise UnsupportedArgumentError("cache_implementation='paged' asks for continuous batching", REMEDY)
    if argument_of(inner, arguments, "token_healing"):
        refuse("token_healing=True", "transformers does not pass on the tokenizer that it needs")
    encoding = inner.config.is_encoder_decoder  # then the encoder may be fed anything
    if not encoding and holds_media(arguments):  # for which transformers runs another encoder before a callable
        supports(model).require()
    ids = arguments.get("inputs", arguments.get("input_ids"))
    if isinstance(ids, torch.Tensor) and not encoding and arguments.get("inputs_embeds") is None:
        check_shape(ids)
    return _with_stop_strings(inner, arguments)


def num_beams(model: Any, arguments: Mapping[str, Any]) -> int:
    """How many beams `model.generate` would search with, given these arguments."""
    return argument_of(model, arguments, "num_beams") or 1


def refuse_streamed_beams(beams: int, streamer: object = None) -> None:
    """Raise `UnsupportedArgumentError` for a streamed search of several beams, plain or not.

    Raises:
        ConfigError: there is a `streamer`, and it is none.
    """
    if streamer is not None:
        check_streamer(streamer)
    if beams > 1:
        raise UnsupportedArgumentError(
            f"num_beams={beams} cannot be streamed: which beam wins is known only at its end",
            "use lade.generate without a streamer, or num_beams=1",
        )


def check_decode(stats: object) -> None:
    """Check what `lade.decode` is given beside what transformers has prepared; raises like the two that it calls."""
    _refuse_unseen_streamer()
    check_stats(stats)


def _refuse_unseen_streamer() -> None:
    """Raise `UnsupportedArgumentError` for the `streamer=` of a `model.generate` that has called `lade.decode`.

    Transformers keeps it to itself and never ends it: who reads a `TextIteratorStreamer` would wait for ever. To a
    callable it passes nothing that tells of it, in none of 5.17 to 5.23, so this looks where it is: among the local
    variables of the innermost `generate`. Nothing is served by that, and what is found is ended.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_generate(frame):
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


def _is_generate(frame: FrameType) -> bool:
    """Whether a frame is of transformers' `GenerationMixin.generate`."""
    return frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == GenerationMixin.__module__


def refuse_streamed_rows(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedArgumentError` for several rows in one `lade.stream`."""
    prompts = prompts_in(arguments)
    rows = prompts.shape[0] if isinstance(prompts, torch.Tensor) and prompts.ndim > 1 else 1
    rows *= argument_of(model, arguments, "num_return_sequences") or 1
    if rows > 1:
        raise UnsupportedArgumentError(f"a batch of {rows} rows cannot be streamed", "stream one at a time")


def refuse_streamed_segments(model: Any) -> None:
    """Raise `UnsupportedArgumentError` for a model whose `generate` decodes a sound segment by segment (Whisper)."""
    own = getattr(type(model), "generate", None) is not GenerationMixin.generate
    if own and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedArgumentError(
            f"{type(model).__name__} decodes segment by segment and cannot be streamed",
            'use lade.generate, or lookahead="auto", which streams plain decoding',
        )


def refuse_without_generate(model: Any) -> None:
    """Raise `UnsupportedModelError` for what decodes in no way at all."""
    if not callable(getattr(model, "generate", None)):
        remedy = GIVE_INSIDE if wraps_model(model) else "give a transformers language model"
        raise UnsupportedModelError(f"{type(model).__name__} has no generate", remedy)


def check_stats(stats: object) -> None:
    """Raise `ConfigError` for what figures cannot be added to."""
    if not isinstance(stats, Stats | None):
        raise ConfigError("stats", stats, "give a lade.Stats, or None")


def check_streamer(streamer: object) -> None:
    """Raise `ConfigError` for what tokens cannot be put into."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ConfigError("streamer", streamer, "give a streamer of transformers, or what has its put and end")


def check_call(model: Any, arguments: Mapping[str, Any], stats: object) -> None:
    """Check what `lade.generate` and `lade.stream` are given before anything is prepared.

    Raises:
        UnsupportedModelError: the model is none that generates.
        ConfigError: `stats` is none.
        InputError: the prompt is no tensor of ids, such as a text.
    """
    refuse_without_generate(model)
    check_stats(stats)
    for name in ("inputs", "input_ids"):
        if not isinstance(value := arguments.get(name), torch.Tensor | None):
            raise InputError(why_no_ids(name, value))


def why_no_ids(name: str, value: object) -> str:
    """What is wrong with a prompt that is no tensor of ids, and the remedy."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    if isinstance(first, str):
        return (
            f"{name} is a text, {reprlib.repr(first)}: encode it with the tokenizer: "
            'tokenizer(text, return_tensors="pt").input_ids'
        )
    if isinstance(value, Mapping):
        return f"{name} is a {type(value).__name__}: give what it holds as arguments, **{name}"
    return f"{name} is a {type(value).__name__}: give ids as an int64 tensor [batch, length]"


def _with_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with `stop_strings` as a criterion, since transformers hands a callable no tokenizer for them.

    They may come from a generation_config as well. Without a tokenizer they stay, for transformers to ask for one.
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
        changed["stop_strings"] = None  # an argument goes before what the model's generation_config says
    return changed


def refuse_autocast(model: Any) -> None:
    """Raise `UnsupportedModelError` where autocast asks a packed model for another dtype, as every pass of it would."""
    cpu = joint.loaded("cpu") if torch.is_autocast_enabled("cpu") else None
    if cpu is not None:
        cpu.refuse_autocast(model)
