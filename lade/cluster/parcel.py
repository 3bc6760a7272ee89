"""Results, errors and arguments on their way from the first process to the others."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import torch

from lade.errors import ClusterError


def packed(thing: Any) -> bytes:
    """Anything that can be pickled, tensors in it included."""
    buffer = BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device) -> Any:
    """What `packed` was given, its tensors on this process's device; the CPU's stay there."""

    def moved(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else storage.to(device=device)

    return torch.load(BytesIO(data), map_location=moved, weights_only=False)


def sendable(problem: BaseException) -> BaseException:
    """The error itself, where it can be pickled; else one of ours with its words."""
    try:
        copy = pickle.loads(pickle.dumps(problem))
    except Exception:  # noqa: BLE001 - any class may fail in its own way, and the words are enough
        copy = None
    if type(copy) is type(problem) and str(copy) == str(problem):
        return problem
    return ClusterError(f"process 0 failed with {type(problem).__name__}: {problem}")


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Of torch's generators that a generation on this device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_generator_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Have the generators go on as those of another process."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
