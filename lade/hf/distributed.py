"""Generation in several processes that share one model.

The arguments of the first process count, and user code is called there alone: processors, criteria, streamers, a
memory. All processes return its result, and torch's generators advance alike in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from lade.backends.processes import channel, team
from lade.backends.processes.follower import DismissedError, PlainDecode
from lade.backends.processes.leader import Leader
from lade.errors import ClusterError, UnsupportedArgumentError, UnsupportedModelError
from lade.hf.plain import generate_plainly
from lade.model.facts import CACHE, tensor_parallel_size
from lade.model.prepared import argument_of
from lade.model.supports import unwrap
from lade.stats import Step

T = TypeVar("T")

_SPLIT = "a model that several processes decode"
_PER_PROCESS = {
    CACHE: "each of them needs a cache of its own",
    "assistant_model": "the others do not take part in its passes",
}


def leader_of(model: Any) -> Leader | None:
    """Return the leader of the other processes for the present call of this one; None if this process decodes alone.

    Args:
        model: the model inside any wrapper.
    """
    return team.leader_of(model) if isinstance(model, PreTrainedModel) else None


def led_by_this_process(model: Any) -> team.LedCall | None:
    """Begin a call led by this process for all that decode a model, and return it; None if it decodes alone."""
    return team.led_by_this_process(model) if isinstance(model, PreTrainedModel) else None


def _has_parts(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and team.has_parts(model)


def follow(model: Any) -> Any:
    """Take part in the next call of the first process, and return its result.

    For scripts in which only the first process has work, such as serving a `lade.Engine`, whose `close` ends its call.
    In the other processes a call of `lade.generate` is equivalent to `lade.follow`.

        if dist.get_rank() == 0:
            with lade.Engine(model) as engine: ...
        else:
            lade.follow(model)

    Args:
        model: a model whose layers are sharded over processes, or one made by `lade.parallel`.

    Raises:
        UnsupportedModelError: this process decodes it alone, or is the first one.
        ClusterError: the processes have diverged, or one of them is gone.
        Exception: any error of the call in the first process.
    """
    inner = unwrap(model)
    own = team.team_of(inner) if isinstance(inner, PreTrainedModel) else None
    if own is None or own.leads:
        reason = "decoded by this process alone" if own is None else "led by this process, the first one"
        raise UnsupportedModelError(f"{type(inner).__name__}: it is {reason}", "call lade.follow in the others")
    return team.follow_call(own, inner, _plainly(model))


def follow_until_dismissed(model: Any) -> None:
    """Take part in all calls of the first process until it dismisses this one; errors of the calls are ignored here."""
    while True:
        try:
            follow(model)
        except DismissedError:
            return
        except ClusterError:
            raise
        except BaseException:
            if not channel.is_connected():
                raise


def is_shared(model: Any) -> bool:
    """Return whether calls are made together with other processes."""
    inner = unwrap(model)
    return isinstance(inner, PreTrainedModel) and team.team_of(inner) is not None


def call_together(model: Any, call: Callable[[], T]) -> T:
    """Make a call together with the other processes of a model."""
    inner = unwrap(model)
    return team.together(inner, lambda: _without_cache(call(), inner), _plainly(model))


def stream_together(model: Any, begin: Callable[[], Iterator[Step]]) -> Iterator[Step]:
    """Stream steps together with the other processes of a model."""
    return team.steps_together(unwrap(model), begin, _plainly(model))


@contextmanager
def sharing_plainly(model: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Send the arguments to a model's other processes, which decode plainly while the context lasts.

    Raises:
        UnsupportedArgumentError: the arguments cannot be sent, or limit the time.
    """
    inner = unwrap(model)
    leader = leader_of(inner)
    if leader is None or _has_parts(inner):  # the first process has the whole model and decodes alone
        yield
        return
    remedy = "leave it out, or give arguments that lookahead decoding serves"
    if argument_of(inner, arguments, "max_time") is not None:
        raise UnsupportedArgumentError(f"max_time cannot be used with plain decoding of {_SPLIT}", remedy)
    try:
        sent = channel.packed(dict(arguments))
    except Exception as problem:
        reason = f"arguments that cannot be pickled ({problem}) cannot be used with plain decoding of {_SPLIT}"
        raise UnsupportedArgumentError(reason, remedy) from problem
    with leader.announced("plain", sent, channel.generator_states(inner.device)):
        yield


def refuse_shared(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedArgumentError` for arguments that each of the processes would need a counterpart of."""
    given = [name for name in _PER_PROCESS if arguments.get(name) is not None]
    if given and leader_of(unwrap(model)) is not None:
        name = given[0]
        raise UnsupportedArgumentError(f"{name} cannot be used with {_SPLIT}: {_PER_PROCESS[name]}", "leave it out")


def refuse_unshared(model: PreTrainedModel) -> None:
    """Raise `UnsupportedArgumentError` if a sharded model is decoded without its other processes taking part."""
    if tensor_parallel_size(model) > 1 and leader_of(model) is None:
        raise UnsupportedArgumentError(
            f"custom_generate=lade.decode cannot be used with {_SPLIT}", "call lade.generate, or lade.enable(model)"
        )


def refuse_shared_steps(model: Any) -> None:
    """Raise `UnsupportedArgumentError` for streamed plain decoding, which cannot be stopped in all processes."""
    inner = unwrap(model)
    if leader_of(inner) is not None and not _has_parts(inner):
        raise UnsupportedArgumentError(
            f"lade.stream decodes plainly here, and cannot do so with {_SPLIT}", "call lade.generate"
        )


def _plainly(model: Any) -> PlainDecode:
    return lambda arguments: generate_plainly(model, None, None, arguments)


def _without_cache(output: T, model: PreTrainedModel) -> T:
    """Return an output object without its cache, of which each process has only a part."""
    if not isinstance(output, ModelOutput) or leader_of(model) is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != CACHE})
