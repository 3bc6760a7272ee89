"""Generation in several processes that share one model.

The arguments of the first process count, and user code is called there alone: processors, criteria, streamers, a
memory. All processes return its result, and torch's generators advance alike in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from lade.backends.processes import team
from lade.backends.processes.backend import SHARED
from lade.backends.processes.follower import DismissedError, PlainDecode
from lade.errors import ClusterError, UnsupportedArgumentError, UnsupportedModelError
from lade.hf.plain import generate_plainly
from lade.model.facts import CACHE, with_present_cache_name
from lade.model.supports import unwrap

_PER_PROCESS = {  # arguments that each of the processes would need a counterpart of
    CACHE: "each of them needs a cache of its own",
    "assistant_model": "the others do not take part in its passes",
}


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
            if not dist.is_initialized():
                raise


def together(model: Any, call: Callable[[], Any], arguments: Mapping[str, Any], *, streams: bool) -> Any:
    """Make a call, or one that streams steps, together with the other processes of a model, if there are any."""
    inner = unwrap(model)

    def led() -> Any:
        leads = team.leader_of(inner) is not None
        given = with_present_cache_name(arguments)
        name = next((name for name in _PER_PROCESS if given.get(name) is not None), None)
        if leads and name is not None:
            raise UnsupportedArgumentError(f"{name} cannot be used with {SHARED}: {_PER_PROCESS[name]}", "leave it out")
        output = call()
        if leads and isinstance(output, ModelOutput):  # each process has only a part of the cache
            return type(output)(**{name: value for name, value in output.items() if name != CACHE})
        return output

    lead = team.steps_together if streams else team.together
    return lead(inner, led, _plainly(model))


def _plainly(model: Any) -> PlainDecode:
    return lambda arguments: generate_plainly(model, None, None, arguments)
