"""`lade.enable`: accelerate `model.generate` itself, for callers that cannot be given another function.

The model gets an instance attribute `generate` in place of its class's method. It is a bound method, so `copy.deepcopy`
makes an enabled copy that uses its own weights, while a pickled model comes back unchanged; `save_pretrained` and
`state_dict` are not affected.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

from transformers import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from lade.announcements import announce
from lade.config import Lookahead, resolve
from lade.hf.call import (
    REPLACED,
    check_generate,
    check_stats,
    check_streamer,
    is_decoded_plainly,
    refuse_without_generate,
)
from lade.hf.generate import generate
from lade.model.facts import is_invariant
from lade.model.supports import supports, unwrap
from lade.stats import Stats

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT")
_MADE_EXACT = "_lade_made_exact"
"""Attribute of a model that `enable` made invariant, and `disable` makes as it was."""


def enable(model: ModelT, lookahead: Lookahead = "auto", *, stats: Stats | None = None, exact: bool = False) -> ModelT:
    """Accelerate every later `model.generate` of this model, including calls by pipelines, trainers and frameworks.

    The tokens stay those of plain `model.generate`; in 16-bit, output can diverge where two tokens score almost equally
    (`lade.PrecisionWarning`). Streamers and `stop_strings` work, which transformers does not forward to
    `custom_generate=lade.decode`; a streamer is ended even after an error. A single call can override the settings:
    `model.generate(**inputs, lookahead=None)`.

    >>> lade.enable(model)
    >>> transformers.pipeline("text-generation", model, tokenizer=tokenizer)("Once upon a time")

    Args:
        model: a transformers causal language model, or one wrapped by PEFT or `torch.compile`. A model that is enabled
            already takes the new settings.
        lookahead: settings as in `lade.generate`. With "auto", calls that cannot be served exactly, or ask for another
            decoding method (`custom_generate=`, `assistant_model=`), fall back to plain `model.generate`, with one
            `FallbackWarning`; with a `LookaheadConfig` they raise.
        stats: figures that every call adds to; None for none.
        exact: make a model in 16 bits, int8 or int4 batch-invariant, so that its text does not depend on the drafts,
            see `lade.invariant`. That text is the invariant kernels' own, with and without drafts; it can differ from
            that of before. `disable` undoes it. A model in float32 or float64 is left as it is.

    Returns:
        The same model.

    Raises:
        ConfigError: `lookahead` is none of the three, or `stats` is not a `Stats`.
        UnsupportedModelError: the model has no `generate`, or cannot be served with this `LookaheadConfig`, or cannot
            be made invariant.
    """
    config, may_fall_back = resolve(lookahead)
    refuse_without_generate(model)
    check_stats(stats)
    if exact:
        _make_exact(model)
    if config is not None and not may_fall_back:
        supports(model).require()
        check_generate(unwrap(model))
    owner = _owner(model)
    present = _attributes(owner).get("generate")
    if present is not None and not _is_accelerated(present):
        setattr(owner, REPLACED, present)
    owner.generate = MethodType(Accelerated(type(owner).generate, lookahead, stats), owner)
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `lade.enable`, also inside wrappers of PEFT or `torch.compile`; other models are left unchanged.

    Returns:
        The same model.
    """
    inner = unwrap(model)
    if _MADE_EXACT in _attributes(inner):
        from lade.backends.cpu.invariant.make_invariant import variant

        variant(inner)
        delattr(inner, _MADE_EXACT)
    for owner in _owners(model):
        if _is_accelerated(_attributes(owner).get("generate")):
            del owner.generate
            if REPLACED in vars(owner):
                owner.generate = getattr(owner, REPLACED)
                delattr(owner, REPLACED)
    return model


def _make_exact(model: Any) -> None:
    """Make a model invariant that rounds visibly and is not invariant yet; tell what its text is now."""
    from lade.backends.cpu.invariant.make_invariant import invariant
    from lade.backends.cpu.packing.pack import rounds_visibly

    inner = unwrap(model)
    if not rounds_visibly(inner):
        return
    was_invariant = is_invariant(inner)
    invariant(inner)  # tried again if it was, since the number of threads may have changed
    if was_invariant:
        return
    setattr(inner, _MADE_EXACT, True)
    announce(
        logger,
        f"the text of this {type(inner).__name__} is now that of batch-invariant kernels, with drafts and without: it "
        "can differ from before where two tokens score almost equally; lade.disable(model) undoes it",
    )


class Accelerated:
    """The function behind an enabled model's `generate`, called with the model as its first argument; see `enable`."""

    __name__ = "generate"  # a method is pickled by this name, and unpickled as the class's own

    def __init__(self, wrapped: Callable[..., Any], lookahead: Lookahead, stats: Stats | None) -> None:
        self.__wrapped__, self.__doc__ = wrapped, wrapped.__doc__
        self.lookahead, self.stats = lookahead, stats

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `model.generate` for these arguments."""
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
            ending.end()


class EndingStreamer(BaseStreamer):
    """Forwards to a streamer and ends it exactly once: without an end, a `TextIteratorStreamer` blocks forever."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer, self._ended = streamer, False

    def put(self, value: Any) -> None:
        """Forward the prompt `[B, L]`, then tokens `[B]`."""
        self._streamer.put(value)

    def end(self) -> None:
        """End the streamer unless that was done."""
        if not self._ended:
            self._ended = True
            self._streamer.end()


def _owner(model: Any) -> Any:
    """Return the object that holds a model's attributes: `torch.compile`'s wrapper has none of its own."""
    return (getattr(model, "_modules", None) or {}).get("_orig_mod", model)


def _owners(model: Any) -> Iterator[Any]:
    """Yield the objects, from the outermost wrapper to the model itself, whose `generate` may be replaced."""
    owner = _owner(model)
    yield owner
    inner = owner.get_base_model() if hasattr(owner, "get_base_model") else owner
    if inner is not owner:
        yield from _owners(inner)


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the instance attributes of an object; empty for one that can have none."""
    return getattr(owner, "__dict__", {})


def _is_accelerated(function: Any) -> bool:
    return isinstance(getattr(function, "__func__", None), Accelerated)


def _is_ours(custom_generate: Any) -> bool:
    """Return whether a callable for `custom_generate=` is this library's, such as `lade.decode`."""
    function = custom_generate.func if isinstance(custom_generate, functools.partial) else custom_generate
    return str(getattr(function, "__module__", "")).partition(".")[0] == "lade"


def _by_name(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of `generate` by name; its own signature, or that of transformers, names them."""
    signature = inspect.signature(function)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values()):
        signature = inspect.signature(GenerationMixin.generate)
    bound = signature.bind_partial(model, *args, **kwargs).arguments
    rest: dict[str, Any] = bound.pop("kwargs", {})
    return {name: value for name, value in bound.items() if name != "self"} | rest
