"""Random numbers drawn by one thread, separated from the generators that the process shares.

Saving and restoring the state of a shared generator would undo the draws of other threads. So torch operations that
draw are intercepted in this thread alone: they are refused, or given another generator.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

_TRIALS = 3
_RATES = ("dropout_p", "dropout")


class RandomModelError(ValueError):
    """A model draws random numbers, so that two passes over the same tokens differ."""


def without_draws(trial: Callable[[], T]) -> T:
    """Run a trial that must not draw random numbers, and return its result.

    Python's and NumPy's generators cannot be watched per thread. So if one of them has advanced, the trial is repeated:
    other threads draw now and then, a random model in each pass. Only a random model's draws from them are undone.

    Args:
        trial: passes of a model; called up to three times.

    Raises:
        RandomModelError: the trial draws random numbers; of torch's generators, none was advanced by it.
    """
    first = states = _generator_states()
    for _ in range(_TRIALS):
        with DrawsFrom(None):
            result = trial()
        before, states = states, _generator_states()
        if states == before:
            return result
    random.setstate(first[0])
    np.random.set_state(pickle.loads(first[1]))
    raise RandomModelError("its passes draw random numbers")


class DrawsFrom(TorchDispatchMode):
    """Context in which this thread draws its random numbers from a separate generator.

    >>> with DrawsFrom(torch.Generator().manual_seed(7)):
    ...     layer = torch.nn.Linear(8, 8)  # the weights that torch.manual_seed(7) would give it

    Args:
        generator: a CPU generator; None forbids drawing.

    Raises:
        RandomModelError: an operation would draw although `generator` is None.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func, args, kwargs):
            if self._generator is None:
                raise RandomModelError("its passes draw random numbers")
            func, kwargs = _with_generator(func), {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this call of an operation draws from a generator that the process shares."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    declared = func._schema.arguments
    given = {each.name: each.default_value for each in declared}
    given.update(zip(given, args, strict=False), **kwargs)
    rates = [given[name] for name in (*_RATES, *(("p",) if "dropout" in func.__name__ else ())) if name in given]
    return given.get("generator") is None and given.get("train") is not False and 0.0 not in rates


def _with_generator(func: Any) -> Any:
    """Return the overload of an operation that takes a generator."""
    wanted = {**_types(func), "generator": "Optional[Generator]"}
    forms = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next(form for form in forms if _types(form) == wanted)


def _types(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}


def _generator_states() -> tuple[Any, bytes]:
    """Return the states of Python's generator and of NumPy's legacy one, pickled to be comparable."""
    return random.getstate(), pickle.dumps(np.random.get_state())
