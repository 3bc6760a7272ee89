"""`lade.enable`: for callers that cannot be given another function, `model.generate` itself is accelerated.

The model gets an attribute `generate`, a method of its own in place of its class's. It is bound to the model as any
method is, so that `copy.deepcopy` makes an enabled copy that decodes with its own weights, while a pickled model comes
back as it was before; `save_pretrained` and `state_dict` know nothing of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

from transformers import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from lade.config import Lookahead
from lade.hf.arguments import (
    REPLACED,
    check_generate,
    check_stats,
    check_streamer,
    is_decoded_plainly,
    refuse_without_generate,
)
from lade.hf.generate import generate
from lade.hf.refusals import resolve
from lade.model.support.supports import supports
from lade.stats import Stats

ModelT = TypeVar("ModelT")


def enable(model: ModelT, lookahead: Lookahead = "auto", *, stats: Stats | None = None) -> ModelT:
    """Accelerate every later `model.generate` of this model, also by pipelines, trainers and frameworks.

    The tokens stay those of plain `model.generate`, in 16 bits up to near ties (`lade.PrecisionWarning`). Streamers and
    `stop_strings` work, which transformers does not pass on to `custom_generate=lade.decode`; a streamer is ended after
    an error, too. One call can be given settings of its own: `model.generate(**inputs, lookahead=None)`.

    >>> lade.enable(model)
    >>> transformers.pipeline("text-generation", model, tokenizer=tokenizer)("Once upon a time")

    Args:
        model: a transformers causal language model, or one wrapped by PEFT or `torch.compile`. One that is enabled
            already takes the new settings.
        lookahead: as in `lade.generate`. With "auto", calls that cannot be served exactly, or ask for another way of
            decoding (`custom_generate=`, `assistant_model=`), are left to plain `model.generate`, with one
            `FallbackWarning`; with a `LookaheadConfig` they raise.
        stats: is added to by every call.

    Returns:
        The same model.

    Raises:
        ConfigError: `lookahead` is none of the three, or `stats` is none.
        UnsupportedModelError: the model has no `generate`, or cannot be served with this `LookaheadConfig`.
    """
    config, may_fall_back = resolve(lookahead)
    refuse_without_generate(model)
    check_stats(stats)
    if config is not None and not may_fall_back:
        supports(model).require()
        check_generate(model)
    owner = _owner(model)
    present = _attributes(owner).get("generate")
    if present is not None and not _is_accelerated(present):
        setattr(owner, REPLACED, present)
    owner.generate = MethodType(Accelerated(type(owner).generate, lookahead, stats), owner)
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `lade.enable`, also for a model that PEFT or `torch.compile` wrap; of any other model nothing changes.

    Returns:
        The same model.
    """
    for owner in _owners(model):
        if _is_accelerated(_attributes(owner).get("generate")):
            del owner.generate
            if REPLACED in vars(owner):
                owner.generate = getattr(owner, REPLACED)
                delattr(owner, REPLACED)
    return model


class Accelerated:
    """The function of an enabled model's `generate`, called with the model as its first argument.

    Args:
        wrapped: the `generate` of the model's class.
        lookahead: as in `lade.generate`.
        stats: is added to.
    """

    __name__ = "generate"  # a method is pickled as the attribute of this name, which will be the class's own

    def __init__(self, wrapped: Callable[..., Any], lookahead: Lookahead, stats: Stats | None) -> None:
        self.__wrapped__, self.__doc__ = wrapped, wrapped.__doc__
        self.lookahead, self.stats = lookahead, stats

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """What `model.generate` returns for these arguments."""
        if is_decoded_plainly(model) or _is_ours(kwargs.get("custom_generate")):
            original = vars(model).get(REPLACED) or MethodType(type(model).generate, model)
            return original(*args, **kwargs)
        arguments = {
            "lookahead": self.lookahead,
            "stats": self.stats,
            **_by_name(self.__wrapped__, model, *args, **kwargs),
        }
        streamer = arguments.pop("streamer", None)
        if streamer is None:
            return generate(model, **arguments)
        check_streamer(streamer)
        ending = EndingStreamer(streamer)
        try:
            return generate(model, streamer=ending, **arguments)
        finally:
            ending.close()


class EndingStreamer(BaseStreamer):
    """Passes on to a streamer, and ends it once: a `TextIteratorStreamer` without an end is read forever."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer, self._ended = streamer, False

    def put(self, value: Any) -> None:
        """The prompt `[B, L]`, then tokens `[B]`."""
        self._streamer.put(value)

    def end(self) -> None:
        """The text is complete."""
        self._ended = True
        self._streamer.end()

    def close(self) -> None:
        """End it, unless that is done."""
        if not self._ended:
            self.end()


def _owner(model: Any) -> Any:
    """What has the attributes of a model: `torch.compile`'s wrapper keeps none itself."""
    return (getattr(model, "_modules", None) or {}).get("_orig_mod", model)


def _owners(model: Any) -> Iterator[Any]:
    """From the outermost wrapper to the model itself, all whose `generate` may have been replaced."""
    owner = _owner(model)
    yield owner
    inner = owner.get_base_model() if hasattr(owner, "get_base_model") else owner
    if inner is not owner:
        yield from _owners(inner)


def _attributes(owner: Any) -> dict[str, Any]:
    """Its own, without those of its class; none of what can have none."""
    return getattr(owner, "__dict__", {})


def _is_accelerated(function: Any) -> bool:
    return isinstance(getattr(function, "__func__", None), Accelerated)


def _is_ours(custom_generate: Any) -> bool:
    """Whether a callable for `custom_generate=` is this library's, such as `lade.decode`."""
    function = custom_generate.func if isinstance(custom_generate, functools.partial) else custom_generate
    return str(getattr(function, "__module__", "")).partition(".")[0] == "lade"


def _by_name(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `generate`, positional ones under their names: its own, or those of transformers."""
    signature = inspect.signature(function)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values()):
        signature = inspect.signature(GenerationMixin.generate)
    bound = signature.bind_partial(model, *args, **kwargs).arguments
    rest: dict[str, Any] = bound.pop("kwargs", {})
    return {name: value for name, value in bound.items() if name != "self"} | rest
