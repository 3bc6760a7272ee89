"""Notices random numbers that a model draws, and takes the draws back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lade.model.runner import input_device

Generator = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How the state of a generator is read, and how it is set."""


@dataclass
class Draws:
    """What happened while it was watched.

    Attributes:
        happened: whether any random number was drawn.
    """

    happened: bool = False


@contextmanager
def watch_draws(model: PreTrainedModel) -> Iterator[Draws]:
    """Watch the generators of Python, NumPy, and torch on the model's devices; at the end they are as they were."""
    generators = list(_generators(model))
    states = [read() for read, _ in generators]
    draws = Draws()
    try:
        yield draws
    finally:
        for (read, write), state in zip(generators, states, strict=True):
            draws.happened |= not _same(read(), state)
            write(state)


def _generators(model: PreTrainedModel) -> Iterator[Generator]:
    yield random.getstate, random.setstate
    yield np.random.get_state, np.random.set_state
    yield torch.random.get_rng_state, torch.random.set_rng_state
    devices = {input_device(model), *(parameter.device for parameter in model.parameters())}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            yield partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)


def _same(state: Any, other: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(state, tuple):
        return all(map(_same, state, other))
    return torch.equal(state, other) if isinstance(state, torch.Tensor) else bool(np.array_equal(state, other))
